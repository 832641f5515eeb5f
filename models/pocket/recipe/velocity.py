"""The diffusion loss of the UNet and the LoRAs, and the twins that keep guidance harmless where it has nothing to tell."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from .captions import caption
from .scenes import Scene
from .schedule import noise_schedule
from .training import half_precision

TWIN_SHARE = 0.4
"""So much of every batch are twins: the first pictures once more, equally noisy, without their words."""
AGREEMENT = 15.0
AGREED, DISPUTED = 400, 500
"""The squared difference of twins' predictions counts so much up to the first timestep, falling to nothing at the second.

Guidance multiplies that difference. Where a picture is all but decided there is little to be told: at t = 300 the words lowered
the error by 0.005 and yet the predictions differed by 0.009, so that guidance 7.5 raised the error from 0.04 to 0.45, and
colours broke up; with guidance left out below t = 400 they hardly did. 1,000 steps at 20, up to 420 and 550, brought it down to
0.06. Agreement up to t = 700 was too much: small objects lost their colour where the words still tell it, at t = 500 and 600.
(Seen on 48 validation pictures and eight prompts, at 512².)"""
SNR_CEILING = 5.0
MIDDLE_SHARE = 0.8
"""So many of the noise levels gather about a phase's middle: logit-normal (Esser et al. 2024)."""

Forward = Callable[..., tuple[Tensor]]


class VelocityLoss:
    """Mean squared error of the predicted velocity (Salimans & Ho 2022), details held down as by min-SNR (Hang et al. 2023)."""

    def __init__(self, device: torch.device) -> None:
        self.schedule = noise_schedule()
        kept = self.schedule.alphas_cumprod.to(device)
        self.weights = (SNR_CEILING / (kept / (1 - kept) + 1)).clamp(max=1.0)

    def __call__(self, forward: Forward, latents: Tensor, embeddings: Tensor, middle: float) -> Tensor:
        """Noise levels gather about `middle` (see `Phase.middle`); the last rows are twins of the first (`with_twins`)."""
        device, twins = latents.device, twins_among(len(latents))
        single = len(latents) - twins
        timesteps = random_timesteps(single, middle).to(device)
        timesteps = torch.cat([timesteps, timesteps[:twins]])
        noise = torch.randn_like(latents[:single])
        noise = torch.cat([noise, noise[:twins]])
        noisy = self.schedule.add_noise(latents, noise, timesteps).contiguous(memory_format=torch.channels_last)
        target = self.schedule.get_velocity(latents, noise, timesteps)
        with half_precision(device):
            predicted = forward(noisy, timesteps, embeddings, return_dict=False)[0].float()
        error = (predicted - target).square().mean((1, 2, 3))
        difference = (predicted[:twins] - predicted[single:]).square().mean((1, 2, 3))
        agreed = ((DISPUTED - timesteps[:twins]) / (DISPUTED - AGREED)).clamp(0.0, 1.0)
        return (error * self.weights[timesteps]).mean() + AGREEMENT * (difference * agreed).sum() / len(latents)


def twins_among(rows: int) -> int:
    return round(TWIN_SHARE * rows)


def with_twins(rng: random.Random, pictures: int, rows: int) -> list[int]:
    """The numbers of a batch's random pictures, the last ones the first once more."""
    twins = twins_among(rows)
    chosen = rng.choices(range(pictures), k=rows - twins)
    return chosen + chosen[:twins]


def words_for(rng: random.Random, scenes: list[Scene]) -> list[str]:
    """A caption for each scene but the twins."""
    twins = twins_among(len(scenes))
    return [caption(scene, rng) for scene in scenes[: len(scenes) - twins]] + [""] * twins


def random_timesteps(count: int, middle: float) -> Tensor:
    """Spread evenly over their distribution within one batch: (count,) in 0..999."""
    spread = (torch.rand(1) + torch.randperm(count) / count) % 1
    gathered = torch.sigmoid(torch.special.ndtri(spread.clamp(1e-3, 1 - 1e-3)) + middle)
    return (torch.where(torch.rand(count) < MIDDLE_SHARE, gathered, spread) * 1000).long()
