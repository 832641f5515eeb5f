"""The engine: runs join and leave between steps, and every step is one forward pass for all that fit together.

add ──▶ waiting ──admit──▶ running ──denoise, step by step──▶ decoding ──▶ finished
        (its adapter        (a slot, latents,                 (its own
         is being read)      a place in a batch)               thread)
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from serve_app.engine.base_model import BaseModel
from serve_app.engine.ending import decoded, failed
from serve_app.engine.families.checkpoint import Source, name_of
from serve_app.engine.live_runs import LiveRuns, Waiting
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import AdapterFile, Finished, Run, RunRequest
from serve_app.engine.scheduler import Scheduler

IDLE_WAIT_S = 0.05
"""A step with nothing to denoise waits this long for a read adapter, a decoded image or a new run."""


class Engine:
    """Makes images, many at once. `step` belongs to one thread; `add`, `abort`, `progress` and the counts to any."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.base_models: dict[str, BaseModel] = {}
        self.scheduler = Scheduler(max_runs=options.runs, max_rows=options.max_rows)
        self.live = LiveRuns()
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="decoder")

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Moves one batch on by one denoising step; returns what ended meanwhile, each run exactly once.

        Raises AcceleratorError when the device takes no more work from this process: every live run is lost here.
        """
        self._drop_aborted()
        ended = self._admit()
        batch = self.scheduler.next_batch()  # runs that share a batch key, each at its own step
        ended += self._denoise(batch)
        for run in self.scheduler.finished(batch):
            self._decode(run)
        return ended + self._retire(wait=not batch and not ended)

    def _drop_aborted(self) -> None:
        for run in self.live.take_aborted():
            self.scheduler.remove(run)
            self._model(run.request).pool.release(run.slot)

    def _admit(self) -> list[Finished]:
        """Takes waiting runs in order while there is room, passing over those whose adapter is still being read."""
        ended: list[Finished] = []
        for waiting in self.live.waiting():
            if not self.scheduler.room:
                break
            try:
                self._start(waiting)
            except Exception as error:  # noqa: BLE001  what cannot be started must not hold up the others
                if self.live.drop(waiting):
                    ended.append(failed(waiting.request.key, waiting.since, error))
        return ended

    def _start(self, waiting: Waiting) -> None:
        """Encodes the prompt and takes the adapter's slot, unless the adapter is not there yet."""
        model = self._model(waiting.request)
        run = model.start(waiting.request, waiting.since)
        if run is None:
            return
        if self.live.start(waiting, run):
            self.scheduler.add(run)
        else:
            model.pool.release(run.slot)

    def _denoise(self, batch: list[Run]) -> list[Finished]:
        """One forward pass and one sampler step for the whole batch."""
        if not batch:
            return []
        model = self._model(batch[0].request)
        ended: list[Finished] = []
        for run, error in model.denoise(batch, narrow=partial(self.scheduler.narrow, batch[0].key)):
            self.scheduler.remove(run)
            model.pool.release(run.slot)
            if self.live.end(run):
                ended.append(failed(run.request.key, run.added_at, error))
        return ended

    def _decode(self, run: Run) -> None:
        """Hands finished latents to the decoder's thread; the next step does not wait for it."""
        model = self._model(run.request)
        model.pool.release(run.slot)
        self.live.decode(run, start=lambda: self._decoder.submit(model.decode, run))

    def _retire(self, *, wait: bool) -> list[Finished]:
        """Images that are decoded by now; with `wait`, gives the other threads a moment first."""
        return [decoded(run, image) for run, image in self.live.take_decoded(within_s=IDLE_WAIT_S if wait else 0)]

    def _model(self, request: RunRequest) -> BaseModel:
        if request.base_model and request.base_model not in self.base_models:
            raise ValueError(f"base model {request.base_model!r} is not loaded here")
        return self.base_models[request.base_model or next(iter(self.base_models))]

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Queues a run and starts reading its adapter. Never blocks. Raises ValueError on a key that is live."""
        self.live.add(request)
        is_known = not request.base_model or request.base_model in self.base_models
        if is_known and request.adapter is not None:
            self._model(request).pool.expect(request.adapter)

    def abort(self, key: str) -> bool:
        """Removes a run before the next step; it will not be returned. False when no such run is live."""
        return self.live.abort(key)

    @property
    def has_work(self) -> bool:
        return self.live.any

    @property
    def free_rows(self) -> int:
        """How many more runs could start at the next step."""
        return max(0, self.options.runs - self.live.to_denoise)

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) of every live run."""
        return self.live.progress()

    @property
    def resident_adapters(self) -> frozenset[str]:
        """Ids of the adapters in slots, of every base model."""
        return frozenset[str]().union(*(model.pool.resident for model in self.base_models.values()))

    # -- before and after ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, base_models: Source | Mapping[str, Source], options: EngineOptions | None = None) -> "Engine":
        """Loads several base models by name, or one, called as its folder or file is. Raises OSError, ValueError."""
        options = options or EngineOptions()
        if options.threads:
            torch.set_num_threads(options.threads)
        sources = base_models if isinstance(base_models, Mapping) else {name_of(base_models): base_models}
        if not sources:
            raise ValueError("base_models: at least one base model is needed")
        engine = cls(options)
        engine.base_models = {
            name: BaseModel.load(name, source, options, engine.live.wake, base_models=len(sources))
            for name, source in sources.items()
        }
        return engine

    def warm_up(self, width: int, height: int) -> None:
        """Does beforehand what the first image of this size would wait for, with every base model. The step thread's own.

        Raises torch.OutOfMemoryError or MemoryError when one such image does not fit.
        """
        for model in self.base_models.values():
            model.warm_up(width, height)

    def close(self) -> None:
        """Stops the background threads; live runs are dropped."""
        self._decoder.shutdown(cancel_futures=True)
        for model in self.base_models.values():
            model.pool.close()

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
        adapter: Path | AdapterFile | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **how: Any,
    ) -> list[Image.Image]:
        """One image per seed, for notebooks; `how` are further fields of RunRequest (steps, guidance, weight, width…).

        `on_progress(done, total)` is told the steps of all images after each step. Raises RuntimeError when a run fails.
        """
        if isinstance(adapter, Path):
            adapter = AdapterFile(id=str(adapter.resolve()), path=adapter)
        requests = [
            RunRequest(key=f"generate-{i}", prompt=prompt, seed=seed, adapter=adapter, **how)
            for i, seed in enumerate(seeds)
        ]
        for request in requests:
            self.add(request)
        total = sum(request.steps for request in requests)
        images: dict[str, Image.Image] = {}
        while len(images) < len(requests):
            for ended in self.step():
                if ended.image is None:
                    raise RuntimeError(f"{ended.key}: {ended.failure.message if ended.failure else 'no image'}")
                images[ended.key] = Image.fromarray(ended.image)
            if on_progress is not None:
                ahead = sum(steps - done for done, steps in self.progress().values())
                on_progress(total - ahead, total)
        return [images[request.key] for request in requests]
