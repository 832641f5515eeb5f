"""Runs upscale jobs on the upscaler. It loads no diffusers: its replica starts on torch alone."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from serve_app.domain import metrics
from serve_app.domain.jobs import ALL_READ, Claim, Failure, JobKind, Unread
from serve_app.domain.metrics import Metric
from serve_app.domain.requests import UpscaleRequest
from serve_app.jobs.images import ImageStore
from serve_app.store.measures import Measures
from serve_app.upscale.upscaler import Upscaler
from serve_app.worker.executor import Executor, MemoryPart, Pixels, stored_image
from serve_app.worker.memory import card_gauges, memory_parts, prepare_device


class UpscaledRun(NamedTuple):
    run_id: str
    image: Pixels | None
    failure: Failure | None
    decode_seconds: float = 0.0
    unread: Unread = ALL_READ


class _Waiting(NamedTuple):
    run_id: str
    pixels: Pixels
    factor: int


class _Aborted(Exception):
    pass


class UpscaleExecutor(Executor):
    """Upscales one image a step; an abort of its job stops it between tiles."""

    pool = JobKind.UPSCALE

    def __init__(self, upscaler: Upscaler, images: ImageStore, *, max_runs: int = 2) -> None:
        self._upscaler = upscaler
        self._images = images
        self._max_runs = max_runs
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._current: str | None = None
        self._is_aborted = False
        self._progress: tuple[int, int] = (0, 1)
        self._seconds: list[float] = []

    @property
    def free_runs(self) -> int:
        return self._max_runs - len(self._waiting) - (self._current is not None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        request = claim.request
        assert isinstance(request, UpscaleRequest)
        content = await stored_image(self._images, request.source_uri, "image to enlarge")
        pixels = await asyncio.to_thread(_decode, content)
        with self._lock:
            self._waiting.extend(_Waiting(run_id, pixels, request.scale_factor) for run_id in run_ids)

    def step(self) -> Sequence[UpscaledRun]:
        with self._lock:
            if not self._waiting:
                return ()
            job = self._waiting.popleft()
            self._current, self._progress, self._is_aborted = job.run_id, (0, 1), False
        began = time.monotonic()
        try:
            image = self._upscaler.upscale(job.pixels, job.factor, self._report)
        except _Aborted:
            return ()
        finally:
            with self._lock:
                self._seconds.append(time.monotonic() - began)
                self._current = None
        return (UpscaledRun(job.run_id, image, None),)

    def abort(self, run_id: str) -> bool:
        with self._lock:
            if self._current == run_id:
                self._is_aborted = True
                return True
            kept = deque(job for job in self._waiting if job.run_id != run_id)
            found = len(kept) < len(self._waiting)
            self._waiting = kept
            return found

    def progress(self) -> Mapping[str, tuple[int, int]]:
        with self._lock:
            waiting = {job.run_id: (0, 1) for job in self._waiting}
            return waiting if self._current is None else {**waiting, self._current: self._progress}

    def measure(self, measures: Measures) -> Mapping[Metric, float]:
        with self._lock:
            seconds, self._seconds = self._seconds, []
        for each in seconds:
            measures.observe(metrics.STEP_SECONDS, each, self.pool)
        return {
            metrics.RUNS: len(self.progress()),
            metrics.RUNS_LIMIT: self._max_runs,
            **card_gauges(self._upscaler.device),
        }

    def memory(self) -> Sequence[MemoryPart]:
        return memory_parts(self._upscaler.device, weights=self._upscaler.weight_bytes)

    def _report(self, done: int, total: int) -> None:
        with self._lock:
            self._progress = (done, total)
            if self._is_aborted:
                raise _Aborted


def _decode(content: bytes) -> Pixels:
    with Image.open(BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def load_upscaler(weights: Path | None, *, threads: int | None = None, memory_share: float | None = None) -> Upscaler:
    """Load the learned upscaler of the folder `weights`, or Lanczos; threads and memory as in `prepare_device`."""
    prepare_device(threads=threads, memory_share=memory_share)
    return Upscaler.load(weights, device="cuda" if torch.cuda.is_available() else "cpu")
