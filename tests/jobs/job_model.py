"""A model of the job protocol: makes moves on the real scripts and checks each answer.

It keeps the expected state of every job in plain Python, independent of the scripts. After any number of moves,
`check` compares it with Redis and calls the auditor.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any, TypeVar

from serve_app.domain.digests import Digests
from serve_app.domain.durations import milliseconds
from serve_app.domain.errors import FailureCode, Forbidden, IdempotencyConflict, QueueFull
from serve_app.domain.jobs import (
    Claim,
    CommitReply,
    Failure,
    HeartbeatReply,
    JobKind,
    JobState,
    Lease,
    NewJob,
    StoredImage,
    kind_of,
)
from serve_app.domain.requests import GenerationRequest, LoraUse, Request, UpscaleRequest, Variant
from serve_app.jobs.queue import FIRST_PAUSE, LONGEST_PAUSE, REAPED_AT_ONCE
from serve_app.store.keys import redis_key
from tests.audit import audit
from tests.jobs.logical_queue import LogicalQueue

ACCOUNTS = ("ann", "bob", "cat", "dan")
TOLD = "ann"
"""This account has an endpoint for webhooks; every third job has an address of its own."""
GROUPS = ("ga", "gb", "gc", "gd")
WORKERS = ("w1", "w2", "w3")
JOBS_WEBHOOK = "https://hooks.example/" + "x" * 150
FAILURE = Failure(code=FailureCode.GENERATION_FAILED, message="boom")
_Answer = TypeVar("_Answer")
_Thing = TypeVar("_Thing")


@dataclass
class Expected:
    """What the model expects of one job."""

    id: str
    account: str
    kind: JobKind
    group: str
    images: int
    sequence: int
    since: int
    variant: Variant
    rate_token: str
    adapter: str = ""
    state: str = "queued"
    attempt: int = 0
    tries: int = 0
    deadline: int = 0
    due: int | None = None
    cancel: bool = False
    progress: int = 0
    refunded: bool = False
    losses: int = 0
    worker: str = ""
    code: str | None = None
    ends: int = 0

    @property
    def is_quarantined(self) -> bool:
        return self.losses >= 2


@dataclass
class JobModel:
    """Makes moves on one queue.

    `repeat` is the share of calls that are made twice with the same arguments.
    """

    queue: LogicalQueue
    rnd: random.Random
    repeat: float = 0.3
    jobs: dict[str, Expected] = field(default_factory=lambda: dict[str, Expected]())
    keys: dict[tuple[str, Variant, str], str] = field(default_factory=lambda: dict[tuple[str, Variant, str], str]())
    leases: list[Lease] = field(default_factory=lambda: list[Lease]())
    denied: set[tuple[str, str]] = field(default_factory=lambda: set[tuple[str, str]]())
    """Account and LoRA."""
    moves: int = 0

    def __post_init__(self) -> None:
        """A LoRA of each group, for everyone, and an endpoint for webhooks of one account."""
        self.queue.sync.zadd(redis_key("webhooks", TOLD), {"wh": 0})
        self.queue.sync.hset(redis_key("webhook", TOLD, "wh"), "url", "https://hooks.example")
        for group in GROUPS:
            record = {"owner": "", "open": "1", "sha256": group}
            self.queue.sync.hset(redis_key("lora", _lora_of(group)), mapping=record)

    async def accept(
        self, *, account: str, group: str, images: int = 1, is_upscale: bool = False, queue_share: float = 1.0
    ) -> None:
        number = len(self.jobs)
        request = _upscale() if is_upscale else _generation(images)
        job = Expected(
            id=f"{'up' if is_upscale else 'gen'}_{number}",
            account=account,
            kind=kind_of(request),
            group="" if is_upscale else group,
            images=1 if is_upscale else images,
            sequence=number,
            since=self.queue.now,
            variant=self.rnd.choice((Variant.A, Variant.B)),
            rate_token=f"r{number}",
            adapter="" if is_upscale or self.rnd.random() < 0.3 else _lora_of(group),
        )
        self._count_request(job)
        idempotency_key = f"key-{number}" if self.rnd.random() < 0.7 else None
        try:
            got = await self._maybe_twice(
                lambda: self._accept(job, request, queue_share, idempotency_key, "body"), _same_job
            )
        except Forbidden:
            assert self._is_forbidden(job), f"{account} was refused {job.adapter}"
            return
        except QueueFull:
            assert self._is_at_a_limit(account), f"{account} was refused below every limit"
            return
        assert not self._is_forbidden(job), f"{account} was given {job.adapter}"
        assert not self._is_at_a_limit(account), f"{account} was accepted beyond a limit"
        assert got.job.id == job.id, f"accepted {job.id}, answered {got.job.id}"
        assert not got.replayed, f"{job.id} is new, answered as a replay"
        assert got.job.finish_estimate is not None, f"{job.id} has no estimate"
        assert got.job.finish_estimate.timestamp() * 1000 >= self.queue.now + 1000, f"{job.id} ends in the past"
        self.jobs[job.id] = job
        if idempotency_key is not None:
            self.keys[account, job.variant, idempotency_key] = job.id

    async def accept_again(self, *, same_body: bool) -> None:
        """The caller repeats an old request with its idempotency key, as a new call with a new id."""
        if not self.keys:
            return
        (_, _, idempotency_key), job_id = self.rnd.choice(sorted(self.keys.items()))
        job = self.jobs[job_id]
        other = replace(job, id="never")
        body = "body" if same_body else "other"
        try:
            got = await self._accept(other, _generation(1), 1.0, idempotency_key, body)
        except Forbidden:
            assert self._is_forbidden(job), f"{job.account} was refused {job.adapter}"
            return
        except IdempotencyConflict:
            assert not same_body, f"{job_id}: the same body was called a conflict"
            return
        assert same_body, f"{job_id}: another body was taken for the same"
        assert (got.job.id, got.replayed) == (job_id, True), f"{job_id}: not replayed, answered {got}"

    async def claim(self, *, worker: str, resident: tuple[str, ...], limit: int, kind: JobKind) -> None:
        for job in self._due(kind)[:32]:
            job.due = None
        ready = [job for job in self._ready(kind) if not self._is_forbidden(job)]
        nonce = f"n{self.moves}"
        answers: list[list[Claim]] = []

        async def call() -> list[Claim]:
            answers.append(await self.queue.claim(worker, pool=kind, nonce=nonce, resident=resident, limit=limit))
            return answers[-1]

        await self._maybe_twice(call, lambda first, second: first == second or not first)
        claims = answers[-1]
        capacity = limit
        for claim in claims:
            assert capacity > 0, f"{worker} got more than its capacity"
            job = self.jobs[claim.lease.job_id]
            assert job in ready, f"{job.id} was handed out while {job.state}, due {job.due}"
            assert claim.lease.attempt == job.attempt + 1, (
                f"{job.id}: attempt {claim.lease.attempt} after {job.attempt}"
            )
            assert (claim.weights, claim.account_id) == (job.group, job.account), f"{job.id} handed out as another's"
            beside = [other for other in self._of(kind, "running") if other.worker == worker and other is not job]
            assert not (beside and job.is_quarantined), f"{job.id} lost two workers and runs beside {beside[0].id}"
            assert not any(other.is_quarantined for other in beside), f"{job.id} runs beside a quarantined job"
            older = [other for other in ready if _queues_alike(other, job) and _is_older(other, job)]
            assert not older, f"{job.id} was taken before {older[0].id} of the same account and adapter"
            ready.remove(job)
            capacity -= job.images
            job.state, job.attempt, job.tries = "running", job.attempt + 1, job.tries + 1
            job.worker = worker
            job.deadline = self.queue.now + milliseconds(self.queue.settings.lease)
            self.leases.append(claim.lease)
        unowned = [job for job in ready if self.queue.now - job.since >= milliseconds(self.queue.fairness.owner_wait)]
        is_quarantining = any(job.is_quarantined for job in self.jobs.values() if job.state in ("queued", "running"))
        if self.queue.sync.get(redis_key("quarantine_worker", kind)) == worker:  # until it is empty, whoever has gone
            is_quarantining |= any(job.worker == worker for job in self._of(kind, "running"))
        assert capacity <= 0 or len(unowned) < len(ready) or not ready or is_quarantining, (
            f"{worker} went idle while {len(ready)} jobs waited"
        )
        for job in filter(self._is_forbidden, self._ready(kind)):  # a claim ends those that it meets
            if self.queue.sync.hget(redis_key("job", job.id), "state") == "failed":
                self._end(job, "failed", code=FailureCode.LORA_UNAVAILABLE, ours=True)

    async def heartbeat(self) -> None:
        if not self.leases:
            return
        beats = [self._some_lease() for _ in range(self.rnd.choice((1, 3)))]
        progress = {lease: self.rnd.choice((-5, 0, 10, 50, 99, 100, 1000)) for lease, _, _ in beats}
        replies = dict(zip(progress, await self._maybe_twice(lambda: self.queue.heartbeats(progress)), strict=True))
        for lease, job, holds in beats:
            allowed = HeartbeatReply.FORBIDDEN if self._is_forbidden(job) else HeartbeatReply.OK
            wanted = HeartbeatReply.FENCED if not holds else HeartbeatReply.CANCEL if job.cancel else allowed
            assert replies[lease] == wanted, f"heartbeat of {lease}: {replies[lease]}, expected {wanted}"
            if holds:
                job.deadline = self.queue.now + milliseconds(self.queue.settings.lease)
                job.progress = max(job.progress, min(99, progress[lease]))

    async def finish(self) -> None:
        if not self.leases:
            return
        lease, job, holds = self._some_lease()
        images = [_image(lease, index) for index in range(job.images)]
        seconds = self.rnd.uniform(0.5, 8)
        reply = await self._maybe_twice(
            lambda: self.queue.finish(lease, images, seconds=seconds),
            _same_or((CommitReply.OK, CommitReply.DUPLICATE), (CommitReply.FORBIDDEN, CommitReply.FENCED)),
        )
        if not holds:
            wanted = _reply_for_ended(job, lease, completed=CommitReply.DUPLICATE)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        elif self._is_forbidden(job):
            wanted = CommitReply.FORBIDDEN
            self._end(job, "failed", code=FailureCode.LORA_UNAVAILABLE, ours=True)
        else:
            wanted = CommitReply.OK
            self._end(job, "completed")
            job.progress = 100
        assert reply is wanted, f"finish of {lease}: {reply}, expected {wanted}"
        if reply is CommitReply.OK:
            found = await self.queue.reader.image(images[0].image_id, account_id=job.account)
            assert (found or (None, None))[1] == images[0], f"{job.id}: its image reads as {found}"
            other = await self.queue.reader.image(images[0].image_id, account_id="eve")
            assert other is None, f"{job.id}: another account reads its image"

    async def fail(self, *, retry: bool) -> None:
        if not self.leases:
            return
        lease, job, holds = self._some_lease()
        reply = await self._maybe_twice(
            lambda: self.queue.fail(lease, FAILURE, retry=retry), _same_or((CommitReply.OK, CommitReply.DUPLICATE))
        )
        if not holds:
            wanted = _reply_for_ended(job, lease, failed=CommitReply.DUPLICATE, queued=CommitReply.REQUEUED)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        elif retry and job.tries < self.queue.settings.max_attempts:
            wanted = CommitReply.REQUEUED
            self._back_off(job)
        else:
            wanted = CommitReply.OK
            self._end(job, "failed", code=FAILURE.code, ours=True)
        assert reply is wanted, f"fail of {lease}: {reply}, expected {wanted}"

    async def release(self) -> None:
        if not self.leases:
            return
        lease, job, holds = self._some_lease()
        reply = await self._maybe_twice(lambda: self.queue.release(lease))
        if not holds:
            wanted = _reply_for_ended(job, lease, queued=CommitReply.REQUEUED)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        else:
            wanted = CommitReply.REQUEUED
            job.state, job.tries = "queued", job.tries - 1
        assert reply is wanted, f"release of {lease}: {reply}, expected {wanted}"

    async def cancel(self, *, by_operator: bool) -> None:
        if not self.jobs:
            return
        job = self.rnd.choice(self._preferred(list(self.jobs.values()), lambda job: job.state in ("queued", "running")))
        assert await self.queue.cancel(job.id, account_id="eve") is None, f"another account cancelled {job.id}"
        account = None if by_operator else job.account
        reply = await self._maybe_twice(lambda: self.queue.cancel(job.id, account_id=account))
        if job.state == "queued":
            self._end(job, "canceled", code="canceled")
        elif job.state == "running":
            job.cancel = True
        assert reply == JobState(job.state), f"cancel of {job.id}: {reply}, expected {job.state}"

    async def reap(self) -> None:
        while await self._maybe_twice(self.queue.reap, lambda first, second: True) >= REAPED_AT_ONCE:
            pass
        for kind in JobKind:
            self._reap_leases(kind)
            for job in self._due(kind):
                job.due = None
            limit = self.queue.now - milliseconds(self.queue.settings.queue_age_limit)
            for job in self._of(kind, "queued"):
                if job.since <= limit:
                    self._end(job, "expired", code="expired", ours=True)
            for job in filter(self._is_forbidden, self._of(kind, "queued")):
                self._end(job, "failed", code=FailureCode.LORA_UNAVAILABLE, ours=True)

    async def decide(self, *, account: str, group: str, allow: bool) -> None:
        """The operator allows or denies an account a LoRA."""
        decision = "allow" if allow else "deny"
        await self._maybe_twice(lambda: self.queue.grant(lora=_lora_of(group), account=account, decision=decision))
        (self.denied.discard if allow else self.denied.add)((account, _lora_of(group)))

    async def requeue_dead(self) -> None:
        if not self.jobs:
            return
        job = self.rnd.choice(self._preferred(list(self.jobs.values()), lambda job: job.state == "failed"))
        was_dead = job.state == "failed"
        assert await self.queue.dead_letters.requeue(job.id) == was_dead, f"{job.id}: {job.state}, requeued wrongly"
        if was_dead:
            job.state, job.tries, job.since, job.rate_token, job.code = "queued", 0, self.queue.now, "", None
            job.losses = 0

    def advance(self, ms: int) -> None:
        self.queue.advance(ms)

    async def check(self) -> None:
        """Check the auditor's findings, and every job against what is expected of it."""
        settings = self.queue.settings
        found = audit(self.queue.sync, max_attempts=settings.max_attempts, max_skips=self.queue.fairness.max_skips)
        found = [problem for problem in found if "test-clock" not in problem]
        assert not found, "; ".join(found)
        self._check_webhooks()
        for job in self.jobs.values():
            await self._check_job(job)
        completed = [job for job in self.jobs.values() if job.state == "completed"]
        wanted = Counter({job.account: 0 for job in completed})
        for job in completed:
            wanted[job.account] += job.images
        assert self._images_used() == wanted, f"usage counts {self._images_used()}, completed {wanted}"
        for kind in JobKind:
            backlog = await self.queue.stats.backlog(kind)
            counted = (len(self._ready(kind)), len(self._of(kind, "running")), len(self._delayed(kind)))
            assert (backlog.ready, backlog.leased, backlog.delayed) == counted, f"backlog {backlog}, counted {counted}"

    async def drain(self) -> None:
        """Let a healthy worker finish: everything accepted must end."""
        for _ in range(50 + 10 * len(self.jobs)):
            if all(job.state not in ("queued", "running") for job in self.jobs.values()):
                break
            for kind in JobKind:
                await self.claim(worker="w0", resident=(), limit=4, kind=kind)
            self.leases = self.leases[-8:]
            for _ in range(8):
                await self.finish()
            self.advance(31_000)
            await self.reap()
        await self.check()
        stuck = [job.id for job in self.jobs.values() if job.state in ("queued", "running")]
        assert not stuck, f"never ended: {stuck}"

    async def _accept(
        self, job: Expected, request: Request, queue_share: float, idempotency_key: str | None, body: str
    ) -> Any:
        return await self.queue.accept(
            NewJob(
                job_id=job.id,
                variant=job.variant,
                account_id=job.account,
                request=request,
                weights=job.group,
                idempotency_key=idempotency_key,
                body=Digests(body),
                queue_share=queue_share,
                rate_token=job.rate_token,
                plan="basic",
                loras=(LoraUse(job.adapter),) if job.adapter else (),
                webhook=JOBS_WEBHOOK if _has_webhook(job) else "",
            )
        )

    async def _maybe_twice(
        self, call: Callable[[], Awaitable[_Answer]], agrees: Callable[[_Answer, _Answer], bool] = eq
    ) -> _Answer:
        """Call, and now and then again, as a client whose first reply was lost does. Both answers must agree."""
        self.moves += 1
        first = await call()
        if self.rnd.random() < self.repeat:
            second = await call()
            assert agrees(first, second), f"said {first}, and when asked again {second}"
        return first

    async def _check_job(self, job: Expected) -> None:
        row = self.queue.sync.hmget(redis_key("job", job.id), "state", "attempt", "tries")
        found = (row[0], int(row[1] or 0), int(row[2] or 0))
        wanted = (job.state, job.attempt, job.tries if job.state in ("queued", "running") else 0)
        assert found == wanted, f"{job.id}: {found}, expected {wanted}"
        if job.rate_token:
            counted = self.queue.sync.zscore(redis_key("rate", job.account, job.variant), job.rate_token)
            is_counted = counted is not None
            assert is_counted != job.refunded, (
                f"{job.id} is {job.state}: its request is{'' if is_counted else ' not'} counted"
            )
        read = await self.queue.reader.get(job.id, account_id=job.account, variant=job.variant)
        assert read is not None, f"{job.id} cannot be read by its account"
        assert read.progress == job.progress, f"{job.id}: at {read.progress} %, expected {job.progress}"
        assert (None if read.failure is None else read.failure.code) == job.code, f"{job.id}: {read.failure}"
        assert await self.queue.reader.get(job.id, account_id="eve") is None, f"another account reads {job.id}"
        other = Variant.B if job.variant is Variant.A else Variant.A
        assert await self.queue.reader.get(job.id, account_id=job.account, variant=other) is None, (
            f"{job.id}: both variants"
        )

    def _check_webhooks(self) -> None:
        """Each end has one message, for the account's endpoint and for the job's own address."""
        wanted: set[str] = set()
        for job in self.jobs.values():
            endpoints = ["wh"] * (job.account == TOLD) + ["jobs"] * _has_webhook(job)
            names = [f"{each}:msg_{job.id}_{end}" for each in endpoints for end in range(1, job.ends + 1)]
            wanted |= {redis_key("webhook_delivery", job.account, name) for name in names}
        found: set[str] = set(self.queue.sync.scan_iter(redis_key("webhook_delivery", "*"), count=1000))
        assert found == wanted, f"webhooks of ends that were not: {found - wanted}, missing: {wanted - found}"
        due = [name for each in ACCOUNTS for name in self.queue.sync.zrange(redis_key("webhook_due", each), 0, -1)]
        assert len(due) == len(wanted), f"{len(wanted)} webhooks, due {len(due)}"
        for name in wanted:
            url = self.queue.sync.hget(name, "url")
            assert url == (JOBS_WEBHOOK if ":jobs:" in name else None), f"{name} goes to {url}"

    def _images_used(self) -> Counter[str]:
        """Images counted as usage, by account."""
        used: Counter[str] = Counter()
        for name in self.queue.sync.scan_iter(redis_key("usage", "*")):
            row = self.queue.sync.hgetall(name)
            images = [int(value) for each, value in row.items() if each.startswith("images:")]
            used[name.split(":")[-2]] += sum(images)
        return used

    def _is_forbidden(self, job: Expected) -> bool:
        return (job.account, job.adapter) in self.denied

    def _is_at_a_limit(self, account: str) -> bool:
        settings = self.queue.settings
        waiting = sum(job.state == "queued" for job in self.jobs.values())
        own = sum(job.state in ("queued", "running") and job.account == account for job in self.jobs.values())
        return waiting >= settings.max_queued or own >= settings.max_queued_per_account

    def _count_request(self, job: Expected) -> None:
        """Count the request, as authentication does before an accept."""
        counted = redis_key("rate", job.account, job.variant)
        self.queue.sync.zadd(counted, {job.rate_token: self.queue.now + 3_600_000})
        self.queue.sync.pexpire(counted, 3_600_000)

    def _some_lease(self) -> tuple[Lease, Expected, bool]:
        """Return a lease that some worker believes it holds, the job, and whether it does."""
        lease = self.rnd.choice(self._preferred(self.leases, self._is_held))
        return lease, self.jobs[lease.job_id], self._is_held(lease)

    def _is_held(self, lease: Lease) -> bool:
        job = self.jobs[lease.job_id]
        return job.state == "running" and job.attempt == lease.attempt

    def _preferred(self, things: list[_Thing], is_interesting: Callable[[_Thing], bool]) -> list[_Thing]:
        """Prefer the interesting ones: a move that finds nothing to do tests little."""
        interesting = [thing for thing in things if is_interesting(thing)]
        return interesting if interesting and self.rnd.random() < 0.7 else things

    def _back_off(self, job: Expected) -> None:
        job.state = "queued"
        due = self.queue.sync.zscore(redis_key("delay", job.kind), job.id)
        assert due is not None, f"{job.id} is not backing off"
        pause = min(milliseconds(LONGEST_PAUSE), milliseconds(FIRST_PAUSE) * 2 ** (job.tries - 1))
        assert 0.5 * pause - 1 <= due - self.queue.now <= 1.5 * pause + 1, f"{job.id} pauses {due - self.queue.now} ms"
        job.due = int(due)

    def _reap_leases(self, kind: JobKind) -> None:
        for job in self._of(kind, "running"):
            if job.deadline > self.queue.now:
                continue
            if job.cancel:
                self._end(job, "canceled", code="canceled")
            elif job.tries < self.queue.settings.max_attempts:
                job.state, job.losses = "queued", job.losses + 1
            else:
                self._end(job, "failed", code=FailureCode.GENERATION_FAILED, ours=True)

    def _end(self, job: Expected, state: str, *, code: str | None = None, ours: bool = False) -> None:
        job.state, job.code, job.due = state, code, None
        job.ends += 1
        job.refunded = job.refunded or (ours and bool(job.rate_token))

    def _due(self, kind: JobKind) -> list[Expected]:
        delayed = [job for job in self._delayed(kind) if job.due is not None and job.due <= self.queue.now]
        return sorted(delayed, key=lambda job: job.due or 0)

    def _of(self, kind: JobKind, state: str) -> list[Expected]:
        return [job for job in self.jobs.values() if job.kind == kind and job.state == state]

    def _delayed(self, kind: JobKind) -> list[Expected]:
        return [job for job in self._of(kind, "queued") if job.due is not None]

    def _ready(self, kind: JobKind) -> list[Expected]:
        return [job for job in self._of(kind, "queued") if job.due is None]


