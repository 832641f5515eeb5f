"""A base model as the engine drives it: its family, the slot banks over its layers, the pool that fills them, its runner."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from serve_app.engine.adapter_pool import AdapterPool
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.lora import SlotBank
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import BatchKey, Run, RunRequest
from serve_app.engine.runner import Runner, draw_noise

DEFAULT_SLOTS = 33


class BaseModel:
    def __init__(self, family: UNetFamily, options: EngineOptions, on_loaded: Callable[[], None]) -> None:
        self.family = family
        slots = options.adapter_slots + 1 if options.adapter_slots else DEFAULT_SLOTS
        self.banks = {name: SlotBank(layers, slots) for name, layers in family.layers.items()}
        self.pool = AdapterPool(
            self.banks,
            family.table,
            host_memory=options.host_memory,
            max_rank=options.max_rank,
            on_loaded=on_loaded,
        )
        self.runner = Runner(family, self.banks["unet"], max_rows=options.max_rows, exact=options.exact)

    @classmethod
    def load(cls, folder: Path, options: EngineOptions, on_loaded: Callable[[], None]) -> "BaseModel":
        return cls(UNetFamily.load(folder, options), options, on_loaded)

    def start(self, name: str, request: RunRequest, added_at: float) -> Run | None:
        """A run at its first step, holding its adapter's slot; None while the adapter is being read or no slot is free.

        Raises UnusableAdapter, OSError, or ValueError for a sampler that cannot be had.
        """
        schedule = self.family.schedule(request.sampler, request.steps)
        slot = self.pool.acquire(request.adapter)
        if slot is None:
            return None
        wears_text = request.adapter is not None and self.pool.has_text(slot)
        conditioning = self.family.encode(
            request, self.banks, slot, request.adapter.id if wears_text and request.adapter else ""
        )
        channels, height, width = self.family.latent_shape(request)
        empty = torch.zeros(channels, height, width, device=self.family.device)
        run = Run(
            request=request,
            key=BatchKey(name, height, width, conditioning.context.shape[1]),
            conditioning=conditioning,
            slot=slot,
            schedule=schedule,
            generator=torch.Generator().manual_seed(request.seed),
            latents=empty,
            previous=empty,
            added_at=added_at,
        )
        run.latents = draw_noise(run) * schedule.noise_scale
        return run

    @torch.inference_mode()
    def decode(self, run: Run) -> np.ndarray:
        """The finished image. Raises FloatingPointError when the latents are no numbers, which is the run's own doing."""
        if not bool(run.latents.isfinite().all()):
            raise FloatingPointError(
                "the image came out as numbers that are not finite; the adapter or its weight is too strong"
            )
        return self.family.decode(run.latents, run.request.width, run.request.height)

    def recover(self) -> None:
        """After a failed step: nothing of it is kept, and cached device memory is given back."""
        self.runner.forget()
        if self.family.device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises its own error on a GPU, and a RuntimeError that names the CPU allocator on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
