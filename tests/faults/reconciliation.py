"""Compares what was acknowledged with what there is, for a whole service at rest."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import floor

from PIL import Image

from serve_app.domain.durations import epoch_ms
from serve_app.domain.errors import NotFound
from serve_app.domain.jobs import Job, JobState, StoredImage
from serve_app.jobs.records import read_job, work_of
from serve_app.operations.housekeeping import sweep
from tests.audit import Reading, audit
from tests.composition import Resources
from tests.support import plain_redis

STRIDE = 500
DAY_MS = 86_400_000
READ_LIMIT_S = 600.0
"""The auditor reads the whole server in one transaction: a hundred thousand jobs take a while."""


@dataclass(slots=True)
class AcknowledgedJobs:
    """Every acknowledged job id, by account: exactly what the service must account for."""

    ids: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    may_end_as: dict[str, frozenset[JobState]] = field(default_factory=dict[str, frozenset[JobState]])
    """Jobs that were meant to end otherwise than completed: canceled, poisoned, with a broken adapter."""

    def note(self, account_id: str, job_id: str, *, may_end_as: Sequence[JobState] = ()) -> None:
        self.ids.setdefault(account_id, []).append(job_id)
        if may_end_as:
            self.may_end_as[job_id] = frozenset(may_end_as)

    @property
    def all(self) -> list[str]:
        return [job_id for ids in self.ids.values() for job_id in ids]


async def audit_service(resources: Resources, acknowledged: AcknowledgedJobs, *, max_skips: int = 4) -> list[str]:
    """Everything that is wrong with a service that has come to rest, in words. Sweeps the storage first."""
    await sweep(resources.images, resources.jobs, resources.uploaded, resources.settings)
    with plain_redis(resources.redis_url, socket_timeout=READ_LIMIT_S) as client:
        problems = audit(client, max_attempts=resources.settings.max_attempts, max_skips=max_skips)
        reading = Reading(client)
    records = await records_of(resources, reading.names("job"))
    images = [image for job in records.values() for image in job.images]
    problems += _left_over(reading)
    problems += _usage(reading)
    problems += _endings(acknowledged, records)
    problems += await _objects(resources, images)
    problems += [problem for job in records.values() for problem in _image_set(job)]
    for image in images:
        problems += await _picture(resources, image)
    return problems


async def records_of(resources: Resources, job_ids: Sequence[str]) -> Mapping[str, Job]:
    found: dict[str, Job] = {}
    for start in range(0, len(job_ids), STRIDE):
        found |= await resources.jobs.find_many(job_ids[start : start + STRIDE])
    return found


async def unfinished(resources: Resources, acknowledged: AcknowledgedJobs) -> int:
    """How many acknowledged jobs have not ended, those that are gone included."""
    records = await records_of(resources, acknowledged.all)
    return sum(job_id not in records or not records[job_id].state.is_terminal for job_id in acknowledged.all)


def states(records: Mapping[str, Job]) -> dict[str, int]:
    return dict(Counter(str(job.state) for job in records.values()))


def _left_over(reading: Reading) -> Iterator[str]:
    """At rest nothing waits, runs, backs off or counts as live."""
    for family in ("queue", "group", "groups", "vtime", "age", "delay", "lease"):
        for name in reading.names(family):
            yield f"left over: {family}:{name} holds {sorted(reading.row(f'{family}:{name}'))[:5]}"
    for account, number in reading.row("unfinished").items():
        yield f"left over: {number} live jobs of {account}"


def _usage(reading: Reading) -> Iterator[str]:
    """Each completed job is counted once, whoever was killed around its commit; nothing else is."""
    counted = {
        f"usage:{name}": {k: int(n) for k, n in reading.row(f"usage:{name}").items()} for name in reading.names("usage")
    }
    samples = set(reading.row("loras_samples").values())
    wanted: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for job_id in reading.names("job"):
        row = reading.row(f"job:{job_id}")
        job = read_job(job_id, row)
        if job.state is not JobState.COMPLETED or job_id in samples:
            continue
        assert job.request is not None
        assert job.finished_at is not None
        assert job.seconds is not None
        day = wanted[f"usage:{job.account_id}:{epoch_ms(job.finished_at) // DAY_MS}"]
        source = f"{job.key_id}:{row.get('adapter', job.kind)}"
        day[f"images:{source}"] += len(job.images)
        day[f"work:{source}"] += work_of(job.request)
        day[f"ms:{source}"] += floor(job.seconds * 1000 + 0.5)
    for name in sorted(counted.keys() | wanted.keys()):
        if counted.get(name, {}) != wanted[name]:
            yield f"{name}: counted {counted.get(name, {})}, its completed jobs make {dict(wanted[name])}"


def _endings(acknowledged: AcknowledgedJobs, records: Mapping[str, Job]) -> Iterator[str]:
    for account_id, ids in acknowledged.ids.items():
        for job_id in ids:
            job = records.get(job_id)
            if job is None:
                yield f"{job_id}: acknowledged, and there is no record of it"
            elif job.account_id != account_id:
                yield f"{job_id}: acknowledged to {account_id}, recorded for {job.account_id}"
            elif not job.state.is_terminal:
                yield f"{job_id}: still {job.state}"
            elif job.state not in acknowledged.may_end_as.get(job_id, {JobState.COMPLETED}):
                yield f"{job_id}: ended {job.state} ({job.failure and job.failure.message})"


def _image_set(job: Job) -> Iterator[str]:
    if job.state is not JobState.COMPLETED:
        return
    if job.request is None:
        yield f"{job.id}: completed, and its request cannot be read"
        return
    wanted = job.request.num_images
    if len({image.image_id for image in job.images}) != wanted:
        yield f"{job.id}: {len(job.images)} images instead of {wanted}"
    for image in job.images:
        if (image.width, image.height) != (job.request.width, job.request.height):
            yield f"{job.id}: {image.width}x{image.height} instead of {job.request.width}x{job.request.height}"


async def _objects(resources: Resources, images: Sequence[StoredImage]) -> list[str]:
    """The storage holds what the records name, and nothing else."""
    stored = {resources.images.uri(name) for name in await resources.images.names()}
    named = Counter(image.image_uri for image in images)
    return [
        *(f"{uri}: no record names it" for uri in sorted(stored - named.keys())),
        *(f"{uri}: named {times} times" for uri, times in named.items() if times > 1),
    ]


async def _picture(resources: Resources, image: StoredImage) -> list[str]:
    """Byte for byte what was committed, and a PNG of the recorded size."""
    try:
        png = await resources.images.get(image.image_uri)
    except NotFound:
        return [f"{image.image_id}: its object is gone"]
    if len(png) != image.size_bytes or hashlib.sha256(png).hexdigest() != image.sha256:
        return [f"{image.image_id}: its object is not what was committed ({len(png)} of {image.size_bytes} bytes)"]
    with Image.open(BytesIO(png)) as opened:
        if opened.size != (image.width, image.height):
            return [f"{image.image_id}: a PNG of {opened.size} instead of {image.width}x{image.height}"]
        opened.load()
    return []
