"""The job store: each change of a job's state is one script, safe to run twice; reads check the owner."""

import hashlib
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from redis.asyncio import Redis

from serve_app.domain.errors import Forbidden, IdempotencyConflict, QueueFull
from serve_app.domain.jobs import (
    Backlog,
    BeatReply,
    Claim,
    CommitReply,
    Failure,
    Job,
    JobKind,
    JobState,
    Lease,
    StoredImage,
    kind_of,
)
from serve_app.domain.requests import Request, Variant
from serve_app.settings import Settings
from serve_app.stores.backlog import ask_backlog, backlog_from
from serve_app.stores.records import (
    DEFAULT_PACE,
    images_of,
    read_job,
    read_request,
    read_snapshot,
    when,
    work_of,
    write_images,
    write_request,
)
from serve_app.stores.redis import Rewrite, Script, key

WORKER_LIFE = timedelta(seconds=60)
"""A worker not heard of for this long counts neither for estimates nor as the owner of an adapter."""
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=1), timedelta(minutes=1)
"""Before the first retry, doubled for each further one; times a jitter of 0.5 to 1.5, so that retries spread."""
MAX_MESSAGE = 500
_CLAIM_FIELDS = 6

Jobs = list[Job]  # `JobStore.list` hides the built-in name inside the class
Claims = list[Claim]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fairness:
    """How far grouping by adapter may bend fairness. The fair head is passed over at most `max_skips` times and no
    later than `max_wait` after the first; no account is preferred while more than `max_lead` average waiting jobs ahead;
    a job is left to the worker that holds its adapter for at most `owner_wait` after it was accepted.
    """

    max_skips: int = 4
    max_wait: timedelta = timedelta(seconds=10)
    max_lead: float = 4.0
    owner_wait: timedelta = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """An accepted job; `replayed` when the idempotency key had brought it in before."""

    job: Job
    replayed: bool


