"""Runs the engine: runs join and leave between passes; a pass is one call of the denoiser for a batch.

add ──▶ waiting ──admit──▶ running ──denoise, pass by pass──▶ decoding ──▶ finished
        (its adapter is     (a slot, latents,                 (on its
         read, its prompt    rows in a batch)                  own thread)
         encoded, each on
         its own thread)
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from serve_app.engine.adapter_slots import NO_SLOT
from serve_app.engine.base_model import MEASURING_S, BaseModel, Shared
from serve_app.engine.device import DeviceQueues, reuse_freed_memory, torch_device
from serve_app.engine.families.autoencoder import begun
from serve_app.engine.families.checkpoint import Source, name_of
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.weights import place, watched
from serve_app.engine.findings import Shelf
from serve_app.engine.kernels import log_kernels
from serve_app.engine.lanes import threads_of
from serve_app.engine.live_runs import LiveRuns, PendingRun, failure_outcome, outcome_of_decoding
from serve_app.engine.run import (
    Adapter,
    AdapterFile,
    Conditioning,
    Finished,
    Measured,
    Run,
    RunRequest,
    StepTiming,
    as_one,
)
from serve_app.engine.scheduler import Scheduler
from serve_app.engine_options import EngineOptions

SHORT_TEXT = 1_000
"""The prompts of a run that have at most this many characters together wait for no longer ones: encoding them takes at
most 0.2 s on a core (`models/pocket`)."""
IDLE_WAIT_S = 0.05
"""A step with nothing to denoise waits this long for a read adapter, a decoded image or a new run."""
DECODERS = 2
"""Two images are decoded at once on a CPU, each with its share of the threads: its operators are too small to be
worth dividing (1.8 times as many a second as one after the other, measured on two cores), and each takes memory."""


class Engine:
    """Generates images, many at once. `step` is for one thread; `add`, `abort`, `progress` and the counts for any."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.base_models: dict[str, BaseModel] = {}
        self.scheduler = Scheduler(max_runs=options.max_runs, max_rows=options.max_rows)
        self.live = LiveRuns()
        self.measured = Measured()
        self.queues = DeviceQueues(torch_device(options))
        self._reading_ahead = threading.Lock()
        threads = torch.get_num_threads()  # lanes briefly change what a new thread takes
        self._encoder = threads_of(1, "encoder", threads)
        decoders = 1 if self.device.type != "cpu" else min(DECODERS, threads)
        self._decoder = threads_of(decoders, "decoder", threads // decoders)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Move one batch on by one pass of the denoiser; return the runs that ended meanwhile, each exactly once.

        Raises AcceleratorError when the device takes no more work from this process: every live run is then lost.
        """
        with self.queues.steps():
            self._remove_aborted()
            changes = self.live.changes
            ended = self._admit()
            if not ended and not self.scheduler:
                self.live.wait_for_change(changes, within_s=IDLE_WAIT_S)
                ended = self._admit()
            batch = self.scheduler.next_batch()  # runs that share a batch key, each at its own step
            began, steps, rows = time.monotonic(), [run.step for run in batch], sum(run.rows for run in batch)
            ended += self._denoise(batch)
            if steps != [run.step for run in batch]:
                slots = {run.slot for run in batch} - {NO_SLOT}
                self.measured.steps.append(StepTiming(time.monotonic() - began, rows, len(slots)))
            for run in self.scheduler.pop_finished(batch):
                self._decode(run)
            return ended + [outcome_of_decoding(run, image) for run, image in self.live.pop_decoded()]

    def _remove_aborted(self) -> None:
        for run in self.live.pop_aborted():
            self.scheduler.remove(run)
            self.model(run.request.base_model).pool.release(run.slot)

    def _admit(self) -> list[Finished]:
        """Start waiting runs in order while more may join, except those whose adapter or prompt is not ready."""
        ended: list[Finished] = []
        queue = self.live.waiting()
        if queue:
            self._prepare()
        for waiting in queue:
            if not self.scheduler.free_runs:
                break
            try:
                self._start(waiting)
            except Exception as error:  # noqa: BLE001  a run that cannot start must not delay the others
                if self.live.drop(waiting):
                    ended.append(failure_outcome(waiting.request.run_id, waiting.added_at, error))
        return ended

    def _start(self, waiting: PendingRun) -> None:
        """Acquire the adapter's slot, if the prompt has been encoded."""
        if waiting.error is not None:
            raise waiting.error
        if waiting.conditioning is None:
            return
        model = self.model(waiting.request.base_model)
        run = model.start(waiting.request, waiting.conditioning, waiting.added_at)
        if run is None:
            return
        if self.live.start(waiting, run):
            self.scheduler.add(run)
        else:
            model.pool.release(run.slot)

    def _denoise(self, batch: list[Run]) -> list[Finished]:
        """Move the whole batch on by one pass of the denoiser; return the failures of runs lost in it."""
        if not batch:
            return []
        model = self.model(batch[0].request.base_model)
        ended: list[Finished] = []
        for run, error in model.denoise(batch, limit_rows=partial(self.scheduler.limit_rows, batch[0].batch_key)):
            self.scheduler.remove(run)
            model.pool.release(run.slot)
            if self.live.end(run):
                ended.append(failure_outcome(run.request.run_id, run.added_at, error))
        return ended

    def _decode(self, run: Run) -> None:
        """Start decoding finished latents on the decoder thread; the next step does not wait for it."""
        run.denoised_at = time.monotonic()
        model = self.model(run.request.base_model)
        model.pool.release(run.slot)
        steps = self.queues.mark()

        def decode() -> np.ndarray:
            with self.queues.beside(steps):
                return model.decode(run)

        self.live.start_decoding(run, start=lambda: self._decoder.submit(decode))

    def model(self, name: str) -> BaseModel:
        """Return a base model; '' is the first. Raises ValueError where it is not loaded."""
        if name and name not in self.base_models:
            raise ValueError(f"base model {name!r} is not loaded here")
        return self.base_models[name or next(iter(self.base_models))]

    # -- before a run starts ---------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Have adapters read and prompts encoded for the runs that wait now."""
        self._read_ahead()
        self._encoder.submit(self._encode_waiting)

    def _read_ahead(self) -> None:
        with self._reading_ahead:  # or a thread could name who waited after another has named who waits now
            waiting = [each.request for each in self.live.waiting() if each.error is None]
            for name, model in self.base_models.items():
                own = (each for each in waiting if (each.base_model or next(iter(self.base_models))) == name)
                model.pool.read_ahead(each.adapter for each in own if each.adapter is not None)

    def _on_loaded(self) -> None:
        self.live.wake()
        self._encoder.submit(self._encode_waiting)

    def _encode_waiting(self) -> None:
        """Encode waiting runs' prompts in order, as many as may soon start; for the encoder's thread.

        Between the pieces of a long text, short ones that have come meanwhile are encoded.
        """
        self._read_ahead()
        self._encode_all(self.live.waiting(), pause=lambda: self._encode_all(filter(_is_short, self.live.waiting())))

    def _encode_all(self, runs: Iterable[PendingRun], pause: Pause = no_pause) -> None:
        encoded = 0
        for waiting in runs:
            if waiting.conditioning is None and waiting.error is None:
                try:
                    waiting.conditioning = self._encode(waiting.request, no_pause if _is_short(waiting) else pause)
                except Exception as error:  # noqa: BLE001  the step thread makes it the run's failure
                    waiting.error = error
                if waiting.conditioning is not None or waiting.error is not None:
                    self.live.wake()
            encoded += waiting.conditioning is not None
            if encoded >= 2 * self.options.runs:
                return

    @torch.inference_mode()
    def _encode(self, request: RunRequest, pause: Pause) -> Conditioning | None:
        with self.queues.beside():
            conditioning = self.model(request.base_model).encode(request, pause)
        if conditioning is not None:
            self.queues.hand_over(conditioning.tensors)
        return conditioning

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Queue a run, start reading its adapter and encoding its prompt. Never blocks.

        Raises ValueError on an id that is live.
        """
        self.live.add(request)
        self._prepare()

    def abort(self, run_id: str) -> bool:
        """Remove a run before the next step; it will not be returned. False when no such run is live."""
        return self.live.abort(run_id)

    @property
    def device(self) -> torch.device:
        return torch_device(self.options)

    @property
    def has_work(self) -> bool:
        return self.live.any

    @property
    def free_runs(self) -> int:
        """Return how many more runs could start at the next step."""
        return self.scheduler.free_beside(self.live.rows)

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) of every live run."""
        return self.live.progress()

    @torch.inference_mode()
    def unfinished(self, run_id: str, longest: int) -> tuple[int, np.ndarray] | None:
        """Return a running run's step and the picture that it predicts, without the decoder, or None."""
        run = self.live.running(run_id)
        if run is None or run.seen is None:
            return None
        rgb = self.model(run.request.base_model).family.latent_rgb
        if rgb is None:
            return None
        seen, done = run.seen, run.steps_done
        with self.queues.beside(self.queues.mark()):
            return done, rgb.pixels(run.schedule.predicted(*seen), longest)

    @property
    def resident_adapters(self) -> frozenset[str]:
        """Return ids of the adapters in slots, of every base model."""
        return frozenset[str]().union(*(model.pool.resident for model in self.base_models.values()))

    @property
    def adapters_in_memory(self) -> frozenset[str]:
        """Return ids of the adapters in slots or host memory, of every base model."""
        return frozenset[str]().union(*(model.pool.in_memory for model in self.base_models.values()))

    def has_space(self, base_model: str) -> bool:
        """Return whether another adapter of a base model fits; False for a model not loaded here."""
        return base_model in self.base_models and self.base_models[base_model].pool.has_space()

    def preload(self, adapter: Adapter, base_model: str) -> bool:
        """Start reading an adapter that no run needs yet; return whether it was started.

        It takes only host memory that is free. Raises KeyError on a base model not loaded here.
        """
        return self.base_models[base_model].pool.preload(adapter)

    # -- before and after ------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        base_models: Source | Mapping[str, Source],
        options: EngineOptions | None = None,
        *,
        findings: Shelf | Path | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> "Engine":
        """Load base models by name, or one that is named after its folder or file.

        Raises OSError or ValueError for a base model, MemoryError before anything is read where they cannot fit.
        What is measured about exactness is kept in `findings`, so that the next engine need not measure it.
        Another thread calls `tell` with how much has been read.
        """
        options = options or EngineOptions()
        reuse_freed_memory()
        if options.threads:
            torch.set_num_threads(options.threads)
        sources = base_models if isinstance(base_models, Mapping) else {name_of(base_models): base_models}
        if not sources:
            raise ValueError("base_models: at least one base model is needed")
        placements = place(sources, options)
        engine = cls(options)
        shared = Shared(len(sources), engine.measured, findings, engine.queues)
        for name, source in sources.items():
            told = f"{name}, text encoders in host memory" if placements[name].encoders_on_host else name
            with watched(told, source, tell):
                engine.base_models[name] = BaseModel.load(
                    name, source, options, engine._on_loaded, shared, placements[name]
                )
        engine.queues.settle()
        log_kernels()
        return engine

    def try_out(self, width: int, height: int) -> dict[str, float]:
        """Compute a pass and decode an image of this size with every base model; for the step thread alone.

        Return by name how many seconds at least it takes to measure what the first image waits for; 0 where it is
        known. Raises as `warm_up`.
        """
        with self.queues.steps():
            return {name: model.try_out(width, height) for name, model in self.base_models.items()}

    @torch.inference_mode()
    def measure(self, base_model: str, width: int, height: int) -> bool:
        """Measure for about `MEASURING_S` what an image of this size waits for; return whether all is known.

        Only the step thread may call it, between steps. Raises as `warm_up`.
        """
        model = self.base_models[base_model]
        with self.queues.steps():
            return model.runner.measure([model.sample(width, height)], within_s=MEASURING_S)

    def warm_up(self, width: int, height: int) -> None:
        """Do now what the first image of this size would wait for, with every base model; for the step thread alone.

        Raises torch.OutOfMemoryError or MemoryError when one such image does not fit.
        """
        with self.queues.steps():
            for model in self.base_models.values():
                model.warm_up(width, height)

    def close(self) -> None:
        """Stop the background threads; live runs are dropped."""
        for model in self.base_models.values():
            model.close()
        for thread in (self._encoder, self._decoder):
            thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- without a server ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str,
        *,
        seeds: Iterable[int] = (0,),
        adapter: str | Path | AdapterFile | None = None,
        weight: float = 0.75,
        adapters: Mapping[Path, float] | Mapping[str, float] | None = None,
        negative_prompt: str = "",
        steps: int = 30,
        guidance: float = 7.5,
        guidance_start: float = 0.0,
        guidance_end: float = 1.0,
        width: int = 512,
        height: int = 512,
        base_model: str = "",
        sampler: str | None = None,
        image: Image.Image | None = None,
        strength: float = 0.8,
        mask: Image.Image | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Image.Image]:
        """Generate one image per seed; `weight` is the adapter's scale.

        Raises FileNotFoundError with the path of an adapter that is not there, RuntimeError when a run fails.
        `adapters` names further ones, each with its weight: what each changes in the base alone is added.
        With an `image`, whose middle is scaled to this size, it takes the last `strength` of the steps (0 to 1) from
        there; a `mask` is white where the image is redrawn, and black where it is kept.
        Guidance acts from `guidance_start` to `guidance_end`, fractions of the steps that are taken.
        `on_progress(done, total)` receives the steps of all images after each step.
        """
        files = [*([] if adapter is None else [(adapter, weight)]), *(adapters or {}).items()]
        applied = as_one((_adapter_file(file), scale) for file, scale in files)
        is_seen = not self.model(base_model).family.begins_from_images
        pixels, masked = begun(image, mask, width, height, is_seen=is_seen)
        requests = [
            RunRequest(
                run_id=f"generate-{i}",
                prompt=prompt,
                negative_prompt=negative_prompt,
                adapter=applied.adapter,
                scale=applied.scale,
                seed=seed,
                steps=steps,
                guidance=guidance,
                guidance_start=guidance_start,
                guidance_end=guidance_end,
                width=width,
                height=height,
                base_model=base_model,
                sampler=sampler,
                image=pixels,
                strength=strength,
                mask=masked,
            )
            for i, seed in enumerate(seeds)
        ]
        try:
            for request in requests:
                self.add(request)
            totals = {request.run_id: request.steps for request in requests}
            images: dict[str, Image.Image] = {}
            while len(images) < len(requests):
                for ended in self.step():
                    if ended.image is None:
                        raise RuntimeError(f"{ended.run_id}: {ended.failure.message if ended.failure else 'no image'}")
                    images[ended.run_id] = Image.fromarray(ended.image)
                if on_progress is not None:
                    live = self.progress()
                    totals |= {run_id: steps for run_id, (_, steps) in live.items()}
                    ahead, total = sum(steps - done for done, steps in live.values()), sum(totals.values())
                    on_progress(total - ahead, total)
        finally:  # an interrupted call leaves no run that the next call would draw too
            for request in requests:
                self.abort(request.run_id)
        return [images[request.run_id] for request in requests]


def _adapter_file(file: str | Path | AdapterFile) -> AdapterFile:
    return file if isinstance(file, AdapterFile) else AdapterFile(str(Path(file).resolve(strict=True)), Path(file))


def _is_short(waiting: PendingRun) -> bool:
    return len(waiting.request.prompt) + len(waiting.request.negative_prompt) <= SHORT_TEXT
