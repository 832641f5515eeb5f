"""The engine: runs join and leave between steps, and every step is one forward pass for all that fit together.

add ──▶ waiting ──admit──▶ running ──denoise, step by step──▶ decoding ──▶ finished
        (its adapter        (a slot, latents,                 (its own
         is being read)      a place in a batch)               thread)
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine.adapters_file import UnusableAdapter
from serve_app.engine.base_model import BaseModel, is_out_of_memory
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import AdapterFile, Finished, Run, RunRequest
from serve_app.engine.scheduler import Scheduler

IDLE_WAIT_S = 0.05
"""A step with nothing to denoise waits this long for a read adapter, a decoded image or a new run."""


class Engine:
    """Makes images, many at once. `step` belongs to one thread; `add`, `abort`, `progress` and the counts to any."""

    def __init__(self, models: Mapping[str, BaseModel], options: EngineOptions) -> None:
        self.options = options
        self._models = dict(models)
        self._scheduler = Scheduler(max_runs=options.runs, max_rows=options.max_rows)
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._news = threading.Condition()
        self._waiting: OrderedDict[str, tuple[RunRequest, float]] = OrderedDict()
        self._running: dict[str, Run] = {}
        self._decoding: dict[str, tuple[Run, Future[np.ndarray]]] = {}
        self._leaving: list[Run] = []

    @classmethod
    def load(cls, base_models: Path | Mapping[str, Path], options: EngineOptions | None = None) -> "Engine":
        """Loads every base model: one folder (its name is the folder's), or name → folder. Raises OSError, ValueError."""
        options = options or EngineOptions()
        if options.threads:
            torch.set_num_threads(options.threads)
        folders = base_models if isinstance(base_models, Mapping) else {Path(base_models).name: Path(base_models)}
        if not folders:
            raise ValueError("base_models: at least one base model is needed")
        engine = cls({}, options)
        engine._models = {name: BaseModel.load(Path(folder), options, engine._wake) for name, folder in folders.items()}
        return engine

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Moves one batch on by one denoising step; returns what ended meanwhile, each run exactly once."""
        ended = self._admit()
        self._drop_aborted()
        batch = self._scheduler.next_batch()
        ended += self._denoise(batch)
        for run in self._scheduler.finished(batch):
            self._decode(run)
        return ended + self._retire(wait=not batch and not ended)

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Queues a run and starts reading its adapter. Never blocks. Raises ValueError on a key that is live."""
        model = self._models.get(request.base_model or next(iter(self._models)))
        with self._news:
            if self._is_live(request.key):
                raise ValueError(f"a run with the key {request.key!r} is live")
            self._waiting[request.key] = (request, time.monotonic())
            self._news.notify_all()
        if model is not None and request.adapter is not None:
            model.pool.expect(request.adapter)

    def abort(self, key: str) -> bool:
        """Removes a run before its next step; it will not be returned. False when no such run is live."""
        with self._news:
            if key in self._running:
                self._leaving.append(self._running.pop(key))
                return True
            return (self._waiting.pop(key, None) or self._decoding.pop(key, None)) is not None

    @property
    def has_work(self) -> bool:
        with self._news:
            return bool(self._waiting or self._running or self._decoding)

    @property
    def free_rows(self) -> int:
        """How many more runs could start at the next step."""
        with self._news:
            return max(0, self.options.runs - len(self._waiting) - len(self._running))

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) of every live run."""
        with self._news:
            waiting = {key: (0, request.steps) for key, (request, _) in self._waiting.items()}
            running = {key: (run.step, run.request.steps) for key, run in self._running.items()}
            decoding = {key: (run.step, run.request.steps) for key, (run, _) in self._decoding.items()}
        return waiting | running | decoding

    @property
    def resident_adapters(self) -> frozenset[str]:
        return frozenset[str]().union(*(model.pool.resident for model in self._models.values()))

    # -- the step, piece by piece ----------------------------------------------------------------------------------

    def _admit(self) -> list[Finished]:
        """Starts waiting runs in order while there is room; one whose adapter is still being read is passed over."""
        failed: list[Finished] = []
        with self._news:
            candidates = list(self._waiting.items())
        for key, (request, added_at) in candidates:
            if self._scheduler.room <= 0:
                break
            try:
                run = self._start(request, added_at)
            except (UnusableAdapter, OSError) as error:
                failed += self._fail_waiting(key, added_at, FailureCode.LORA_UNAVAILABLE, error)
            except ValueError as error:
                failed += self._fail_waiting(key, added_at, FailureCode.GENERATION_FAILED, error)
            else:
                if run is not None:
                    self._enter(run)
        return failed

    def _enter(self, run: Run) -> None:
        self._scheduler.add(run)
        with self._news:
            if self._waiting.pop(run.request.key, None) is None:  # aborted while it was being started
                self._leaving.append(run)
            else:
                self._running[run.request.key] = run

    def _start(self, request: RunRequest, added_at: float) -> Run | None:
        name = request.base_model or next(iter(self._models))
        if name not in self._models:
            raise ValueError(f"base model {name!r} is not loaded here")
        return self._models[name].start(name, request, added_at)

    def _denoise(self, batch: list[Run]) -> list[Finished]:
        """One step of the batch. A batch that fails is tried in halves, so that only the run at fault fails."""
        if not batch:
            return []
        model = self._models[batch[0].key.base_model]
        try:
            model.runner.denoise(batch)
        except Exception as error:  # noqa: BLE001  a step must outlive any run: isolate the run, fail it by name
            out_of_memory = is_out_of_memory(error)
            model.recover()
            if len(batch) == 1:
                code = FailureCode.OUT_OF_MEMORY if out_of_memory else FailureCode.GENERATION_FAILED
                return self._fail_running(batch[0], code, f"the denoising step failed: {type(error).__name__}")
            middle = len(batch) // 2
            return self._denoise(batch[:middle]) + self._denoise(batch[middle:])
        return []

    def _decode(self, run: Run) -> None:
        """Hands finished latents to the decoder's thread; the next step does not wait for it."""
        model = self._models[run.key.base_model]
        model.pool.release(run.slot)
        with self._news:
            if run in self._leaving:
                self._leaving.remove(run)
                return
            del self._running[run.request.key]
            future = self._decoder.submit(model.decode, run)
            self._decoding[run.request.key] = (run, future)
        future.add_done_callback(lambda _: self._wake())

    def _retire(self, *, wait: bool) -> list[Finished]:
        """Images that are decoded by now; with `wait`, gives the other threads a moment first."""
        with self._news:
            if wait and not any(future.done() for _, future in self._decoding.values()):
                self._news.wait(IDLE_WAIT_S)
            ready = [(run, future) for run, future in self._decoding.values() if future.done()]
            for run, _ in ready:
                del self._decoding[run.request.key]
        return [self._outcome(run, future) for run, future in ready]

    def _outcome(self, run: Run, future: Future[np.ndarray]) -> Finished:
        seconds = time.monotonic() - run.added_at
        error = future.exception()
        if error is None:
            return Finished(run.request.key, future.result(), None, seconds)
        code = FailureCode.OUT_OF_MEMORY if is_out_of_memory(error) else FailureCode.GENERATION_FAILED
        return Finished(run.request.key, None, Failure(code=code, message=str(error)), seconds)

    def _drop_aborted(self) -> None:
        with self._news:
            leaving, self._leaving = self._leaving, []
        for run in leaving:
            self._scheduler.remove(run)
            self._models[run.key.base_model].pool.release(run.slot)

    def _fail_running(self, run: Run, code: FailureCode, message: str) -> list[Finished]:
        self._scheduler.remove(run)
        self._models[run.key.base_model].pool.release(run.slot)
        with self._news:
            if run in self._leaving:
                self._leaving.remove(run)
                return []
            del self._running[run.request.key]
        return [_failed(run.request.key, run.added_at, code, message)]

    def _fail_waiting(self, key: str, added_at: float, code: FailureCode, error: Exception) -> list[Finished]:
        with self._news:
            if self._waiting.pop(key, None) is None:
                return []
        return [_failed(key, added_at, code, str(error))]

    def _is_live(self, key: str) -> bool:
        return key in self._waiting or key in self._running or key in self._decoding

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

    # -- without a server ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str,
        *,
        negative_prompt: str = "",
        adapter: Path | AdapterFile | None = None,
        weight: float = 0.75,
        seeds: Iterable[int] = (0,),
        steps: int = 30,
        guidance: float = 7.5,
        width: int = 512,
        height: int = 512,
        base_model: str = "",
        sampler: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Image.Image]:
        """One image per seed, for notebooks. `on_progress(done, total)` is told the steps of all images after each step."""
        if isinstance(adapter, Path):
            adapter = AdapterFile(id=str(adapter.resolve()), path=adapter)
        keys = [f"generate-{i}" for i, _ in enumerate(seeds)]
        for key, seed in zip(keys, seeds, strict=True):
            self.add(
                RunRequest(
                    key=key,
                    prompt=prompt,
                    negative_prompt=negative_prompt,
                    adapter=adapter,
                    weight=weight,
                    seed=seed,
                    steps=steps,
                    guidance=guidance,
                    width=width,
                    height=height,
                    base_model=base_model,
                    sampler=sampler,
                )
            )
        images: dict[str, Image.Image] = {}
        while len(images) < len(keys):
            for ended in self.step():
                if ended.image is None:
                    raise RuntimeError(f"{ended.key}: {ended.failure and ended.failure.message}")
                images[ended.key] = Image.fromarray(ended.image)
            if on_progress is not None:
                done = sum(done for done, _ in self.progress().values()) + steps * len(images)
                on_progress(done, steps * len(keys))
        return [images[key] for key in keys]

    def close(self) -> None:
        """Stops the background threads; live runs are dropped."""
        self._decoder.shutdown(cancel_futures=True)
        for model in self._models.values():
            model.pool.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):
            self.close()


def _failed(key: str, added_at: float, code: FailureCode, message: str) -> Finished:
    return Finished(key, None, Failure(code=code, message=message), time.monotonic() - added_at)
