"""Every metric of `/metrics`, with its text and its labels, which have few and known values."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JobKind, kind_of_pool

PREFIX = "atelier_"


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MemoryUse(StrEnum):
    """What a worker's memory is used for."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    """The slots for adapters on the device use it."""
    ADAPTER_CACHE = "adapter_cache"
    """Adapters that are ready for a slot use it, in the machine's memory."""
    ACTIVATIONS = "activations"
    """Latents, prompts and the results within a forward pass use it."""
    RESERVED = "reserved"
    """Torch keeps it for its next allocations."""
    OTHER = "other"
    """The driver and other processes have it."""
    FREE = "free"


class Metric(NamedTuple):
    """A metric: its name without the prefix, and without a counter's `_total`.

    The label `pool` is kept as it is, and shown as two: the jobs' `kind`, and the `group` of base models (empty for
    upscales). `bounds` are the upper ones of a histogram's buckets.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """Return Prometheus' name; a histogram's series add `_bucket`, `_count` and `_sum`."""
        return f"{PREFIX}{self.name}{'_total' if self.type is MetricType.COUNTER else ''}"

    @property
    def is_by_pool(self) -> bool:
        return self.labels[:1] == ("pool",)

    @property
    def shown_labels(self) -> tuple[str, ...]:
        """Return the names of the labels that Prometheus reads."""
        return ("kind", "group", *self.labels[1:]) if self.is_by_pool else self.labels


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricType.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricType.GAUGE, help, labels)


def _histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, MetricType.HISTOGRAM, help, labels, bounds)


JOB_S = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Bounds of durations of jobs in seconds; `queue.lua` has the same."""
CALL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SLOW_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5)
STEP_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 10, 30)
LOAD_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
ROWS = (1, 2, 4, 8, 16, 32, 64)
ADAPTERS = (0, 1, 2, 4, 8, 16, 32)

# These are read from Redis at each scrape.
JOBS_READY = _gauge("jobs_ready", "Jobs waiting for a worker.", "pool")
JOBS_LEASED = _gauge("jobs_leased", "Jobs being worked on.", "pool")
JOBS_DELAYED = _gauge("jobs_delayed", "Jobs waiting for their next attempt.", "pool")
BACKLOG_SECONDS = _gauge("backlog_seconds", "Work not yet done, in seconds of one replica.", "pool")
OLDEST_JOB_AGE = _gauge("oldest_job_age_seconds", "Age of the oldest waiting job.", "pool")
JOBS_WAITING = _gauge("jobs_waiting", "Jobs ready or delayed, by plan.", "pool", "interface", "plan")
OLDEST_WAITING = _gauge(
    "oldest_waiting_seconds", "Age of the oldest job that is ready or delayed, by plan.", "pool", "interface", "plan"
)
DEAD_JOBS = _gauge("dead_jobs", "Failed jobs that an operator may queue again.")
WORKERS = _gauge("workers", "Workers seen in the last minute.", "pool")
ACCEPTING = _gauge("accepting", "1 while the ingress replica that answers accepts new jobs, else 0.")
EVENT_STREAMS = _gauge("event_streams", "Streams of jobs' events that are open at the ingress replica that answers.")
WEBHOOKS_WAITING = _gauge("webhooks_waiting", "Deliveries of webhooks that wait for their next attempt.")
REDIS_MEMORY = _gauge("redis_memory_bytes", "Memory that Redis uses.")
REDIS_MEMORY_LIMIT = _gauge("redis_memory_limit_bytes", "Redis's maxmemory; 0 means none.")
BACKUP_AGE = _gauge("backup_age_seconds", "Since the last copy of Redis, or the first account where there is no copy.")

# The scripts that change a job count these.
JOBS = _counter("jobs", "Jobs accepted, requeued, fenced, whose lease expired, and ended by state.", "event")
JOB_WAIT = _histogram("job_wait_seconds", "From accept to the first attempt.", JOB_S, "pool")
JOB_SECONDS = _histogram("job_seconds", "From accept to completed.", JOB_S, "pool")
JOB_FAILURES = _counter("job_failures", "Jobs that failed for good.", "pool", "code")
WEBHOOKS = _counter("webhooks", "Deliveries of webhooks that ended, by state.", "state")

