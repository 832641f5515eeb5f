"""Every length, size and rate of the recipe, in one place."""

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The model folder that the recipe writes."""
WORK = Path(__file__).resolve().parent / ".work"
"""Checkpoints and cached latents: ignored by git, safe to delete, needed to go on where a run stopped."""


SQUARE, LARGE, WIDE, TALL = (512, 512), (768, 768), (768, 512), (512, 768)
SIDES = (SQUARE, LARGE, SQUARE, LARGE, SQUARE, WIDE, SQUARE, LARGE, LARGE, TALL)
"""Sizes in the order in which they take turns: the squares, which are measured, come four times as often."""


@dataclass(frozen=True)
class Phase:
    """A phase of the UNet's curriculum.

    It has picture sizes as (width, height), steps, rows per step and the top learning rate. `middle` is the logit of
    the noise level (0 none, 1 all) about which most levels gather. Where places are decided, and with the size of the
    picture, it is high: the same noise leaves more of a large picture to be seen. It moves evenly to `last_middle`
    where that is given: what is where is learned first, then how it is drawn.
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    pictures: int
    steps: int
    batch: int
    rate: float
    middle: float
    last_middle: float | None = None

    def middle_at(self, step: int) -> float:
        last = self.middle if self.last_middle is None else self.last_middle
        return self.middle + (last - self.middle) * step / self.steps


@dataclass(frozen=True)
class Plan:
    seed: int = 20
    threads: int = 2
    save_every: int = 250
    save_seconds: float = 60.0
    pool: int = 384
    """Pictures that crops are taken from at any moment."""
    compile_from: int = 1000
    """Phases of at least so many steps fuse small operators by torch.compile: twice as fast a step on 2 cores, after
    minutes of compiling (measured); it needs a C++ compiler."""
    autoencoder_steps: int = 8000
    autoencoder_batch: int = 16
    autoencoder_crop: int = 128
    autoencoder_rate: float = 1.5e-3
    text_steps: int = 2000
    text_batch: int = 64
    text_rate: float = 1.5e-3
    phases: tuple[Phase, ...] = (
        Phase("tiny", ((128, 128),), pictures=16000, steps=4000, batch=128, rate=1.2e-3, middle=2.0),
        Phase("small", ((256, 256),), pictures=20000, steps=10000, batch=32, rate=1e-3, middle=1.0),
        Phase("base", ((512, 512),), pictures=8000, steps=5000, batch=16, rate=1e-3, middle=1.2),
        Phase("fine", ((512, 512),), pictures=6000, steps=4000, batch=16, rate=1e-3, middle=0.0),
        Phase("wide", SIDES, pictures=4000, steps=6000, batch=12, rate=8e-4, middle=0.9, last_middle=-0.2),
    )
    agreement_steps: int = 1500
    agreement_rate: float = 2e-4
    lora_rank: int = 8
    lora_sizes: tuple[tuple[int, int], ...] = ((512, 512),)
    lora_pictures: int = 400
    lora_steps: int = 1500
    lora_batch: int = 8
    lora_rate: float = 2e-3
    upscaler_steps: int = 8000
    upscaler_batch: int = 8
    upscaler_crop: int = 48
    upscaler_rate: float = 2e-3

    def shortened(self, share: float) -> "Plan":
        """Return the same plan with every number of steps and pictures scaled by the share, for trials."""

        def cut(count: int) -> int:
            return max(2, round(count * share))

        return replace(
            self,
            autoencoder_steps=cut(self.autoencoder_steps),
            text_steps=cut(self.text_steps),
            phases=tuple(replace(p, steps=cut(p.steps), pictures=max(p.batch, cut(p.pictures))) for p in self.phases),
            agreement_steps=cut(self.agreement_steps),
            lora_steps=cut(self.lora_steps),
            lora_pictures=max(self.lora_batch, cut(self.lora_pictures)),
            upscaler_steps=cut(self.upscaler_steps),
        )
