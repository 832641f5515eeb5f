"""The jobs of the many-LoRA benchmark (`many-loras.md`), the same for every server."""

import random
from typing import NamedTuple

LORAS = 64
STEPS, SIZES, WEIGHTS = (20, 25, 30), ((512, 512), (512, 512), (512, 512), (768, 512)), (0.5, 0.75, 1.0)
GUIDANCE = 7.5
PROMPTS = (
    "a red circle on a blue background",
    "a green star on a white background",
    "purple mountains under a black sky with a yellow moon",
    "a yellow flower with a red middle on a blue background",
)


class Job(NamedTuple):
    number: int
    prompt: str
    lora: int
    weight: float
    width: int
    height: int
    steps: int


def workload(count: int) -> list[Job]:
    """Return the benchmark's jobs: LoRA k is wanted 1/(k + 1) times as often as the first (Zipf's law, exponent 1)."""
    chance = random.Random(0)
    popularity = [1 / (k + 1) for k in range(LORAS)]
    return [
        Job(
            number,
            chance.choice(PROMPTS),
            chance.choices(range(LORAS), popularity)[0],
            chance.choice(WEIGHTS),
            *chance.choice(SIZES),
            chance.choice(STEPS),
        )
        for number in range(count)
    ]
