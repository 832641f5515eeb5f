"""Changes a job's state: each change is one Lua script, and safe to run twice."""

import json
import logging
import math
import random
import secrets
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from serve_app.domain.accounts import Caller
from serve_app.domain.digests import Digests
from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import (
    ALL_READ,
    WORKER_LIFE,
    Claim,
    CommitReply,
    Failure,
    HeartbeatReply,
    JobKind,
    JobState,
    Lease,
    NewJob,
    StoredImage,
    Timings,
    Unread,
    kind_of_pool,
)
from serve_app.domain.requests import LoraUse
from serve_app.jobs.acceptance import Acceptance, accept_row, key_args, read_acceptance
from serve_app.jobs.backlog import DEFAULT_SECONDS_PER_UNIT
from serve_app.jobs.compact_form import Result, pack_result
from serve_app.jobs.records import JOB_BYTES, RECORD_VERSION, UNREADABLE, read_request, read_state, record_version
from serve_app.settings import Settings
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Argument, Rewrite, Script, pairs

DAMAGED = Failure(
    code=FailureCode.GENERATION_FAILED, message="The job's record cannot be read by this version of the service."
)
"""The failure of a job whose record is damaged."""
NEWER_RECORD_PAUSE = timedelta(seconds=5)
"""A job that a newer version wrote is offered again after this long, until a worker of that version takes it."""

MAX_RESIDENT = 1_000
"""One claim names at most this many weights, which cost the script 0.2 µs each where jobs wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fairness:
    """How far grouping by adapter may deviate from fairness.

    The fair head is skipped at most `max_skips` times, and no later than `max_wait` after the first; no account is
    preferred while more than `max_lead` average waiting jobs ahead; a job is left to the worker that holds its adapter
    for at most `owner_wait` after it was accepted.
    """

    max_skips: int = 4
    max_wait: timedelta = timedelta(seconds=10)
    max_lead: float = 4.0
    owner_wait: timedelta = timedelta(seconds=1)


def new_nonce() -> str:
    """Name a claim; its repeats use the same name."""
    return secrets.token_hex(8)


def named_in_claim(resident: Sequence[str]) -> str:
    """Return the weights that a claim names, one a line; of more than it can name, each claim names others."""
    return "\n".join(resident if len(resident) <= MAX_RESIDENT else random.sample(resident, MAX_RESIDENT))


log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=1), timedelta(minutes=1)
"""The first retry waits this long and each further one twice as long, times a jitter of 0.5 to 1.5."""
MAX_MESSAGE = 500
REAPED_AT_ONCE = 10
"""The reaper's script looks at this many jobs, each with up to ten webhooks to tell: about 3 ms."""


