"""Holds a loaded base model: its family, adapter slots, the pool that fills them, and its runner."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from serve_app.domain.guidance import WHOLE, GuidancePart
from serve_app.engine.adapter_pool import AdapterPool
from serve_app.engine.adapter_slots import AdapterSlots, bind_alone, bucket_rank
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.attention import choose
from serve_app.engine.canary import look
from serve_app.engine.device import DeviceQueues, is_out_of_memory, module_bytes, spare_memory, torch_dtype
from serve_app.engine.families.checkpoint import Source, as_checkpoint
from serve_app.engine.families.family import Family, Pause, Placement, no_pause
from serve_app.engine.families.registry import load_family
from serve_app.engine.findings import Findings, Shelf, circumstances, shelf_of
from serve_app.engine.gathered_rows import AddLora, row_bytes
from serve_app.engine.kernels import lora_kernel
from serve_app.engine.lora_layers import LoRALinear
from serve_app.engine.run import BatchKey, Conditioning, EncodedImage, Measured, Run, RunRequest
from serve_app.engine.runner import Runner, begin, seeded_generator
from serve_app.engine.sampler import Schedule
from serve_app.engine_options import EngineOptions

COMMON_RANK = 32
"""The highest rank that published adapters commonly have. Memory is kept for full batches of it."""

MEASURING_S = 1.0
"""A step that measures begins passes for this long; then aborted runs leave, and other shapes have their turn."""


FIRST_SIDE = 512
"""Pixels of a side of the image by whose shapes the operator of attention is chosen."""


class FailedRun(NamedTuple):
    """A run whose step raised."""

    run: Run
    error: Exception


class Shared(NamedTuple):
    """What an engine's base models have in common."""

    base_models: int = 1
    """How many share the device's memory."""
    measured: Measured | None = None
    findings: Shelf | Path | None = None
    """Where what is measured about exactness is kept."""
    queues: DeviceQueues | None = None


ALONE = Shared()


