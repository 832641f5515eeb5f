"""Usage of an account's completed jobs, by day, API key and LoRA."""

from dataclasses import dataclass
from datetime import date

UPSCALES = "upscale"
"""In place of a LoRA: images made larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Usage of one day (UTC) with one key ('' for the console) and one LoRA.

    Work is in megapixel-steps, `seconds` are of one worker.
    """

    day: date
    key_id: str
    lora_id: str
    images: int
    megapixel_steps: float
    seconds: float