class JobQueue:
    """Changes the state of jobs, from accept to the end.

    Every method may raise `StoreUnavailable`: the change may or may not have happened then, and asking again is safe.
    """

    def __init__(
        self,
        redis: RedisClient,
        settings: Settings,
        *,
        fairness: Fairness | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        self._settings = settings
        self._fairness = fairness or Fairness()
        self._lease_ms = milliseconds(settings.lease)
        self._retention_ms = milliseconds(settings.retention)
        self._permitted: tuple[int, Set[Lease]] = 0, frozenset()
        """A revision of LoRAs and grants, and the leases whose accounts could use their adapters then."""
        names = ("accept", "find_accepted", "claim", "heartbeat", "finish", "fail", "release", "reap", "cancel")
        self.scripts: Mapping[str, Script] = {name: Script(redis, f"jobs/{name}", rewrite) for name in names}

    async def accept(self, new: NewJob) -> Acceptance:
        """Make a job of a request, whole or not at all.

        Raises `Forbidden`; `QueueFull`; `NotFound` where one of its `pictures` is gone; `IdempotencyConflict` when the
        key came with another body before.
        """
        replicas = self._settings.accept_replicas
        args: Mapping[str, Argument] = {
            "new": accept_row(new),
            **key_args(new.account_id, new.variant, new.idempotency_key, new.body),
            "idempotency_ms": milliseconds(self._settings.idempotency_life),
            "max_queued": self._settings.max_queued,
            "max_unfinished": self._settings.max_queued_per_account,
            "max_stored": new.max_stored,
            "job_bytes": JOB_BYTES,
            "index_ms": milliseconds(self._settings.longest_record_life),
            "version": RECORD_VERSION,
            "key_id": new.key_id,
            "plan": f"{new.variant}:{new.plan}" if new.plan else "",
            "request_id": new.request_id,
        }
        accept = self.scripts["accept"]
        answer = await (accept.on_replicas(replicas, **args) if replicas else accept(**args))
        return read_acceptance(answer, self._settings)

    async def find_accepted(
        self, caller: Caller, idempotency_key: str, body: Digests, loras: Sequence[LoraUse]
    ) -> Acceptance | None:
        """Return the job that an earlier call with this key and body made; None where there is none.

        Raises `Forbidden` where the account may no longer use its LoRAs, and `IdempotencyConflict` for another body.
        """
        answer = await self.scripts["find_accepted"](
            **key_args(caller.account_id, caller.variant, idempotency_key, body),
            loras=json.dumps([(lora.id,) for lora in loras]),
        )
        return read_acceptance(answer, self._settings) if answer else None

    async def claim(
        self, worker: str, *, pool: str, nonce: str, resident: Sequence[str] = (), limit: int = 1
    ) -> list[Claim]:
        """Hand jobs of a pool to a worker that can start `limit` images and holds the adapters `resident`.

        A job is handed out while at least one of its images can start. The same nonce gets the same jobs.
        A job whose record cannot be read is not among them: it fails for good, by name, or, where a newer version wrote
        it, goes back for a worker of that version. A job whose account may no longer use its adapter fails instead.
        """
        fairness = self._fairness
        answer: list[Any] = await self.scripts["claim"](
            pool=pool,
            worker=worker,
            nonce=nonce,
            capacity=limit,
            lease_ms=self._lease_ms,
            max_skips=fairness.max_skips,
            max_wait_ms=milliseconds(fairness.max_wait),
            max_lead=fairness.max_lead,
            owner_wait_ms=milliseconds(fairness.owner_wait),
            worker_life_ms=milliseconds(WORKER_LIFE),
            default_seconds_per_unit=DEFAULT_SECONDS_PER_UNIT[kind_of_pool(pool)],
            retention_ms=self._retention_ms,
            resident_weights=named_in_claim(resident),
        )
        claims: list[Claim] = []
        for job_id, attempt, cells in answer:
            lease, fields = Lease(job_id, attempt), pairs(cells)
            try:
                claims.append(_read_claim(kind_of_pool(pool), lease, fields))
            except UnreadableRecord as error:
                await self._give_up(lease, record_version(fields.get("version")), error)
        return claims

    async def _give_up(self, lease: Lease, version: int, error: UnreadableRecord) -> None:
        log.error(
            "job %s: attempt %s: its record (version %d) cannot be read: %s",
            lease.job_id,
            lease.attempt,
            version,
            error.message,
        )
        if version > RECORD_VERSION:
            await self.release(lease, pause=NEWER_RECORD_PAUSE)
        else:
            await self.fail(lease, DAMAGED, retry=False)

    async def heartbeat(self, lease: Lease, *, progress: int) -> HeartbeatReply:
        (reply,) = await self.heartbeats({lease: progress})
        return HeartbeatReply(reply)

    async def heartbeats(self, progress: Mapping[Lease, int]) -> list[str]:
        """Extend the leases of a worker and store the progress of each; return their `HeartbeatReply`s, in order.

        Progress never falls, and is at most 99 until the job is completed.
        """
        attempts: list[str | int] = []
        for lease, percent in progress.items():
            attempts += [lease.job_id, lease.attempt, percent]
        revision, permitted = self._permitted
        revision, *replies = await self.scripts["heartbeat"](
            lease_ms=self._lease_ms, permitted_at=revision if progress.keys() <= permitted else None, attempts=attempts
        )
        self._permitted = (
            revision,
            {lease for lease, reply in zip(progress, replies, strict=True) if reply == HeartbeatReply.OK},
        )
        return replies

    async def finish(
        self,
        lease: Lease,
        images: Sequence[StoredImage],
        *,
        seconds: float,
        timings: Timings | None = None,
        marks: Sequence[str] = (),
        unread: Unread = ALL_READ,
    ) -> CommitReply:
        """Commit an attempt's images.

        `seconds` of one worker were used, the job's share when several ran together: they correct the account's virtual
        time and all estimates, and count as the account's usage. `timings`, `marks` and `unread` are for display.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds: {seconds}")
        reply = await self.scripts["finish"](
            job_id=lease.job_id,
            attempt=lease.attempt,
            seconds=seconds,
            result=pack_result(lease.job_id, Result(tuple(images), seconds, timings)),
            marks=" ".join(marks),
            unread=" ".join(map(str, unread)) if any(unread) else "",
            retention_ms=self._retention_ms,
            image_ids=[image.image_id for image in images],
        )
        return CommitReply(reply)

    async def fail(self, lease: Lease, failure: Failure, *, retry: bool) -> CommitReply:
        """End an attempt without images: `REQUEUED` when it will be tried again, `OK` when the job has failed."""
        reply = await self.scripts["fail"](
            job_id=lease.job_id,
            attempt=lease.attempt,
            code=failure.code,
            message=failure.message[:MAX_MESSAGE],
            retry=retry,
            max_attempts=self._settings.max_attempts,
            first_pause_ms=milliseconds(FIRST_PAUSE),
            max_pause_ms=milliseconds(LONGEST_PAUSE),
            jitter=random.uniform(0.5, 1.5),
            retention_ms=self._retention_ms,
        )
        return CommitReply(reply)

    async def release(self, lease: Lease, *, pause: timedelta = timedelta()) -> CommitReply:
        """Return a job to its old place, after a pause; the attempt does not count against the cap."""
        reply = await self.scripts["release"](
            job_id=lease.job_id, attempt=lease.attempt, pause_ms=milliseconds(pause), retention_ms=self._retention_ms
        )
        return CommitReply(reply)

    async def reap(self, limit: int = REAPED_AT_ONCE) -> int:
        """Move the jobs whose time is over; return how many. Any process may call it, however often."""
        return await self.scripts["reap"](
            limit=limit,
            max_attempts=self._settings.max_attempts,
            queue_age_ms=milliseconds(self._settings.queue_age_limit),
            retention_ms=self._retention_ms,
            worker_life_ms=milliseconds(WORKER_LIFE),
        )

    async def cancel(self, job_id: str, *, account_id: str | None) -> JobState | None:
        """Cancel a job and return its state after the call: a waiting one at once, a running one soon.

        The worker of a running job learns it with its next heartbeat. None when the account has no such job;
        `account_id=None` is the operator. Raises `UnreadableRecord`.
        """
        state = await self.scripts["cancel"](job_id=job_id, account=account_id, retention_ms=self._retention_ms)
        return read_state(state) if state else None


def _read_claim(kind: JobKind, lease: Lease, fields: Mapping[str, str]) -> Claim:
    request = read_request(kind, fields)
    try:
        created_at, work = from_epoch_ms(fields["created"]), int(fields.get("work", 1))
    except UNREADABLE as error:
        raise UnreadableRecord(f"created or work: {type(error).__name__}") from error
    return Claim(
        lease=lease,
        weights=fields.get("group", ""),
        account_id=fields.get("account", ""),
        request=request,
        created_at=created_at,
        work=work,
        request_id=fields.get("request_id", ""),
        traceparent=fields.get("traceparent", ""),
    )