class BaseModel:
    def __init__(
        self, name: str, family: Family, options: EngineOptions, on_loaded: Callable[[], None], shared: Shared = ALONE
    ) -> None:
        """Another thread calls `on_loaded` when an adapter was read."""
        self.name = name
        self.family = family
        self.changed = ""
        """How it draws otherwise than it did before, as `try_out` found; empty where it does not."""
        self.weight_bytes = module_bytes(family.modules, family.device)
        self._encoding = threading.RLock()
        self._encoders_have: tuple[str, float] | None = None
        """The adapter applied to the text encoders, and its scale; None where that is not certain."""
        self._last_image: tuple[RunRequest, EncodedImage | None] = RunRequest(run_id="", prompt=""), None
        add_lora = lora_kernel(options)
        common_rank = min(COMMON_RANK, options.max_rank)
        memory = options.adapter_memory or spare_memory(family.device, base_models=shared.base_models)
        rows = options.max_rows * _common_row_bytes(family, common_rank, torch_dtype(options), add_lora)
        self.store = AdapterStore(family.device, torch_dtype(options), memory - min(rows, memory // 2))
        self.adapter_slots = AdapterSlots(
            [lane.layers for lane in family.lanes], 1 + options.adapter_slots, self.store, add_lora=add_lora
        )
        self.pool = AdapterPool(
            self.adapter_slots,
            self.store,
            shared.queues or DeviceQueues(family.device),
            LayerTable(family.components, family.denoiser, name=name),
            family.denoiser,
            host_memory=options.host_memory,
            max_rank=options.max_rank,
            on_loaded=on_loaded,
            measured=shared.measured,
        )
        self._shelf, self._told = shelf_of(shared.findings), tuple[object, ...]()
        attention = choose(self.denoiser, self._compute, family.device)
        self._known = circumstances(
            self.denoiser,
            family.device,
            options,
            lanes=len(family.lanes),
            by_kernel=add_lora is not None,
            attention=attention,
        )
        self.runner = Runner(
            family,
            self.adapter_slots,
            Findings(self._shelf, self._known),
            max_rows=options.max_rows,
            exact=options.exact,
        )

    @classmethod
    def load(
        cls,
        name: str,
        source: Source,
        options: EngineOptions,
        on_loaded: Callable[[], None],
        shared: Shared = ALONE,
        placement: Placement | None = None,
    ) -> "BaseModel":
        """Load a base model. Raises OSError or ValueError with the model's name, the cause and the cure."""
        try:
            family = load_family(source, options, placement)
        except (OSError, ValueError) as error:
            kind = next((kind for kind in (FileNotFoundError, OSError) if isinstance(error, kind)), ValueError)
            raise kind(f"base model {name}: {error}") from error
        model = cls(name, family, options, on_loaded, shared)
        model._told = (as_checkpoint(source).clip_skip,)
        return model

    @property
    def denoiser(self) -> nn.Module:
        return self.family.components[self.family.denoiser].module

    def encode(self, request: RunRequest, pause: Pause = no_pause) -> Conditioning | None:
        """Encode the run's prompts; None until its adapter, which may change the text encoders, has been read.

        One thread at a time encodes; in `pause`, called between pieces of a long text, that thread may encode other
        runs' prompts. Raises UnusableAdapter or OSError for the adapter.
        """
        parts = self.pool.encoder_parts(request.adapter)
        if parts is None:
            return None
        adapter_id = request.adapter.id if request.adapter is not None and any(parts.values()) else ""
        wanted = (adapter_id, request.scale if adapter_id else 0.0)

        def bind() -> None:
            if self._encoders_have != wanted:
                self._encoders_have = None
                for name, component in self.family.components.items():
                    if name != self.family.denoiser:
                        bind_alone(component.layers, parts.get(name, {}), request.scale)
                self._encoders_have = wanted

        def pause_and_bind() -> None:
            pause()
            bind()

        with self._encoding:
            bind()
            encoded = self.family.encode(request, adapter_id, pause_and_bind)
            return encoded._replace(image=self._encoded_image(request), unread=self.family.unread(request))

    def _encoded_image(self, request: RunRequest) -> EncodedImage | None:
        """Encode the image that a run begins from, once for runs that are given the same arrays one after the other."""
        if request.image is None:
            if request.mask is not None:
                raise ValueError("mask: says which part of an image is redrawn, and there is no image")
            return None
        if not 0 < request.strength <= 1:
            raise ValueError(f"strength: must be above 0 and at most 1, not {request.strength}")
        last, encoded = self._last_image
        if encoded is None or last.image is not request.image or last.mask is not request.mask:
            begun = request if self.family.begins_from_images else request.of_its_image
            encoded = self.family.autoencoder.encode(begun, self.family.latent_shape(begun))
            self._last_image = request, encoded
        return encoded

    @torch.inference_mode()
    def _compute(self) -> None:
        """Compute a pass of random rows with no adapter, before there is a runner."""
        request = RunRequest(run_id="first", prompt="", width=FIRST_SIDE, height=FIRST_SIDE)
        encoded = self.encode(request)
        assert encoded is not None, "only an adapter is ever waited for"
        conditioning = self.family.prepare(encoded)
        latents = torch.randn(conditioning.rows, *self.family.latent_shape(request)).to(self.family.device)
        self.family.denoise(latents, torch.full_like(latents[:, 0, 0, 0], 500), conditioning)

    def start(self, request: RunRequest, conditioning: Conditioning, added_at: float) -> Run | None:
        """Start a run, which holds its adapter's slot; None while the adapter is packed or no slot is free.

        Raises UnusableAdapter or OSError for its adapter, ValueError for its sampler or the part with guidance.
        """
        schedule = self.family.schedule(request)
        slot = self.pool.acquire(request.adapter)
        if slot is None:
            return None
        try:
            return self._first_step(request, conditioning, added_at, schedule, slot)
        except BaseException:
            self.pool.release(slot)
            raise

    def _first_step(
        self, request: RunRequest, conditioning: Conditioning, added_at: float, schedule: Schedule, slot: int
    ) -> Run:
        self.adapter_slots.bind([slot], [request.scale])
        unread, conditioning = conditioning.unread, self.family.prepare(conditioning)
        shape = self.family.latent_shape(request)
        run = Run(
            request=request,
            batch_key=BatchKey(self.name, shape, conditioning.context.shape[1]),
            conditioning=conditioning,
            slot=slot,
            schedule=schedule,
            guided=schedule.passes_of((GuidancePart.said_by(request) or WHOLE).steps(schedule.steps)),
            generator=seeded_generator(request.seed),
            state=[torch.zeros(shape, device=self.family.device)] * schedule.size,
            unread=unread,
            added_at=added_at,
        )
        begin(run)
        return run

    def denoise(self, batch: list[Run], limit_rows: Callable[[int], None]) -> list[FailedRun]:
        """Move every run on by one pass of the denoiser, or measure for `MEASURING_S` what keeps the bits of its key.

        The halves of a batch that fails are tried, so that only the run at fault is lost. Calls `limit_rows(rows)` when
        more rows than that do not fit in memory together. Raises AcceleratorError when the device takes no more work
        from this process.
        """
        steps = [run.step for run in batch]
        try:
            if self.runner.measure(batch, within_s=MEASURING_S):
                self.runner.denoise(batch)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001  a step must outlive any run: find it and lose it alone
            self.runner.invalidate()
            torch.cuda.empty_cache()  # gives back what the failed step left; nothing where CUDA is not in use
            batch = [run for run, step in zip(batch, steps, strict=True) if run.step == step]
            rows, lacks_memory = sum(run.rows for run in batch), is_out_of_memory(error)
            if lacks_memory and self.runner.pads_less(batch[0].batch_key, rows):
                return self.denoise(batch, limit_rows)
            if len(batch) == 1:
                return [FailedRun(batch[0], error)]
            if lacks_memory:
                limit_rows(rows // 2)
            middle = len(batch) // 2
            return self.denoise(batch[:middle], limit_rows) + self.denoise(batch[middle:], limit_rows)
        return []

    @torch.inference_mode()
    def try_out(self, width: int, height: int) -> float:
        """Compute a pass and decode an image of this size, and tell where it is not drawn as it was (`canary.py`).

        Return how many seconds at least `measure` will take, by the time of that pass; 0 where all is known.
        """
        run = self.sample(width, height, "a red cat on a mat")
        seconds, output = self.runner.try_out(run)
        prompt = [run.conditioning.context, *run.conditioning.added.values()]
        drew = {"prompt": prompt, "denoising": [output], "decoding": [self.decode(run)]}
        if self._shelf is not None:
            self.changed = look(self.name, self.family.modules, self._known, self._told, drew, self._shelf)
        return seconds

    @torch.inference_mode()
    def warm_up(self, width: int, height: int) -> None:
        """Do now what the first image of this size would wait for."""
        run = self.sample(width, height)
        self.runner.denoise([run])
        self.decode(run)

    def sample(self, width: int, height: int, prompt: str = "") -> Run:
        """Start a run like those that an image of this size needs."""
        request = RunRequest(run_id="warm-up", prompt=prompt, width=width, height=height)
        conditioning = self.encode(request)
        assert conditioning is not None, "only an adapter is ever waited for"
        run = self.start(request, conditioning, 0.0)
        assert run is not None, "only an adapter is ever waited for"
        return run

    @torch.inference_mode()
    def decode(self, run: Run) -> np.ndarray:
        """Decode the finished image. Raises FloatingPointError when the latents are not finite."""
        if not bool(run.latents.isfinite().all()):
            raise FloatingPointError(
                "the image came out as numbers that are not finite; the adapter or its weight is too strong"
            )
        return self.family.autoencoder.decode(run.latents, run.request)

    def close(self) -> None:
        self.runner.close()
        self.pool.close()


def _common_row_bytes(family: Family, rank: int, dtype: torch.dtype, add_lora: AddLora | None) -> int:
    """Return the bytes gathered per row for the layers that most adapters change, except those that a kernel reads."""
    layers = (family.components[family.denoiser].layers[name] for name in family.common_targets)
    gathered = (layer for layer in layers if add_lora is None or not isinstance(layer, LoRALinear))
    return row_bytes(gathered, bucket_rank(rank), dtype)
