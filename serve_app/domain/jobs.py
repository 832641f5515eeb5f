"""Jobs: the durable record of an accepted request, its states and ids."""

import base64
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from serve_app.domain.digests import NO_DIGESTS, Digests
from serve_app.domain.errors import FailureCode
from serve_app.domain.requests import ImageFormat, LoraUse, Request, UpscaleRequest, Variant


class JobKind(StrEnum):
    GENERATION = "generation"
    UPSCALE = "upscale"


DEFAULT_GROUP = "default"
"""The group of a base model whose catalog row names none."""
GROUP_NAME = r"[a-z0-9][a-z0-9\-]{0,31}"
"""The name of a group has this form."""


def pool_of(group: str) -> str:
    """Return the name of the pool in which the jobs of a group's base models wait and run.

    A pool is what the same workers take: its queue, fairness, estimates and scaling are its own. Upscales are the pool
    `upscale`. The record's field, metrics and scaling policies call a pool's name `kind`.
    """
    return str(JobKind.GENERATION) if group == DEFAULT_GROUP else f"{JobKind.GENERATION}.{group}"


def kind_of_pool(pool: str) -> JobKind:
    return JobKind(pool.partition(".")[0])


def group_of_pool(pool: str) -> str:
    """Return the group whose jobs the pool holds; empty for upscales."""
    kind, _, group = pool.partition(".")
    return "" if kind == JobKind.UPSCALE else group or DEFAULT_GROUP


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImage:
    """An image that a job committed: public id, URI in storage, size in pixels and bytes, SHA-256 (hex)."""

    image_id: str
    image_uri: str
    width: int
    height: int
    sha256: str
    size_bytes: int

    @property
    def index(self) -> int:
        """Return its place among the requested images, which ends its object's name."""
        return int(self.image_uri.rpartition("-")[2].partition(".")[0])

    @property
    def format(self) -> ImageFormat:
        return ImageFormat.of_name(self.image_uri)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    code: FailureCode
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Seconds of the parts of a completed attempt.

    They are loading its weights, denoising and decoding all images, and storing them.
    """

    load: float
    denoise: float
    store: float


class Unread(NamedTuple):
    """How many characters at the end of a job's texts the model did not read, because they are beyond its tokens."""

    prompt: int = 0
    negative_prompt: int = 0


ALL_READ = Unread()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A snapshot of the record.

    Times are aware UTC, by the store's clock; `progress` is 0..100 and at most 99 until `COMPLETED`. `finish_estimate`
    is for a job that has not ended, and is counted from `read_at`. `request` is None when its reader does not need it,
    or cannot read it: the record is damaged, or a newer version wrote it. `seconds` are those of one worker that a
    completed job used; `key_id` is the API key that asked, empty for the console.
    """

    id: str
    kind: JobKind
    variant: Variant
    account_id: str
    request: Request | None
    state: JobState
    progress: int
    attempt: int
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    read_at: datetime | None = None
    finish_estimate: datetime | None = None
    jobs_ahead: int | None = None
    """How many jobs of the same account are before it, while it waits."""
    pool: str = ""
    """The pool in which it waits or runs; empty once it has ended."""
    waits_for_worker: bool = False
    """Whether it is queued, and no worker is there."""
    images: tuple[StoredImage, ...] = ()
    failure: Failure | None = None
    key_id: str = ""
    seconds: float | None = None
    timings: Timings | None = None
    marks: tuple[str, ...] = ()
    """How its images are marked as made by a model: `MARKS` of `marking/marker.py`."""
    unread: Unread = ALL_READ


@dataclass(frozen=True, slots=True)
class Lease:
    """The time-limited right to work on a job; `attempt` is the fence that every later write must match."""

    job_id: str
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A job handed to a worker, with the lease under which it may write.

    `weights` names what its LoRAs change, alike in every job with the same ones: the LoRA's sha256, or that of several
    together; empty for an upscale. `request_id` is that of the HTTP request, for logs.
    """

    lease: Lease
    weights: str
    account_id: str
    request: Request
    created_at: datetime
    work: int = 1
    """Its price, in proportion to which jobs that run together share the time of steps."""
    request_id: str = ""
    traceparent: str = ""
    """The span of the accept, by the W3C's `traceparent`."""


