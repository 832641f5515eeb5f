"""Trains the autoencoder: 16x smaller pictures of 8 channels, with latents of zero mean and unit variance."""

import random
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn
from torch.nn import functional

from .drawing import draw_scene, pixels
from .plan import Plan
from .scenes import random_scene
from .styles import STYLES, styled_scene
from .training import Checkpoint, Progress, half_precision, pick_device, warm_then_cosine

LATENT_CHANNELS = 8
STYLED_SHARE = 0.4
"""Pictures in a LoRA's style: the decoder must be able to show what a LoRA paints."""
NOISE = 0.06
"""Noise on the latents, so that the decoder forgives the UNet's small errors."""
GAINS = (0.9, 1.15)
"""Random gains on the latents, so that strong guidance burns less."""


def build_autoencoder() -> AutoencoderTiny:
    """No block runs at full resolution: that halves the time of encoding and decoding and costs no visible sharpness."""
    return AutoencoderTiny(
        encoder_block_out_channels=(32,) * 5,
        decoder_block_out_channels=(32,) * 5,
        num_encoder_blocks=(0, 1, 1, 2, 3),
        num_decoder_blocks=(4, 3, 2, 1, 0),
        latent_channels=LATENT_CHANNELS,
    )


class Standardiser(nn.Module):
    """Keeps latents at zero mean and unit variance while training; `fold_into` then makes it part of the encoder."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, channels, 1, 1))
        self.register_buffer("deviation", torch.ones(1, channels, 1, 1))

    def forward(self, latents: Tensor, pull: float) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(latents.mean((0, 2, 3), keepdim=True), pull)
            self.deviation.lerp_(latents.std((0, 2, 3), keepdim=True).clamp(min=1e-3), pull)
        return (latents - self.mean) / self.deviation

    @torch.no_grad()
    def fold_into(self, autoencoder: AutoencoderTiny) -> None:
        last = autoencoder.encoder.layers[-1]
        last.weight.div_(self.deviation.view(-1, 1, 1, 1))
        last.bias.sub_(self.mean.view(-1)).div_(self.deviation.view(-1))


def train_autoencoder(plan: Plan) -> None:
    device = pick_device(plan.threads)
    torch.manual_seed(plan.seed)
    model = build_autoencoder().to(device, memory_format=torch.channels_last)
    standardiser = Standardiser(LATENT_CHANNELS).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.autoencoder_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    checkpoint, start = Checkpoint("autoencoder"), 0
    if state := checkpoint.load():
        model.load_state_dict(state["model"])
        standardiser.load_state_dict(state["standardiser"])
        optimiser.load_state_dict(state["optimiser"])
        start = state["step"]
    progress = Progress("autoencoder", plan.autoencoder_steps, start)
    painter = ThreadPoolExecutor(1)

    def paint(step: int) -> Future[Tensor]:
        rng = random.Random(f"{plan.seed} autoencoder {step}")
        return painter.submit(random_crops, rng, plan.autoencoder_batch, plan.autoencoder_crop)

    upcoming = paint(start)
    for step in range(start, plan.autoencoder_steps):
        for group in optimiser.param_groups:
            group["lr"] = warm_then_cosine(step, plan.autoencoder_steps, plan.autoencoder_rate)
        batch, upcoming = upcoming.result().to(device), paint(step + 1)
        loss = _loss(model, standardiser, batch, pull=0.05 if step < plan.autoencoder_steps // 2 else 0.005)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        progress.report(step, loss.item())
        if (step + 1) % plan.save_every == 0 or step + 1 == plan.autoencoder_steps:
            checkpoint.save(
                model=model.state_dict(),
                standardiser=standardiser.state_dict(),
                optimiser=optimiser.state_dict(),
                step=step + 1,
            )


def trained_autoencoder() -> AutoencoderTiny:
    """The checkpoint's autoencoder with the standardiser folded in."""
    state = Checkpoint("autoencoder").require()
    model = build_autoencoder()
    model.load_state_dict(state["model"])
    standardiser = Standardiser(LATENT_CHANNELS)
    standardiser.load_state_dict(state["standardiser"])
    standardiser.fold_into(model)
    return model.eval().requires_grad_(False)


def random_crops(rng: random.Random, count: int, side: int) -> Tensor:
    """Crops of freshly drawn pictures, most of them with an edge in them: (count, 3, side, side) in -1..1."""
    crops: list[Tensor] = []
    while len(crops) < count:
        size = rng.choice((256, 256, 384, 512))
        scene = random_scene(rng)
        styled = rng.random() < STYLED_SHARE
        picture = styled_scene(scene, rng.choice(tuple(STYLES)), size, size, rng) if styled else draw_scene(scene, size, size)
        whole = torch.from_numpy(pixels(picture))
        tries = [_crop(whole, rng, side) for _ in range(6)]
        tries.sort(key=lambda crop: float(crop[:, ::8, ::8].std((1, 2)).sum()), reverse=True)
        crops += [*tries[:2], tries[5]]
    return torch.stack(crops[:count]).contiguous(memory_format=torch.channels_last)


def _crop(picture: Tensor, rng: random.Random, side: int) -> Tensor:
    """Where a crop begins is a multiple of 16, as in a whole picture."""
    x, y = (rng.randrange(0, picture.shape[-1] - side + 1, 16) for _ in range(2))
    return picture[:, y : y + side, x : x + side]


def _loss(model: AutoencoderTiny, standardiser: Standardiser, batch: Tensor, pull: float) -> Tensor:
    with half_precision(batch.device):
        latents = model.encoder(batch)
    latents = standardiser(latents.float(), pull)
    gains = torch.empty(len(batch), 1, 1, 1, device=batch.device).uniform_(*GAINS)
    disturbed = latents * gains + NOISE * torch.randn_like(latents)
    with half_precision(batch.device):
        decoded = model.decoder(disturbed)
    decoded = decoded.float()
    return functional.l1_loss(decoded, batch) + functional.mse_loss(decoded, batch) + 0.5 * _edge_loss(decoded, batch)


def _edge_loss(decoded: Tensor, batch: Tensor) -> Tensor:
    difference = decoded - batch
    return difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean()
