"""A base model as the engine drives it: its family, the slot banks over its layers, the pool that fills them, its runner."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from serve_app.engine.adapter_pool import AdapterPool
from serve_app.engine.families.checkpoint import Source
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.lora import SlotBank
from serve_app.engine.memory import is_out_of_memory, spare_memory
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import BatchKey, Run, RunRequest
from serve_app.engine.runner import Runner, draw_noise
from serve_app.engine.sampler import Schedule

COMPILED_RANK = 32
"""The highest rank that published adapters commonly have: under `compile`, one of a higher rank, or one that changes layers
outside the transformer blocks, makes new graphs once."""


class Lost(NamedTuple):
    """A run that could not be stepped."""

    run: Run
    error: Exception


class BaseModel:
    def __init__(
        self,
        name: str,
        family: UNetFamily,
        options: EngineOptions,
        on_loaded: Callable[[], None],
        *,
        base_models: int = 1,
    ) -> None:
        """`base_models` share the device's memory; `on_loaded` is called on another thread when an adapter has been read."""
        self.name = name
        self.family = family
        self.banks = {
            name: SlotBank(layers, 1 + options.adapter_slots, uniform=bool(options.compile) and name == "unet")
            for name, layers in family.layers.items()
        }
        self.pool = AdapterPool(
            self.banks,
            family.table,
            min_slots=1 + min(options.runs, options.adapter_slots),
            slot_memory=options.adapter_memory or spare_memory(family.device, base_models=base_models),
            host_memory=options.host_memory,
            max_rank=options.max_rank,
            on_loaded=on_loaded,
        )
        if options.compile:
            usual = dict.fromkeys(family.usual_targets, min(COMPILED_RANK, options.max_rank))
            self.pool.reserve("unet", usual)
        self.runner = Runner(
            family, self.banks["unet"], max_rows=options.max_rows, exact=options.exact, static=bool(options.compile)
        )

    @classmethod
    def load(
        cls,
        name: str,
        source: Source,
        options: EngineOptions,
        on_loaded: Callable[[], None],
        *,
        base_models: int = 1,
    ) -> "BaseModel":
        return cls(name, UNetFamily.load(source, options), options, on_loaded, base_models=base_models)

    def start(self, request: RunRequest, added_at: float) -> Run | None:
        """A run at its first step, holding its adapter's slot; None while the adapter is being read or no slot is free.

        Raises UnusableAdapter, OSError, or ValueError for a sampler that cannot be had.
        """
        schedule = self.family.schedule(request.sampler, request.steps)
        slot = self.pool.acquire(request.adapter)
        if slot is None:
            return None
        try:
            return self._prepared(request, added_at, schedule, slot)
        except BaseException:
            self.pool.release(slot)
            raise

    def _prepared(self, request: RunRequest, added_at: float, schedule: Schedule, slot: int) -> Run:
        text_adapter = request.adapter.id if request.adapter and self.pool.has_text(slot) else ""
        conditioning = self.family.encode(request, self.banks, slot, text_adapter)
        channels, height, width = self.family.latent_shape(request)
        empty = torch.zeros(channels, height, width, device=self.family.device)
        run = Run(
            request=request,
            key=BatchKey(self.name, height, width, conditioning.context.shape[1]),
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

    def denoise(self, batch: list[Run], narrow: Callable[[int], None]) -> list[Lost]:
        """One step of every run; of a batch that fails, halves are tried, so that only the run at fault is lost.

        `narrow(rows)` is told when more rows than that do not fit in memory together. Raises AcceleratorError when the
        device takes no more work from this process.
        """
        steps = [run.step for run in batch]
        try:
            self.runner.denoise(batch)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001  a step must outlive any run: find it and lose it alone
            self._recover()
            batch = [run for run, step in zip(batch, steps, strict=True) if run.step == step]
            rows, lacks_memory = sum(run.rows for run in batch), is_out_of_memory(error)
            if lacks_memory and self.runner.pads_less(batch[0].key, rows):
                return self.denoise(batch, narrow)
            if len(batch) == 1:
                return [Lost(batch[0], error)]
            if lacks_memory:
                narrow(rows // 2)
            middle = len(batch) // 2
            return self.denoise(batch[:middle], narrow) + self.denoise(batch[middle:], narrow)
        return []

    @torch.inference_mode()
    def warm_up(self, width: int, height: int) -> None:
        """Everything that the first image of this size would wait for."""
        run = self.start(RunRequest(key="warm-up", prompt="", width=width, height=height, steps=2), 0.0)
        assert run is not None, "only an adapter is ever waited for"
        self.runner.warm_up(run)
        self.runner.denoise([run])
        self.decode(run)

    @torch.inference_mode()
    def decode(self, run: Run) -> np.ndarray:
        """The finished image. Raises FloatingPointError when the latents are no numbers, which is the run's own doing."""
        if not bool(run.latents.isfinite().all()):
            raise FloatingPointError(
                "the image came out as numbers that are not finite; the adapter or its weight is too strong"
            )
        return self.family.decode(run.latents, run.request.width, run.request.height)

    def _recover(self) -> None:
        """After a failed step: nothing of it is kept, and cached device memory is given back."""
        self.runner.forget()
        if self.family.device.type == "cuda":
            torch.cuda.empty_cache()