class HeartbeatReply(StrEnum):
    OK = "ok"
    CANCEL = "cancel"
    FORBIDDEN = "forbidden"
    FENCED = "fenced"


class CommitReply(StrEnum):
    """Answer to finish, fail and release.

    `DUPLICATE`: this attempt had already committed; `REQUEUED`: another attempt will follow; `FORBIDDEN`: the
    account may no longer use the adapter, and the job has failed.
    """

    OK = "ok"
    DUPLICATE = "duplicate"
    FENCED = "fenced"
    REQUEUED = "requeued"
    FORBIDDEN = "forbidden"
    CANCELED = "canceled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Backlog:
    """Work not yet done, for autoscaling and metrics: job counts and seconds of one replica.

    `accepted` is what was ever accepted, done or not, in units; `busy_seconds_per_unit` the speed of a replica that is
    fully busy.
    """

    ready: int
    leased: int
    delayed: int
    ready_seconds: float
    seconds: float
    oldest_age_s: float
    accepted: float
    busy_seconds_per_unit: float


def kind_of(request: Request) -> JobKind:
    return JobKind.UPSCALE if isinstance(request, UpscaleRequest) else JobKind.GENERATION


JOB_PREFIXES = ("gen", "job", "up")
"""How ids of jobs begin: generations of interfaces A and B, those of `POST /v1/jobs`, which A and B do not show, and
upscales."""


def new_job_id(kind: JobKind, prefix: str = "gen") -> str:
    """Return an id of a new job; `prefix` is a generation's."""
    return f"{'up' if kind is JobKind.UPSCALE else prefix}_{random_name()}"


def new_image_id() -> str:
    return "img_" + random_name()


def random_name() -> str:
    """Return 26 lower-case base32 characters of 128 random bits."""
    return base64.b32encode(secrets.token_bytes(16)).decode().rstrip("=").lower()


WORKER_LIFE = timedelta(seconds=60)
"""A worker not seen for this long counts neither for estimates nor as the owner of an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewJob:
    """A request to be accepted as a job, with what the record keeps of whoever asked."""

    job_id: str
    """The caller makes the id, so that a call whose answer was lost may be repeated."""
    variant: Variant
    account_id: str
    request: Request
    weights: str = ""
    """Only a job without `loras` may name its weights, as tests do; otherwise accept.lua sets them."""
    loras: tuple[LoraUse, ...] = ()
    """The account must be allowed to use these LoRAs, whose digests are then the job's weights."""
    cost: float | None = None
    """How many times its denoising counts; None where the catalog says it, by the sampler's passes."""
    idempotency_key: str | None = None
    body: Digests = NO_DIGESTS
    """The digests of what a repeated idempotency key must come with again."""
    queue_share: float = 1.0
    """The account's share of a busy queue."""
    rate_token: str = ""
    """The counted request that is refunded if the job fails by our fault."""
    key_id: str = ""
    """The API key that asked, for the account's history and usage."""
    plan: str = ""
    """The plan under whose name metrics count the job."""
    request_id: str = ""
    """The HTTP request's id, for the lines that workers log."""
    traceparent: str = ""
    """The span that workers' spans belong to."""
    webhook: str = ""
    """This checked address is told of the job's end, in addition to the account's endpoints. After a space may follow
    that of the service, as its caller knows it."""
    pictures: tuple[str, ...] = ()
    """The ids of stored images that it needs, which are not deleted before it has ended."""
    is_sample: bool = False
    """Whether the service draws it for itself: a sample is no usage."""
    max_stored: int | None = None
    """The most bytes of Redis that the account's jobs of this interface may take."""
