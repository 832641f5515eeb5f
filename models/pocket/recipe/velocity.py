"""The diffusion loss of the UNet and the LoRAs.

It includes the twins that keep guidance harmless where words add nothing.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from .captions import caption
from .scenes import Scene
from .training import half_precision, noise_schedule

TWIN_SHARE = 0.2
"""So much of every batch are twins: the first pictures once more, equally noisy, without their words."""
AGREEMENT, DISPUTE = 15.0, 1.0
AGREED, DISPUTED = 400, 500
"""The squared difference of twins' predictions counts so many times as much as the error, the first up to the first
timestep, the second from the second timestep on: there the twin without words predicts half way to the other, and
guidance 7.5 does what 4.25 would.

Guidance multiplies that difference. Where a picture is all but decided words have little to add: at t = 300 the words
lowered the error by 0.005 and yet the predictions differed by 0.009, so that guidance 7.5 raised the error from 0.04 to
0.45, and colors broke up; with guidance left out below t = 400 they hardly did. 1,000 steps at 20, up to 420 and 550,
brought it down to 0.06. Agreement up to t = 700 was too much: small objects lost their color where the words still tell
it, at t = 500 and 600. (Seen on 48 validation pictures and eight prompts, at 512².) Half of the way brought shapes at
7.5 from six prompts of ten to all. At a weight of 3 for 520 more steps, both of two objects were right in 31 % of 48
pairs at 7.5 and 56 % at 4, not in 46 and 71."""
FOCUSED, UNFOCUSED = 700, 900
SNR_CEILING = 5.0
MIDDLE_SHARE = 0.8
"""So many of the noise levels gather about a phase's middle: logit-normal (Esser et al. 2024)."""

Forward = Callable[..., tuple[Tensor]]


class VelocityLoss:
    """Mean squared error of the predicted velocity (Salimans & Ho 2022).

    Details are held down as by min-SNR (Hang et al. 2023).
    """

    def __init__(self, device: torch.device) -> None:
        self.schedule = noise_schedule()
        kept = self.schedule.alphas_cumprod.to(device)
        self.weights = (SNR_CEILING / (kept / (1 - kept) + 1)).clamp(max=1.0)

    def __call__(
        self, forward: Forward, latents: Tensor, embeddings: Tensor, middle: float, focus: Tensor | None = None
    ) -> Tensor:
        """Compute the loss; noise levels gather about `middle` (see `Phase.middle`).

        The last rows are twins of the first (`with_twins`). `focus` weighs the cells, (rows, height, width), as far as
        the noise lets it (`focused`).

        The twin without words learns to agree with the one that has them, which is held to the picture alone. While
        both were drawn towards each other, words had less effect at t = 400 to 500 than they have something to tell:
        300 steps of this, with the focus, brought the error of two objects at t = 500 from 0.070 to 0.062 (48 held-out
        scenes, 512²).
        """
        noise, timesteps = noise_for(latents, middle)
        predicted = self.predicted(forward, latents, noise, timesteps, embeddings)
        cells = torch.ones_like(predicted[:, 0]) if focus is None else focused(focus, timesteps)
        error = self.error(predicted, latents, noise, timesteps, cells)
        return error + self.disagreement(predicted, timesteps, cells)

    def predicted(
        self, forward: Forward, latents: Tensor, noise: Tensor, timesteps: Tensor, embeddings: Tensor
    ) -> Tensor:
        """Return the velocity that `forward` sees in the latents made noisy, (rows, 8, height, width)."""
        noisy = self.schedule.add_noise(latents, noise, timesteps).contiguous(memory_format=torch.channels_last)
        with half_precision(latents.device):
            return forward(noisy, timesteps, embeddings, return_dict=False)[0].float()

    def error(self, predicted: Tensor, latents: Tensor, noise: Tensor, timesteps: Tensor, cells: Tensor) -> Tensor:
        target = self.schedule.get_velocity(latents, noise, timesteps)
        return (squared(predicted - target, cells) * self.weights[timesteps]).mean()

    def disagreement(self, predicted: Tensor, timesteps: Tensor, cells: Tensor) -> Tensor:
        """Return the cost, a number, of a difference between the twins' predictions.

        The twin without words comes to the one that has them.
        """
        conditional, unconditional = twins_of(predicted)
        agreed = ((DISPUTED - timesteps[: len(conditional)]) / (DISPUTED - AGREED)).clamp(0.0, 1.0)
        agreement = DISPUTE + (AGREEMENT - DISPUTE) * agreed
        return (agreement * squared(conditional.detach() - unconditional, cells[: len(conditional)])).sum() / len(
            predicted
        )


def noise_for(latents: Tensor, middle: float) -> tuple[Tensor, Tensor]:
    """Return noise like the latents, and the timestep of each row; twins have the same.

    `middle` is as in `Phase.middle`.
    """
    rows = len(latents)
    singles = latents[: rows - twins_among(rows)]
    noise, timesteps = torch.randn_like(singles), random_timesteps(len(singles), middle).to(latents.device)
    return with_twins(noise, rows), with_twins(timesteps, rows)


def squared(difference: Tensor, cells: Tensor) -> Tensor:
    """Return the mean square, (rows,), of a difference (rows, 8, height, width).

    `cells`, (rows, height, width), weigh its cells.
    """
    return (difference.square().mean(1) * cells).mean((1, 2))


def focused(focus: Tensor, timesteps: Tensor) -> Tensor:
    """Return weights of the cells, (rows, height, width): the focus, or 1 where noise is high.

    The focus holds up to `FOCUSED`, where the layout is all but decided; from `UNFOCUSED` on it is 1, where the focus
    would only draw objects to where they are likely.
    """
    share = ((UNFOCUSED - timesteps) / (UNFOCUSED - FOCUSED)).clamp(0.0, 1.0)
    return torch.lerp(torch.ones_like(focus), focus, share[:, None, None])


def twins_among(rows: int) -> int:
    return round(TWIN_SHARE * rows)


def twins_of(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return the twins with words, and without."""
    twins = twins_among(len(batch))
    return batch[:twins], batch[len(batch) - twins :]


def random_pictures(rng: random.Random, pictures: int, rows: int) -> list[int]:
    """Numbers of pictures for a batch of so many rows, its twins left out."""
    return rng.choices(range(pictures), k=rows - twins_among(rows))


def with_twins(singles: Tensor, rows: int) -> Tensor:
    """Latents, or what else a batch has by row, and the first of them once more, `rows` in all."""
    return torch.cat([singles, singles[: rows - len(singles)]])


def words_for(rng: random.Random, scenes: list[Scene], rows: int) -> list[str]:
    """Return a caption for each scene, none for the twins."""
    return [caption(scene, rng) for scene in scenes] + [""] * (rows - len(scenes))


def random_timesteps(count: int, middle: float) -> Tensor:
    """Spread evenly over their distribution within one batch: (count,) in 0..999."""
    spread = (torch.rand(1) + torch.randperm(count) / count) % 1
    gathered = torch.sigmoid(torch.special.ndtri(spread.clamp(1e-3, 1 - 1e-3)) + middle)
    return (torch.where(torch.rand(count) < MIDDLE_SHARE, gathered, spread) * 1000).long()
