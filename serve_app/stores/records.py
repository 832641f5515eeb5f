"""How a job is written in Redis and read back: plain text fields, JSON for the request and the images, never pickle."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, Job, JobKind, JobState, StoredImage
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant

DEFAULT_PACE: Mapping[JobKind, float] = {JobKind.GENERATION: 0.5, JobKind.UPSCALE: 0.5}
"""Seconds per work unit (megapixel-step; output megapixel) until the first job has been measured: a small CPU's order."""
MILLI = 1000
"""Work is stored in whole thousandths of a unit, so that running totals never drift."""
SOONEST = timedelta(seconds=1)
"""An estimate is never in the past, nor promises less than this."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What an estimate is made of: the measured pace, the work that waits, who works on it, the job's place in its queue."""

    pace: float | None
    ready: int
    ready_work: int
    work: int
    workers: int
    accounts: int
    place: int
    now: datetime


def work_of(request: Request) -> int:
    """A request's work in thousandths of a unit, at least one."""
    return max(1, round(request.work * MILLI))


def images_of(request: Request) -> int:
    return request.num_images if isinstance(request, GenerationRequest) else 1


def write_request(request: Request) -> str:
    return json.dumps(asdict(request), separators=(",", ":"))


def read_request(kind: JobKind, text: str) -> Request:
    fields: dict[str, Any] = json.loads(text)
    if kind is JobKind.UPSCALE:
        return UpscaleRequest(**fields)
    seeds = tuple(fields.pop("seeds"))
    return GenerationRequest(**fields, seeds=seeds)


def write_images(images: Sequence[StoredImage]) -> str:
    return json.dumps([asdict(image) for image in images], separators=(",", ":"))


def read_images(text: str) -> tuple[StoredImage, ...]:
    return tuple(StoredImage(**fields) for fields in json.loads(text))


def read_snapshot(answer: Sequence[Any]) -> Job | None:
    """A job from a script's snapshot, with the time it is expected to end while it has not."""
    if not answer:
        return None
    job_id, fields, standing = answer
    return read_job(job_id, pairs(fields), _standing(standing))


def read_job(job_id: str, fields: Mapping[str, str], standing: Standing | None = None) -> Job:
    state, kind = JobState(fields["state"]), JobKind(fields["kind"])
    return Job(
        id=job_id,
        kind=kind,
        variant=Variant(fields["variant"]),
        account_id=fields["account"],
        request=read_request(kind, fields["request"]),
        state=state,
        progress=int(fields.get("progress", 0)),
        attempt=int(fields.get("attempt", 0)),
        created_at=when(fields["created"]),
        started_at=when(fields["started"]) if "started" in fields else None,
        finished_at=when(fields["finished"]) if state.is_terminal else None,
        read_at=None if standing is None else standing.now,
        finish_estimate=None if state.is_terminal or standing is None else _estimate(kind, state, fields, standing),
        images=read_images(fields["images"]) if state is JobState.COMPLETED else (),
        failure=Failure(code=FailureCode(fields["code"]), message=fields["message"]) if "code" in fields else None,
    )


def pairs(flat: Sequence[str]) -> Mapping[str, str]:
    """A hash as scripts answer with it: names and values in turn."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def when(ms: str | int) -> datetime:
    return datetime.fromtimestamp(int(ms) / 1000, UTC)


def _standing(answer: Sequence[Any]) -> Standing:
    pace, ready, ready_work, work, workers, accounts, place, now = answer
    return Standing(
        pace=float(pace) if pace else None,
        ready=int(ready),
        ready_work=int(ready_work),
        work=int(work),
        workers=workers,
        accounts=accounts,
        place=place,
        now=when(now),
    )


def _estimate(kind: JobKind, state: JobState, fields: Mapping[str, str], standing: Standing) -> datetime:
    """Now, plus the job's own remaining work, plus its share of the work ahead, at the measured pace."""
    own = int(fields["work"])
    left = own * (1 - int(fields.get("progress", 0)) / 100)
    ahead = _work_ahead(own, standing) / max(1, standing.workers) if state is JobState.QUEUED else 0.0
    pace = DEFAULT_PACE[kind] if standing.pace is None else standing.pace
    return standing.now + max(SOONEST, timedelta(seconds=(left + ahead) / MILLI * pace))


def _work_ahead(own: int, standing: Standing) -> float:
    """Half of what runs, and what the fair queue serves first: as many jobs of each waiting account as are before this one."""
    running = max(0, standing.work - standing.ready_work) / 2
    if standing.place < 0 or standing.ready == 0:
        return running  # backing off: it comes back at its old place, near the front
    before = standing.place * max(1, standing.accounts) * standing.ready_work / standing.ready
    return running + min(before, max(0, standing.ready_work - own))