async def random_move(model: JobModel) -> None:
    """Make one move, weighted so that jobs live, die and come back."""
    rnd = model.rnd
    kind = rnd.choices((JobKind.GENERATION, JobKind.UPSCALE), (8, 2))[0]
    moves: list[tuple[int, Callable[[], Awaitable[None]]]] = [
        (
            30,
            lambda: model.accept(
                account=rnd.choice(ACCOUNTS),
                group=rnd.choice(GROUPS),
                images=rnd.choice((1, 1, 2, 4)),
                is_upscale=rnd.random() < 0.2,
                queue_share=rnd.choice((1.0, 2.0)),
            ),
        ),
        (5, lambda: model.accept_again(same_body=rnd.random() < 0.7)),
        (
            25,
            lambda: model.claim(
                worker=rnd.choice(WORKERS),
                resident=tuple(rnd.sample(GROUPS, rnd.randrange(3))),
                limit=rnd.choice((1, 1, 2, 8)),
                kind=kind,
            ),
        ),
        (8, model.heartbeat),
        (14, model.finish),
        (8, lambda: model.fail(retry=rnd.random() < 0.5)),
        (3, model.release),
        (6, model.reap),
        (5, lambda: model.cancel(by_operator=rnd.random() < 0.3)),
        (2, model.requeue_dead),
        (4, lambda: model.decide(account=rnd.choice(ACCOUNTS), group=rnd.choice(GROUPS), allow=rnd.random() < 0.6)),
    ]
    if rnd.random() < 0.1:
        model.advance(rnd.choice((1, 400, 3_000, 3_000, 35_000, 35_000, 400_000, 2_000_000)))
    await rnd.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()


