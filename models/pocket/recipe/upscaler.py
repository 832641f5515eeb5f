"""Trains super-resolution on the pocket model's world: the network that Atelier upscales with."""

import random
from functools import partial

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from serve_app.upscale.upscaler import CompactNetwork

from .export import export_upscaler
from .pictures import as_tensor, random_picture, renewed_pool
from .plan import ROOT, Plan
from .training import Checkpoint, Optimizers, Progress, pick_device, warm_then_cosine

SCALES = (2, 4)
WIDTH, DEPTH = 32, 8
STYLED_SHARE = 0.4

Pair = tuple[Tensor, Tensor]


def train_upscalers(plan: Plan) -> None:
    for scale in SCALES:
        _train_upscaler(plan, scale)


def shrunk(picture: Image.Image, scale: int) -> Image.Image:
    """Return the low-resolution input that belongs to a picture."""
    size = (picture.width // scale, picture.height // scale)
    return picture.resize(size, Image.Resampling.BICUBIC)


def _train_upscaler(plan: Plan, scale: int) -> None:
    device = pick_device(plan.threads)
    torch.manual_seed(plan.seed)
    model = CompactNetwork(WIDTH, DEPTH, scale).to(device, memory_format=torch.channels_last)
    with torch.no_grad():
        model.body[-1].weight.mul_(0.1)
    optimizers, parameters = Optimizers(model, ("body.0.", f"body.{len(model.body) - 1}.")), list(model.parameters())
    checkpoint, start = Checkpoint(f"upscaler-x{scale}"), 0
    if state := checkpoint.load():
        model.load_state_dict(state["model"])
        if state["optimizers"]:
            optimizers.load_state_dict(state["optimizers"])
        start = state["step"]
    progress = Progress(f"upscaler x{scale}", plan.upscaler_steps, start)
    for step, pairs in renewed_pool(partial(_draw_pair, plan, scale), plan.pool, start, plan.upscaler_steps):
        low, high = _crops(random.Random(f"{step}"), pairs, plan, scale)
        enlarged = model(low.to(device, memory_format=torch.channels_last))  # bfloat16 would round at 50 dB
        loss = (enlarged - high.to(device)).square().mean((1, 2, 3)).sqrt().mean()
        optimizers.descend(loss, parameters, warm_then_cosine(step, plan.upscaler_steps, plan.upscaler_rate))
        progress.report(step, loss.item())
        if (step + 1) % plan.save_every == 0 or step + 1 == plan.upscaler_steps:
            checkpoint.save(model=model.state_dict(), optimizers=optimizers.state_dict(), step=step + 1)
    export_upscaler(scale, model.state_dict())


def _draw_pair(plan: Plan, scale: int, number: int) -> Pair:
    """Return a picture shrunk and whole: (3, height/scale, width/scale) and (3, height, width) in 0..255."""
    rng = random.Random(f"{plan.seed} upscaler {scale} {number}")
    picture = random_picture(rng, rng.choice((384, 512)), STYLED_SHARE)
    return as_tensor(shrunk(picture, scale)), as_tensor(picture)


def _crops(rng: random.Random, pairs: list[Pair], plan: Plan, scale: int) -> Pair:
    """Return the busiest of a few crops of each of some pictures.

    They are (batch, 3, side, side) and (batch, 3, side·scale, side·scale) in 0..1.
    """
    side = plan.upscaler_crop
    low: list[Tensor] = []
    high: list[Tensor] = []
    for small, large in rng.choices(pairs, k=plan.upscaler_batch):
        corners = [[rng.randrange(0, small.shape[-1] - side + 1) for _ in range(2)] for _ in range(4)]
        x, y = max(corners, key=lambda c: float(small[:, c[1] : c[1] + side, c[0] : c[0] + side].float().std()))
        low.append(small[:, y : y + side, x : x + side])
        high.append(large[:, y * scale : (y + side) * scale, x * scale : (x + side) * scale])
    return torch.stack(low) / 255, torch.stack(high) / 255


def load_upscaler(scale: int) -> CompactNetwork:
    """Load the published upscaler, in float32."""
    network = CompactNetwork.from_weights(load_file(ROOT / "upscaler" / f"x{scale}.safetensors"))
    return network.eval().requires_grad_(False)