# Workers measure these.
STEP_SECONDS = _histogram("step_seconds", "Denoising steps, or upscales of one image.", STEP_S, "pool")
STEP_ROWS = _histogram("step_rows", "Rows of a forward pass.", ROWS, "pool")
STEP_ADAPTERS = _histogram("step_adapters", "Distinct adapters in a forward pass.", ADAPTERS, "pool")
RUNS = _gauge("runs", "Images being made or about to be.", "pool")
RUNS_LIMIT = _gauge("runs_limit", "Images that may be made at once.", "pool")
ROWS_LIMIT = _gauge("rows_limit", "Rows that one forward pass of each worker may have.", "pool")
ADAPTERS_RESIDENT = _gauge("adapters_resident", "Adapters in slots.", "pool")
ADAPTER_LOADS = _histogram("adapter_load_seconds", "Reading an adapter's file and packing it.", LOAD_S, "pool")
ADAPTER_PREFETCHES = _counter("adapter_prefetches", "Adapters read before a job needed them.", "pool")
ADAPTER_EVICTIONS = _counter("adapter_evictions", "Adapters that lost their slot to another.", "pool")
GPU_MEMORY = _gauge("gpu_memory_bytes", "Memory of the workers' cards; each worker counts its card whole.", "pool")
GPU_MEMORY_USED = _gauge("gpu_memory_used_bytes", "Memory in use on the workers' cards, by any process.", "pool")
WORKER_MEMORY = _gauge(
    "worker_memory_bytes", "Memory of the workers by use; each counts its card whole.", "pool", "device", "use"
)
KERNEL_ACTIVE = _gauge(
    "kernel_active", "Workers on which a kernel of the engine runs; 0: all use torch's.", "pool", "kernel"
)
PICTURES_CHANGED = _gauge(
    "pictures_changed", "Workers that draw otherwise than the versions before an update.", "pool", "base_model"
)
WORKERS_UNABLE_TO_MARK = _gauge("workers_unable_to_mark", "Workers whose certificate for marks has ended.", "pool")

# Every process measures these.
STORAGE_SECONDS = _histogram("storage_seconds", "Calls to the image storage.", CALL_S, "operation")
STORAGE_ERRORS = _counter("storage_errors", "Storage calls that failed.", "operation")
HTTP_REQUESTS = _counter("http_requests", "Answered requests.", "interface", "method", "route", "status")
HTTP_SECONDS = _histogram("http_request_seconds", "From a request's headers to its whole answer.", CALL_S, "route")
HTTP_ERRORS = _counter("http_errors", "Error answers of the interfaces.", "interface", "code")
LOOP_STALLED = _counter("event_loop_stalled_seconds", "Time in which a replica answered nobody, a second or more each.")
SLOW_SCRIPTS = _histogram(
    "slow_script_seconds", "Calls of Redis's scripts that took 25 ms or more, with their wait.", SLOW_S, "script"
)
PROXY_ERRORS = _counter("proxy_errors", "Error answers of HAProxy or Serve, without the application.", "status")

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))
EVENTS = ("accepted", "completed", "failed", "canceled", "expired", "requeued", "lease_expired", "fenced")


def field_of(metric: Metric, *labels: str, part: str = "") -> str:
    """Return the field under which a metric's number is kept; the scripts write the same.

    `part` is a bucket's bound, or `sum`.
    """
    assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
    return "|".join((metric.name, *labels, *([part] if part else [])))


_FAILURES = sorted(set(FailureCode) - {FailureCode.CANCELED, FailureCode.EXPIRED})
STORAGE_OPERATIONS = ("write", "read", "delete", "lookup", "listing")


def fields_from_zero(pools: Sequence[str]) -> Iterator[str]:
    """Name the counters that are shown before their first count.

    Prometheus sees no increase in a series that begins with it.
    """
    yield from (field_of(JOB_FAILURES, pool, code) for pool in pools for code in _FAILURES)
    yield from (field_of(STORAGE_ERRORS, operation) for operation in STORAGE_OPERATIONS)
    yield from (field_of(WEBHOOKS, state) for state in ("delivered", "failed"))
    yield field_of(LOOP_STALLED)
    yield from (field_of(PROXY_ERRORS, status) for status in ("4xx", "5xx"))
    of_adapters = (ADAPTER_EVICTIONS, ADAPTER_PREFETCHES)
    yield from (
        field_of(each, pool) for each in of_adapters for pool in pools if kind_of_pool(pool) is JobKind.GENERATION
    )


def bucket_of(metric: Metric, value: float) -> str:
    """Return the first bucket that holds the value."""
    return next((f"{bound:g}" for bound in metric.bounds if value <= bound), "+Inf")