async def run_model(
    queue: LogicalQueue, seed: int, *, moves: int = 200, check_every: int = 10, repeat: float = 0.3
) -> int:
    """Make random moves from a seed, then drain; return the number of moves.

    Raises `AssertionError` with the seed at the first broken promise.
    """
    model = JobModel(queue, random.Random(seed), repeat)
    number = 0
    try:
        for number in range(moves):
            await random_move(model)
            if number % check_every == 0:
                await model.check()
        await model.drain()
    except AssertionError as broken:
        raise AssertionError(f"seed {seed}, move {number}: {broken}") from broken
    return model.moves


def _lora_of(group: str) -> str:
    return f"lora_{group}"


def _generation(images: int) -> GenerationRequest:
    return GenerationRequest(prompt="a boat", loras=(LoraUse("model_x"),), seeds=tuple(range(images)))


def _upscale() -> UpscaleRequest:
    return UpscaleRequest(
        image_id="img_x", scale_factor=2, source_uri="memory://x", source_width=512, source_height=512
    )


def _is_older(other: Expected, job: Expected) -> bool:
    """Return whether a job is older in the queue than another.

    A requeued job keeps its place but waits for its adapter's owner again, so its wait must be the longer too.
    """
    return other.sequence < job.sequence and other.since <= job.since


