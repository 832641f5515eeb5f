"""Runs generation jobs on the engine, and loads and warms up the engine of a generator replica."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from serve_app.domain import metrics
from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.durations import rounded_duration
from serve_app.domain.errors import AdapterUnavailable, FailureCode, StoreUnavailable
from serve_app.domain.guidance import WHOLE, GuidancePart
from serve_app.domain.jobs import DEFAULT_GROUP, Claim, Failure, pool_of
from serve_app.domain.metrics import Metric
from serve_app.domain.requests import GenerationRequest, Picture
from serve_app.engine import AdapterFile, Checkpoint, Engine, Finished, RunRequest, as_one
from serve_app.engine.families.autoencoder import begun
from serve_app.engine.families.outlines import outlined_table
from serve_app.engine.families.weights import shown_bytes
from serve_app.engine.findings import Shelf
from serve_app.engine.kernels import kernel_outcomes
from serve_app.engine.run import take
from serve_app.engine_options import EngineOptions
from serve_app.jobs.images import ImageStore
from serve_app.jobs.picture_file import stored_mask
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.weights import LAYER_TABLES, WeightStore
from serve_app.store.measures import Measures
from serve_app.worker.executor import (
    Executor,
    LoadedModels,
    MemoryPart,
    NotLoaded,
    Pixels,
    RunFailed,
    generation_failed,
    stored_image,
)
from serve_app.worker.memory import card_gauges, memory_parts, prepare_device


class GenerationExecutor(Executor):
    """Runs many images at once, each at its own step; an adapter is fetched before its runs are added.

    While there is none it goes on with `warming`, as `warm_up` makes it, an item at a time. `base_models` say how images
    are drawn of which neither the request nor a LoRA says it.
    """

    shows_unfinished = True

    def __init__(
        self,
        engine: Engine,
        catalog: CatalogReader,
        weights: WeightStore,
        images: ImageStore,
        warming: Iterator[None] | None = None,
        *,
        base_models: Sequence[BaseModel] = (),
        group: str = DEFAULT_GROUP,
    ) -> None:
        self.pool = pool_of(group)
        self._engine = engine
        self._warming = warming
        self._catalog, self._weights, self._images = catalog, weights, images
        self._base_models = {model.id: model for model in base_models}
        self._fetching = Counter[str]()
        self._lora_ids: dict[str, str] = {}  # digest → the LoRA it was last asked for as

    @property
    def free_runs(self) -> int:
        return self._engine.free_runs

    @property
    def resident(self) -> Sequence[str]:
        """Return adapters in the engine's memory, and those that are being fetched."""
        return sorted({*self._engine.adapters_in_memory, *+self._fetching})

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self._warming is not None

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        request = claim.request
        assert isinstance(request, GenerationRequest)
        adapters = [await self._adapter(lora.id) for lora in request.loras]
        base_models = {request.base_model} - {""} or {adapter.base_model for adapter in adapters}
        if len(base_models) > 1:
            raise RunFailed(_lora_unavailable("These LoRAs have different base models now."), retry=False)
        (base_model,) = base_models
        if base_model not in self._engine.base_models:
            raise NotLoaded(f"base model {base_model} is not loaded here")
        files = [await self._fetch(adapter, claim.weights) for adapter in adapters]
        applied = as_one(zip(files, (lora.weight for lora in request.loras), strict=True))
        is_seen = not self._engine.model(base_model).family.begins_from_images
        image = request.image and await self._picture(request.image, "image to begin from")
        mask = request.mask and stored_mask(await self._picture(request.mask, "mask"))
        image, mask = await asyncio.to_thread(begun, image, mask, request.width, request.height, is_seen=is_seen)
        samplers = (request.sampler, *(adapter.sampler for adapter in adapters))
        base = self._base_models.get(base_model)
        part = GuidancePart.said_by(request, *adapters, *([base] if base else [])) or WHOLE
        named: dict[str, Any] = {each.name: getattr(request, each.name, each.default) for each in fields(RunRequest)}
        named.update(
            adapter=applied.adapter,
            scale=applied.scale,
            guidance=request.guidance_scale,
            guidance_start=part.start,
            guidance_end=part.end,
            base_model=base_model,
            sampler=next(filter(None, samplers), None),
            image=image,
            mask=mask,
        )
        run = RunRequest(**named)
        for run_id, seed in zip(run_ids, request.seeds, strict=True):
            self._engine.add(replace(run, run_id=run_id, seed=seed))

    async def prefetch(self, lora_id: str, base_model: str = "") -> str | None:
        adapter = await self._catalog.adapter(lora_id)
        base_model = base_model or (adapter.base_model if adapter else "")
        if adapter is None or not self._engine.has_space(base_model) or self._fetching[adapter.sha256]:
            return None
        if adapter.sha256 in self._engine.model(base_model).pool.in_memory:
            return None
        path = await self._weights.fetch(adapter)
        if not self._engine.preload(AdapterFile(id=adapter.sha256, path=path), base_model):
            return None
        self._lora_ids.setdefault(adapter.sha256, lora_id)
        return adapter.sha256

    def step(self) -> Sequence[Finished]:
        if self._warming is None or self._engine.has_work:
            return self._engine.step()
        if next(self._warming, True):
            self._warming = None
        return ()

    def abort(self, run_id: str) -> bool:
        return self._engine.abort(run_id)

    def progress(self) -> Mapping[str, tuple[int, int]]:
        return self._engine.progress()

    def measure(self, measures: Measures) -> Mapping[Metric, float]:
        measured = self._engine.measured
        for step in take(measured.steps):
            measures.observe(metrics.STEP_SECONDS, step.seconds, self.pool)
            measures.observe(metrics.STEP_ROWS, step.rows, self.pool)
            measures.observe(metrics.STEP_ADAPTERS, step.adapters, self.pool)
        for seconds in take(measured.loads):
            measures.observe(metrics.ADAPTER_LOADS, seconds, self.pool)
        measures.count(metrics.ADAPTER_EVICTIONS, self.pool, by=len(list(take(measured.evictions))))
        return {
            metrics.RUNS: len(self._engine.progress()),
            metrics.RUNS_LIMIT: len(self._engine.live.rows) + self._engine.free_runs,
            metrics.ROWS_LIMIT: self._engine.options.max_rows,
            metrics.ADAPTERS_RESIDENT: len(self._engine.resident_adapters),
            **card_gauges(self._engine.device),
        }

    def memory(self) -> Sequence[MemoryPart]:
        models = list(self._engine.base_models.values())
        return memory_parts(
            self._engine.device,
            weights=sum(model.weight_bytes for model in models),
            adapters=sum(model.pool.slot_bytes for model in models),
            adapter_cache=sum(model.pool.host_bytes for model in models),
        )

    def changed_pictures(self) -> Mapping[str, bool]:
        return {name: bool(model.changed) for name, model in self._engine.base_models.items()}

    def kernels(self) -> Mapping[str, bool]:
        return {name: not why for name, why in kernel_outcomes().items()}

    def loaded_models(self) -> LoadedModels:
        """Return the base models, and the LoRAs in slots, also as parts of several that act as one."""
        resident = {part.partition("*")[0] for each in self._engine.resident_adapters for part in each.split("+")}
        loras = sorted(self._lora_ids.get(digest, digest) for digest in resident)
        return LoadedModels(list(self._engine.base_models), loras)

    def unfinished(self, run_id: str, longest: int) -> tuple[int, Pixels] | None:
        return self._engine.unfinished(run_id, longest)

    async def _picture(self, picture: Picture, name: str) -> Image.Image:
        file = await stored_image(self._images, picture.uri, name)
        try:
            image = Image.open(BytesIO(file))
            await asyncio.to_thread(image.load)
            return image
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise RunFailed(generation_failed(f"The {name} is no picture that can be read."), retry=False) from error

    async def _adapter(self, lora_id: str) -> Adapter:
        adapter = await self._catalog.adapter(lora_id)
        if adapter is None:
            raise RunFailed(_lora_unavailable("The LoRA is no longer in the catalog."), retry=False)
        return adapter

    async def _fetch(self, adapter: Adapter, weights: str) -> AdapterFile:
        self._lora_ids[adapter.sha256] = adapter.id
        self._fetching[weights] += 1
        try:
            path = await self._weights.fetch(adapter)
        except AdapterUnavailable as error:
            outage = isinstance(error.__cause__, StoreUnavailable)  # another try may find the storage back
            raise RunFailed(_lora_unavailable(error.message), retry=outage) from error
        finally:
            self._fetching[weights] -= 1
        return AdapterFile(id=adapter.sha256, path=path)


