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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine.adapters_file import UnusableAdapter
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.checkpoint import Source, name_of
from serve_app.engine.memory import NO_ROOM, is_out_of_memory
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import AdapterFile, Finished, Run, RunRequest
from serve_app.engine.scheduler import Scheduler

IDLE_WAIT_S = 0.05
"""A step with nothing to denoise waits this long for a read adapter, a decoded image or a new run."""


class Waiting(NamedTuple):
    request: RunRequest
    since: float


class Engine:
    """Makes images, many at once. `step` belongs to one thread; `add`, `abort`, `progress` and the counts to any."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.base_models: dict[str, BaseModel] = {}
        self.scheduler = Scheduler(max_runs=options.runs, max_rows=options.max_rows)
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._news = threading.Condition()  # guards the four below: where each live run is
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._running: dict[str, Run] = {}
        self._leaving: list[Run] = []
        self._decoding: dict[str, tuple[Run, Future[np.ndarray]]] = {}

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
            name: BaseModel.load(name, source, options, engine._wake) for name, source in sources.items()
        }
        return engine

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Moves one batch on by one denoising step; returns what ended meanwhile, each run exactly once."""
        ended = self._admit()  # encode prompts, place adapters in slots, take waiting runs while there is room
        self._drop_aborted()
        batch = self.scheduler.next_batch()  # runs that share a batch key, each at its own step
        ended += self._denoise(batch)  # one forward pass, one sampler step per run
        for run in self.scheduler.finished(batch):
            self._decode(run)
        return ended + self._retire(wait=not batch and not ended)

    # -- any thread ------------------------------------------------------------------------------------------------

    def add(self, request: RunRequest) -> None:
        """Queues a run and starts reading its adapter. Never blocks. Raises ValueError on a key that is live."""
        with self._news:
            if request.key in self._waiting or request.key in self._running or request.key in self._decoding:
                raise ValueError(f"a run with the key {request.key!r} is live")
            self._waiting[request.key] = Waiting(request, time.monotonic())
            self._news.notify_all()
        model = self._model(request)
        if model is not None and request.adapter is not None:
            model.pool.expect(request.adapter)

    def abort(self, key: str) -> bool:
        """Removes a run before the next step; it will not be returned. False when no such run is live."""
        with self._news:
            if key in self._running:
                self._leaving.append(self._running.pop(key))
                return True
            return (self._waiting.pop(key, None) or self._decoding.pop(key, None)) is not None

    @property
    def has_work(self) -> bool:
        with self._news:
            return bool(self._waiting or self._running or self._leaving or self._decoding)

    @property
    def free_rows(self) -> int:
        """How many more runs could start at the next step."""
        with self._news:
            return max(0, self.options.runs - len(self._waiting) - len(self._running))

    def progress(self) -> dict[str, tuple[int, int]]:
        """(steps done, steps in all) of every live run."""
        with self._news:
            waiting = {key: (0, it.request.steps) for key, it in self._waiting.items()}
            started = [*self._running.values(), *(run for run, _ in self._decoding.values())]
            return waiting | {run.request.key: (run.step, run.request.steps) for run in started}

    @property
    def resident_adapters(self) -> frozenset[str]:
        """Ids of the adapters in slots, of every base model."""
        return frozenset[str]().union(*(model.pool.resident for model in self.base_models.values()))

    # -- the step, piece by piece ----------------------------------------------------------------------------------

    def _admit(self) -> list[Finished]:
        """Starts waiting runs in order while there is room, passing over those whose adapter is still being read."""
        failed: list[Finished] = []
        with self._news:
            candidates = list(self._waiting.values())
        for waiting in candidates:
            if not self.scheduler.room:
                break
            try:
                self._start(waiting)
            except (UnusableAdapter, OSError) as error:
                failed += self._fail_waiting(waiting, FailureCode.LORA_UNAVAILABLE, error)
            except ValueError as error:
                failed += self._fail_waiting(waiting, FailureCode.GENERATION_FAILED, error)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed += self._fail_waiting(waiting, FailureCode.OUT_OF_MEMORY, MemoryError(NO_ROOM))
        return failed

    def _start(self, waiting: Waiting) -> None:
        model = self._model(waiting.request)
        if model is None:
            raise ValueError(f"base model {waiting.request.base_model!r} is not loaded here")
        run = model.start(waiting.request, waiting.since)
        if run is None:
            return
        self.scheduler.add(run)
        with self._news:
            if self._waiting.get(run.request.key) is waiting:
                del self._waiting[run.request.key]
                self._running[run.request.key] = run
            else:  # aborted while it was being started
                self._leaving.append(run)

    def _drop_aborted(self) -> None:
        with self._news:
            leaving, self._leaving = self._leaving, []
        for run in leaving:
            self.scheduler.remove(run)
            self.base_models[run.key.base_model].pool.release(run.slot)

    def _denoise(self, batch: list[Run]) -> list[Finished]:
        """One step of every run in the batch; of a batch that fails, halves are tried, so that only the run at fault fails."""
        if not batch:
            return []
        key, model = batch[0].key, self.base_models[batch[0].key.base_model]
        steps = [run.step for run in batch]
        try:
            model.runner.denoise(batch)
        except Exception as error:  # noqa: BLE001  a step must outlive any run: find the run, fail it by name
            model.recover()
            batch = [run for run, step in zip(batch, steps, strict=True) if run.step == step]
            rows, lacks_memory = sum(run.rows for run in batch), is_out_of_memory(error)
            if lacks_memory and model.runner.pads_less(key, rows):
                return self._denoise(batch)
            if len(batch) == 1:
                return self._fail_running(batch[0], error)
            if lacks_memory:
                self.scheduler.narrow(key, rows // 2)
            middle = len(batch) // 2
            return self._denoise(batch[:middle]) + self._denoise(batch[middle:])
        return []

    def _decode(self, run: Run) -> None:
        """Hands finished latents to the decoder's thread; the next step does not wait for it."""
        model = self.base_models[run.key.base_model]
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
        return [_outcome(run, future) for run, future in ready]

    def _fail_waiting(self, waiting: Waiting, code: FailureCode, error: Exception) -> list[Finished]:
        key = waiting.request.key
        with self._news:
            if self._waiting.get(key) is not waiting:
                return []
            del self._waiting[key]
        return [_failed(key, waiting.since, code, str(error))]

    def _fail_running(self, run: Run, error: Exception) -> list[Finished]:
        self.scheduler.remove(run)
        self.base_models[run.key.base_model].pool.release(run.slot)
        with self._news:
            if run in self._leaving:
                self._leaving.remove(run)
                return []
            del self._running[run.request.key]
        return [
            _failed(run.request.key, run.added_at, _code(error), f"a denoising step failed: {type(error).__name__}")
        ]

    def _model(self, request: RunRequest) -> BaseModel | None:
        return self.base_models.get(request.base_model or next(iter(self.base_models)))

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()

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

    def warm_up(self, width: int, height: int) -> None:
        """Makes one short image of this size with every base model: measures its exact forward shapes, fills caches."""
        for name in self.base_models:
            self.generate("", seeds=(0,), steps=2, width=width, height=height, base_model=name)

    def close(self) -> None:
        """Stops the background threads; live runs are dropped."""
        self._decoder.shutdown(cancel_futures=True)
        for model in self.base_models.values():
            model.pool.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _outcome(run: Run, future: Future[np.ndarray]) -> Finished:
    error = future.exception()
    if error is not None:
        message = NO_ROOM if is_out_of_memory(error) else str(error)
        return _failed(run.request.key, run.added_at, _code(error), message)
    return Finished(run.request.key, future.result(), None, time.monotonic() - run.added_at)


def _failed(key: str, since: float, code: FailureCode, message: str) -> Finished:
    return Finished(key, None, Failure(code=code, message=message), time.monotonic() - since)


def _code(error: BaseException) -> FailureCode:
    return FailureCode.OUT_OF_MEMORY if is_out_of_memory(error) else FailureCode.GENERATION_FAILED