class JobStore:
    """Jobs in Redis. Every method may raise `StoreUnavailable`; what it was asked to do then may or may not have happened,
    and asking again is safe."""

    def __init__(
        self, redis: Redis, settings: Settings, *, fairness: Fairness | None = None, rewrite: Rewrite | None = None
    ) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._settings = settings
        self._fairness = fairness or Fairness()
        names = ("accept", "read", "claim", "beat", "finish", "fail", "hand_back", "reap", "cancel", "revive")
        self._scripts = {name: Script(redis, name, rewrite) for name in names}

    async def accept(
        self,
        *,
        job_id: str,
        variant: Variant,
        account_id: str,
        request: Request,
        group: str,
        idempotency_key: str | None = None,
        body_sha256: str = "",
        weight: float = 1.0,
        receipt: str = "",
        adapter_id: str = "",
        is_open: bool = True,
    ) -> Acceptance:
        """Make a job of a request: all of it, or nothing. `weight` is the account's share when the queue is full;
        `receipt` the counted request that goes back if the job fails by our fault. The account must be allowed the
        adapter: by what the operator granted or denied it last, else by `is_open`, the catalog file's word.

        Raises `Forbidden`; `QueueFull`; `IdempotencyConflict` when the key came with another body before.
        """
        words = (
            job_id,
            kind_of(request),
            variant,
            account_id,
            group,
            work_of(request),
            weight,
            images_of(request),
            write_request(request),
            receipt,
            "" if idempotency_key is None else hashlib.sha256(idempotency_key.encode()).hexdigest(),
            body_sha256,
            self._settings.max_queued,
            self._settings.max_queued_per_account,
            _ms(self._settings.idempotency_life),
            _ms(self._index_life),
            adapter_id,
            int(is_open),
        )
        script, replicas = self._scripts["accept"], self._settings.accept_replicas
        status, snapshot = await (script.on_replicas(replicas, *words) if replicas else script(*words))
        if status == "forbidden":
            raise Forbidden("you may not use this LoRA")
        if status == "full":
            raise QueueFull("the queue is full; try again later")
        if status == "account_full":
            raise QueueFull(f"at most {self._settings.max_queued_per_account} unfinished jobs per account")
        if status == "conflict":
            raise IdempotencyConflict("this Idempotency-Key was used with a different body")
        job = read_snapshot(snapshot)
        assert job is not None, "accept answers with the record it wrote"
        return Acceptance(job, replayed=status == "replay")

    async def get(self, job_id: str, *, account_id: str, variant: Variant | None = None) -> Job | None:
        """The job if it is the account's (and was made on `variant`), with an estimate of its end while it has not."""
        job = await self._read(job_id)
        if job is None or job.account_id != account_id or variant not in (None, job.variant):
            return None
        return job

    async def show(self, job_id: str) -> Job | None:
        """The job, whoever's it is; for operators and the house's own verbs."""
        return await self._read(job_id)

    async def list(self, account_id: str, *, limit: int = 50, before: datetime | None = None) -> Jobs:
        """The account's jobs accepted before a time, newest first."""
        latest = "+inf" if before is None else f"({_epoch_ms(before)}"
        ids = await self._redis.zrevrangebyscore(key("jobs", account_id), latest, "-inf", start=0, num=limit)
        return await self._read_many(ids)

    async def list_all(self, state: JobState | None = None, limit: int = 50) -> Jobs:
        """Everyone's newest jobs, of one state if named; for operators. Looks at the newest 10,000."""
        found: list[Job] = []
        stride = 200
        for start in range(0, 10_000, stride):
            ids = await self._redis.zrevrange(key("recent"), start, start + stride - 1)
            jobs = await self._read_many(ids)
            found += [job for job in jobs if state is None or job.state is state]
            if len(found) >= limit or len(ids) < stride:
                break
        return found[:limit]

    async def claim(
        self, worker: str, *, kind: JobKind, nonce: str, resident: Sequence[str] = (), limit: int = 1
    ) -> Claims:
        """Jobs for a worker with room for `limit` images, which holds the adapters `resident`.

        A job is handed out while there is room for one of its images at least. The same nonce gets the same jobs.
        """
        fairness = self._fairness
        answer: list[Any] = await self._scripts["claim"](
            kind,
            worker,
            nonce,
            limit,
            _ms(self._settings.lease),
            fairness.max_skips,
            _ms(fairness.max_wait),
            fairness.max_lead,
            _ms(fairness.owner_wait),
            _ms(WORKER_LIFE),
            DEFAULT_PACE[kind],
            *resident,
        )
        rows = [answer[start : start + _CLAIM_FIELDS] for start in range(0, len(answer), _CLAIM_FIELDS)]
        return [_claim(kind, *row) for row in rows]

    async def beat(self, lease: Lease, *, progress: int) -> BeatReply:
        """Keep the lease and store the progress, which never falls and stays below 100 until the job is completed."""
        reply = await self._scripts["beat"](lease.job_id, lease.attempt, _ms(self._settings.lease), progress)
        return BeatReply(reply)

    async def finish(self, lease: Lease, images: Sequence[StoredImage], *, seconds: float) -> CommitReply:
        """Commit an attempt's images. `seconds` is the time of one worker that the job took, its share when several
        ran together: it corrects the account's turn and all estimates."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds: {seconds}")
        reply = await self._scripts["finish"](
            lease.job_id,
            lease.attempt,
            seconds,
            write_images(images),
            _ms(self._settings.retention),
            *(image.image_id for image in images),
        )
        return CommitReply(reply)

    async def fail(self, lease: Lease, failure: Failure, *, retry: bool) -> CommitReply:
        """End an attempt without images: `REQUEUED` when it will be tried again, `OK` when the job has failed."""
        reply = await self._scripts["fail"](
            lease.job_id,
            lease.attempt,
            failure.code,
            failure.message[:MAX_MESSAGE],
            int(retry),
            self._settings.max_attempts,
            _ms(FIRST_PAUSE),
            _ms(LONGEST_PAUSE),
            random.uniform(0.5, 1.5),
            _ms(self._settings.retention),
        )
        return CommitReply(reply)

    async def hand_back(self, lease: Lease) -> CommitReply:
        """Return a job unharmed to its old place; the attempt does not count against the cap."""
        reply = await self._scripts["hand_back"](lease.job_id, lease.attempt, _ms(self._settings.retention))
        return CommitReply(reply)

    async def reap(self, limit: int = 100) -> int:
        """Move what time has run out on; how many jobs moved. Any process may, as often as it likes."""
        return await self._scripts["reap"](
            limit,
            self._settings.max_attempts,
            _ms(self._settings.queue_age_limit),
            _ms(self._settings.retention),
            _ms(WORKER_LIFE),
        )

    async def cancel(self, job_id: str, *, account_id: str | None) -> JobState | None:
        """The state after the call: `CANCELED` at once while waiting; `RUNNING` until the worker's next beat. None when
        the account has no such job; `account_id=None` is the operator."""
        state = await self._scripts["cancel"](job_id, account_id or "", _ms(self._settings.retention))
        return JobState(state) if state else None

    async def image(self, image_id: str, *, account_id: str, variant: Variant | None = None) -> StoredImage | None:
        """A committed image of the account's jobs."""
        job_id = await self._redis.get(key("image", image_id))
        job = await self.get(job_id, account_id=account_id, variant=variant) if job_id else None
        if job is None:
            return None
        return next((image for image in job.images if image.image_id == image_id), None)

    async def backlog(self, kind: JobKind) -> Backlog:
        pipeline = self._redis.pipeline(transaction=False)
        ask_backlog(pipeline, kind)
        return backlog_from(kind, await pipeline.execute())

    async def dead(self, limit: int = 50) -> Jobs:
        """Dead letters: jobs that failed for good, newest first."""
        return await self._read_many(await self._redis.zrevrange(key("dead"), 0, limit - 1))

    async def requeue_dead(self, job_id: str) -> bool:
        """Send a dead letter back to work with all its attempts; False when it is not one."""
        return bool(await self._scripts["revive"](job_id))

    async def counts(self) -> Mapping[str, int]:
        """Since ever: accepted, ended by state, requeued, fenced; for metrics and audits."""
        row: dict[str, str] = await self._redis.hgetall(key("count"))
        return {name: int(value) for name, value in row.items()}

    async def show_many(self, job_ids: Sequence[str]) -> Mapping[str, Job]:
        """The records that there are, by id; without estimates."""
        return {job.id: job for job in await self._read_many(job_ids)}

    async def take_sweep(self, every: timedelta) -> bool:
        """True for one caller per interval: who is to look for orphaned objects."""
        return bool(await self._redis.set(key("swept"), "1", nx=True, px=_ms(every)))

    @property
    def _index_life(self) -> timedelta:
        """How long a record can live at most, from accept."""
        return self._settings.retention + 2 * self._settings.queue_age_limit

    async def _read(self, job_id: str) -> Job | None:
        return read_snapshot(await self._scripts["read"](job_id))

    async def _read_many(self, ids: Sequence[str]) -> Jobs:
        """The records that are still there, in order; without estimates."""
        if not ids:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hgetall(key("job", job_id))
        rows: list[dict[str, str]] = await pipeline.execute()
        return [read_job(job_id, row) for job_id, row in zip(ids, rows, strict=True) if row]


def new_nonce() -> str:
    """One per claim, kept for its repeats."""
    return secrets.token_hex(8)


def _claim(kind: JobKind, job_id: str, attempt: int, group: str, account_id: str, request: str, created: str) -> Claim:
    return Claim(
        lease=Lease(job_id, int(attempt)),
        group=group,
        account_id=account_id,
        request=read_request(kind, request),
        created_at=when(created),
    )


def _epoch_ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