def _lora_unavailable(message: str) -> Failure:
    return Failure(code=FailureCode.LORA_UNAVAILABLE, message=message)


log = logging.getLogger(__name__)

SIZES = ((512, 512), (512, 768), (768, 512), (768, 768))
"""Width and height of the images that both interfaces offer."""


def keep_layer_tables(base_models: Sequence[BaseModel], data_dir: Path) -> None:
    """Make the layer tables that uploads of LoRAs are checked against, so that the first upload need not wait 8 s.

    It helps on the machine of an ingress only; on any other it costs less than a second.
    """
    for model in base_models:
        try:
            outlined_table(Path(model.config or model.source), data_dir.resolve() / LAYER_TABLES)
        except (OSError, ValueError, KeyError) as error:
            log.warning("base model %s: no layer table was made, so uploads make it: %s", model.id, error)


def load_engine(
    base_models: Sequence[BaseModel],
    options: EngineOptions,
    *,
    threads: int | None = None,
    memory_share: float | None = None,
    warm_up_time: timedelta | None = None,
    findings: Shelf | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Load the base models and try them out; threads and memory as in `prepare_device`, the time as in `warm_up`.

    What is measured about exactness is kept in `findings`. `tell` is told of the progress, also by other
    threads. Raises MemoryError where the base models cannot fit, and torch.OutOfMemoryError where an image of the
    smallest size does not.
    """
    prepare_device(threads=threads, memory_share=memory_share)
    sources = {
        model.id: Checkpoint(
            path=Path(model.source),
            config=Path(model.config) if model.config else None,
            vae=Path(model.vae) if model.vae else None,
            sampler=model.sampler,
            clip_skip=model.clip_skip,
            text_encoder=Path(model.text_encoder) if model.text_encoder else None,
            tokenizer=Path(model.tokenizer) if model.tokenizer else None,
            precision=model.precision,
        )
        for model in base_models
    }
    began = time.monotonic()
    engine = Engine.load(sources, options, findings=findings, tell=tell)
    weights = sum(model.weight_bytes for model in engine.base_models.values())
    loaded = f"loaded {', '.join(sources)}: {shown_bytes(weights)} in {time.monotonic() - began:.0f} s"
    tell(f"{loaded}; drawing a first image")
    if warm_up_time != timedelta():
        loaded += _estimated(engine.try_out(*SIZES[0]))
    tell(loaded)
    return engine


def _estimated(seconds: Mapping[str, float]) -> str:
    """Say how long it will take to measure what keeps images of the smallest size exact, by base model."""
    wanted = [f"{name} about {rounded_duration(timedelta(seconds=left))}" for name, left in seconds.items() if left]
    if not wanted:
        return ""
    size = "x".join(map(str, SIZES[0]))
    return f"; jobs of {size} wait until exact shapes are measured, once for this machine: {', '.join(wanted)}"


def warm_up(engine: Engine, within: timedelta | None) -> Iterator[None]:
    """Measure what the first image of each size would wait for, the smallest first; on a GPU draw one too.

    Each item is a piece of about a second, or one pass of the denoiser if that takes longer. Another size is begun while
    less than `within` has passed; None takes every size on a GPU, the smallest on a CPU.
    """
    began = time.monotonic()
    on_cpu = engine.device.type == "cpu"
    for width, height in SIZES[:1] if within is None and on_cpu else SIZES:
        if within is not None and time.monotonic() - began >= within.total_seconds():
            return
        try:
            for name in engine.base_models:
                while not engine.measure(name, width, height):
                    yield
            if not on_cpu:
                engine.warm_up(width, height)
        except (torch.OutOfMemoryError, MemoryError):
            log.warning("images of %dx%d do not fit this device: jobs for them will fail and say so", width, height)
        else:
            log.info("ready for %dx%d after %.1f s", width, height, time.monotonic() - began)
        yield
