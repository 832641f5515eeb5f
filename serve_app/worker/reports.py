"""Records an attempt's times and trace, and reports a worker's measurements to the operator's metrics."""

import time
from dataclasses import dataclass, field

from serve_app.domain.jobs import Claim, Timings
from serve_app.domain.metrics import KERNEL_ACTIVE, PICTURES_CHANGED, WORKER_MEMORY, WORKERS_UNABLE_TO_MARK
from serve_app.marking.marker import Marker
from serve_app.store.measures import Measures, gauge_field
from serve_app.tracing import Traces
from serve_app.worker.executor import Executor


@dataclass(frozen=True, slots=True)
class ImageTimes:
    """Times of one image: its pixels, the duration of their decoding, and the stored PNG."""

    decoded: float
    decode_seconds: float
    stored: float


@dataclass(slots=True)
class AttemptTimes:
    """Moments of `time.monotonic`; 0 for what has not happened."""

    claimed: float = field(default_factory=time.monotonic)
    loading: float = 0.0
    loaded: float = 0.0
    images: list[ImageTimes] = field(default_factory=list[ImageTimes])
    committing: float = 0.0

    def timings(self) -> Timings:
        """Return what an attempt whose images are all stored took."""
        decoded = max(image.decoded for image in self.images)
        stored = max(image.stored for image in self.images)
        return Timings(
            load=round(self.loaded - self.loading, 3),
            denoise=round(decoded - self.loaded, 3),
            store=round(stored - decoded, 3),
        )


def trace_attempt(traces: Traces, claim: Claim, times: AttemptTimes, *, outcome: str, reply: str) -> None:
    """Add the attempt's spans to the trace of the request, if the record names one."""
    if not traces.is_on or not claim.traceparent:
        return
    offset, now = time.time() - time.monotonic(), time.monotonic()
    lease = claim.lease

    def add(name: str, parent: str, began: float, ended: float) -> None:
        traces.start(name, parent, at=began + offset).end(ended + offset)

    add("wait", claim.traceparent, min(claim.created_at.timestamp() - offset, times.claimed), times.claimed)
    attributes = {"job_id": lease.job_id, "attempt": lease.attempt, "outcome": outcome, "reply": reply}
    attempt = traces.start(
        "attempt", claim.traceparent, at=times.claimed + offset, kind="consumer", attributes=attributes
    )
    if times.loaded:
        add("load", attempt.traceparent, times.loading, times.loaded)
    for image in times.images:
        denoised = max(times.loaded, image.decoded - image.decode_seconds)
        add("denoise", attempt.traceparent, times.loaded, denoised)
        add("decode", attempt.traceparent, denoised, image.decoded)
        add("store", attempt.traceparent, image.decoded, image.stored)
    add("finish", attempt.traceparent, times.committing, now)
    attempt.end(now + offset)


REPORT_EVERY_S = 5.0
MOST_LORAS = 100
"""A worker reports at most this many LoRA names."""


async def report(measures: Measures, executor: Executor, *, worker: str, marker: Marker | None = None) -> None:
    """Report once. Raises `StoreUnavailable`."""
    gauges = {metric.name: value for metric, value in executor.measure(measures).items()}
    gauges |= {gauge_field(WORKER_MEMORY, part.device, part.use): part.size_bytes for part in executor.memory()}
    gauges |= {gauge_field(KERNEL_ACTIVE, kernel): float(runs) for kernel, runs in executor.kernels().items()}
    changed = executor.changed_pictures()
    gauges |= {gauge_field(PICTURES_CHANGED, model): float(is_changed) for model, is_changed in changed.items()}
    gauges |= {WORKERS_UNABLE_TO_MARK.name: float(marker.has_ended)} if marker else {}
    loaded = executor.loaded_models()
    await measures.show(executor.pool, worker, gauges, base_models=loaded.base_models, loras=loaded.loras[:MOST_LORAS])
    await measures.send()