def _image(lease: Lease, index: int) -> StoredImage:
    return StoredImage(
        image_id=f"img_{lease.job_id}_{lease.attempt}_{index}",
        image_uri=f"memory://{lease.job_id}/a{lease.attempt}-{index}.png",
        width=512,
        height=512,
        sha256="0" * 64,
        size_bytes=10,
    )


def _queues_alike(one: Expected, other: Expected) -> bool:
    return (one.account, one.group, one.is_quarantined) == (other.account, other.group, other.is_quarantined)


def _reply_for_ended(job: Expected, lease: Lease, **replies: CommitReply) -> CommitReply:
    """Return the reply to a late write.

    It is the write's own earlier success, the cancel that ended the job, or that it is fenced.
    """
    if job.attempt != lease.attempt or job.state == "running":
        return CommitReply.FENCED
    return {"canceled": CommitReply.CANCELED, **replies}.get(job.state, CommitReply.FENCED)


def _same_job(first: Any, second: Any) -> bool:
    return (first.job.id, first.replayed) == (second.job.id, second.replayed)


def _same_or(*pairs: tuple[CommitReply, CommitReply]) -> Callable[[CommitReply, CommitReply], bool]:
    """Each pair is a first reply and the reply to its repetition."""
    return lambda first, second: first is second or (first, second) in pairs


def _has_webhook(job: Expected) -> bool:
    return job.sequence % 3 == 0
