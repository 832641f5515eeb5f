"""Makes a device run out of memory or of numbers, or be lost, by hooks on the real networks."""

from pathlib import Path
from typing import Any

import torch

from serve_app.engine import Engine
from serve_app.engine.families.unet import UNetFamily


def limit_memory(engine: Engine, rows: int, note: Path) -> None:
    """Fail a forward pass of more than `rows` rows of 256x256, or as much of a larger picture.

    Each such try adds a byte to `note`.
    """
    (model,) = engine.base_models.values()
    assert isinstance(model.family, UNetFamily)
    cells = rows * (256 // model.family.pixels_per_latent) ** 2

    def refuse_what_does_not_fit(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        wanted = inputs[0].shape[0] * inputs[0].shape[2] * inputs[0].shape[3]
        if wanted > cells:
            with note.open("ab") as file:
                file.write(b"!")
            raise torch.OutOfMemoryError(f"out of memory: {wanted} of {cells} cells")

    model.denoiser.register_forward_pre_hook(refuse_what_does_not_fit)


def lose_device(engine: Engine) -> None:
    """Every forward pass fails from now on, as after an illegal access: nothing but a new process helps."""
    (model,) = engine.base_models.values()

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    model.denoiser.register_forward_pre_hook(fail)


def spoil_decoder(engine: Engine) -> None:
    """Let the decoder's numbers overflow, as SDXL's do in float16.

    Clamped to pixels they would be a black image.
    """
    (model,) = engine.base_models.values()

    def overflow(_module: torch.nn.Module, _inputs: Any, answer: torch.Tensor) -> torch.Tensor:
        return answer * float("nan")

    assert isinstance(model.family, UNetFamily)
    model.family.vae.decoder.register_forward_hook(overflow)
