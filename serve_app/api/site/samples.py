"""Pictures of the bundled LoRAs, drawn by `docs/images/draw.py`, in `static/samples`."""

SAMPLES = ("neon", "stripes", "shadow", "mosaic", "confetti", "sepia", "blueprint", "outline")
SAMPLE_PROMPT = "a yellow flower with a red middle on a blue background"
_BASE_MODEL = "pocket"


def sample_of(name: str, base_model: str) -> str:
    """The sample of a LoRA by its name and base model; empty for one that is not bundled."""
    return name.lower() if base_model == _BASE_MODEL and name.lower() in SAMPLES else ""
