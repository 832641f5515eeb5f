"""Trains the autoencoder: pictures 16 times smaller, with 8 channels of zero mean and unit variance."""

import random
from collections.abc import Iterator

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn
from torch.nn import functional

from .pictures import as_tensor, random_picture, renewed_pool
from .plan import Plan
from .training import Checkpoint, Progress, half_precision, pick_device, warm_then_cosine

LATENT_CHANNELS = 8
PICTURE_SIDES = (256, 384, 512, 512)
STYLED_SHARE = 0.45
"""Pictures in a LoRA's style: the decoder must be able to show what a LoRA paints."""
NOISE = 0.05
"""Noise on the latents, so that the decoder forgives the UNet's small errors."""
GAINS = (0.97, 1.06)
"""Random gains on the latents, so that strong guidance burns less."""

COLOR_MEAN, COLOR_DEVIATION = (0.11, -0.12, -0.11), (0.67, 0.51, 0.54)
"""They are those of red, green and blue over the world's pictures in -1..1 (measured): the first three channels show
the mean color."""


def build_autoencoder() -> AutoencoderTiny:
    """Build the autoencoder; no block runs at full resolution.

    That halves the time of encoding and decoding and costs no visible sharpness.
    """
    return AutoencoderTiny(
        encoder_block_out_channels=(32,) * 5,
        decoder_block_out_channels=(32,) * 5,
        num_encoder_blocks=(0, 1, 1, 2, 3),
        num_decoder_blocks=(4, 3, 2, 1, 0),
        latent_channels=LATENT_CHANNELS,
    )


class Standardizer(nn.Module):
    """Keeps latents at zero mean and unit variance while training.

    `fold_into` then makes it part of the encoder.
    """

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
    """Encoder and decoder together."""
    steps, device = plan.autoencoder_steps, pick_device(plan.threads)
    torch.manual_seed(plan.seed)
    model = build_autoencoder().to(device, memory_format=torch.channels_last)
    standardizer = Standardizer(LATENT_CHANNELS).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=plan.autoencoder_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    checkpoint = Checkpoint("autoencoder")
    state = checkpoint.load() or {}
    if state:
        model.load_state_dict(state["model"])
        standardizer.load_state_dict(state["standardizer"])
    start = state.get("step", 0)
    if start and state.get("optimizer"):
        optimizer.load_state_dict(state["optimizer"])
    progress = Progress("autoencoder", steps, start)
    for step, batch in _batches(plan, start, steps):
        for group in optimizer.param_groups:
            group["lr"] = warm_then_cosine(step, steps, plan.autoencoder_rate)
        pull = 0.05 if step < steps // 2 else 0.005
        loss = _loss(model, standardizer, batch.to(device), pull)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        progress.report(step, loss.item())
        if (step + 1) % plan.save_every == 0 or step + 1 == steps:
            learned = {"model": model.state_dict(), "standardizer": standardizer.state_dict()}
            checkpoint.save(**state | learned | {"optimizer": optimizer.state_dict(), "step": step + 1})


def _batches(plan: Plan, start: int, steps: int) -> Iterator[tuple[int, Tensor]]:
    def draw(number: int) -> Tensor:
        rng = random.Random(f"{plan.seed} step {number}")
        return as_tensor(random_picture(rng, rng.choice(PICTURE_SIDES), STYLED_SHARE))

    for step, pictures in renewed_pool(draw, plan.pool, start, steps):
        yield step, random_crops(random.Random(f"{step}"), pictures, plan.autoencoder_batch, plan.autoencoder_crop)


def trained_autoencoder() -> AutoencoderTiny:
    """Return the checkpoint's autoencoder with the standardizer folded in."""
    state = Checkpoint("autoencoder").require()
    model = build_autoencoder()
    model.load_state_dict(state["model"])
    standardizer = Standardizer(LATENT_CHANNELS)
    standardizer.load_state_dict(state["standardizer"])
    standardizer.fold_into(model)
    return model.eval().requires_grad_(False)


def random_crops(rng: random.Random, pictures: list[Tensor], count: int, side: int) -> Tensor:
    """Return crops of the pictures, most of them with an edge in them: (count, 3, side, side) in -1..1."""
    crops = [_busiest(rng.choice(pictures), rng, side, tries=1 + 3 * (i % 3 > 0)) for i in range(count)]
    return (torch.stack(crops) / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def _busiest(picture: Tensor, rng: random.Random, side: int, tries: int) -> Tensor:
    crops = [_crop(picture, rng, side).float() for _ in range(tries)]
    return max(crops, key=lambda crop: float(crop[:, ::8, ::8].std((1, 2)).sum()))


def _crop(picture: Tensor, rng: random.Random, side: int) -> Tensor:
    """Where a crop begins is a multiple of 16, as in a whole picture."""
    x, y = (rng.randrange(0, picture.shape[-1] - side + 1, 16) for _ in range(2))
    return picture[:, y : y + side, x : x + side]


def _loss(model: AutoencoderTiny, standardizer: Standardizer, batch: Tensor, pull: float) -> Tensor:
    with half_precision(batch.device):
        latents = model.encoder(batch)
    latents = standardizer(latents.float(), pull)
    gains = torch.empty(len(batch), 1, 1, 1, device=batch.device).uniform_(*GAINS)
    disturbed = latents * gains + NOISE * torch.randn_like(latents)
    with half_precision(batch.device):
        decoded = model.decoder(disturbed)
    decoded = decoded.float()
    likeness = functional.l1_loss(decoded, batch) + functional.mse_loss(decoded, batch)
    return likeness + 0.5 * _edge_loss(decoded, batch) + 0.3 * _color_loss(latents, batch)


def _color_loss(latents: Tensor, batch: Tensor) -> Tensor:
    """Return the loss of the first three channels against the mean color of each 16x16 patch.

    The UNet then learns colors at once.
    """
    mean, deviation = (batch.new_tensor(values).view(1, 3, 1, 1) for values in (COLOR_MEAN, COLOR_DEVIATION))
    return functional.mse_loss(latents[:, :3], (functional.avg_pool2d(batch, 16) - mean) / deviation)


def _edge_loss(decoded: Tensor, batch: Tensor) -> Tensor:
    difference = decoded - batch
    return difference.diff(dim=2).abs().mean() + difference.diff(dim=3).abs().mean()
