"""A model of the job protocol that makes moves on the real scripts and says when an answer is not what was promised.

It keeps its own account of every job, in plain Python and without looking at the scripts. After any number of moves,
`check` compares it with Redis and calls the auditor.
"""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from serve_app.domain.errors import FailureCode, IdempotencyConflict, QueueFull
from serve_app.domain.jobs import BeatReply, CommitReply, Failure, JobKind, JobState, Lease, StoredImage, kind_of
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant
from serve_app.stores.jobs import FIRST_PAUSE, LONGEST_PAUSE
from serve_app.stores.redis import key
from tests.audit import audit
from tests.stores.logical import Bench

ACCOUNTS = ("ann", "bob", "cat", "dan")
GROUPS = ("ga", "gb", "gc", "gd")
WORKERS = ("w1", "w2", "w3")
FAILURE = Failure(code=FailureCode.GENERATION_FAILED, message="boom")
_Answer = TypeVar("_Answer")
_Thing = TypeVar("_Thing")


@dataclass
class Expected:
    """What the model knows of one job."""

    id: str
    account: str
    kind: JobKind
    group: str
    images: int
    sequence: int
    since: int
    variant: Variant
    receipt: str
    state: str = "queued"
    attempt: int = 0
    tries: int = 0
    deadline: int = 0
    due: int | None = None
    cancel: bool = False
    progress: int = 0
    given_back: bool = False
    losses: int = 0
    worker: str = ""
    code: str | None = None

    @property
    def is_suspect(self) -> bool:
        return self.losses >= 2

    @property
    def is_ready(self) -> bool:
        return self.state == "queued" and self.due is None


@dataclass
class World:
    """Moves over one `Bench`. `repeat` is the share of calls that are made twice, word for word."""

    bench: Bench
    rnd: random.Random
    repeat: float = 0.3
    jobs: dict[str, Expected] = field(default_factory=lambda: dict[str, Expected]())
    keys: dict[tuple[str, Variant, str], str] = field(default_factory=lambda: dict[tuple[str, Variant, str], str]())
    leases: list[Lease] = field(default_factory=lambda: list[Lease]())
    moves: int = 0

    async def accept(
        self, *, account: str, group: str, images: int = 1, is_upscale: bool = False, weight: float = 1.0
    ) -> None:
        number = len(self.jobs)
        request = _upscale() if is_upscale else _generation(images)
        job = Expected(
            id=f"j{number}",
            account=account,
            kind=kind_of(request),
            group="" if is_upscale else group,
            images=1 if is_upscale else images,
            sequence=number,
            since=self.bench.now,
            variant=self.rnd.choice((Variant.A, Variant.B)),
            receipt=f"r{number}",
        )
        self._count_request(job)
        idempotency_key = f"key-{number}" if self.rnd.random() < 0.7 else None
        try:
            got = await self._maybe_twice(
                lambda: self._accept(job, request, weight, idempotency_key, "body"), _same_job
            )
        except QueueFull:
            assert self._has_no_room(account), f"{account} was turned away with room left"
            return
        assert not self._has_no_room(account), f"{account} was let in beyond a limit"
        assert got.job.id == job.id, f"accepted {job.id}, answered {got.job.id}"
        assert not got.replayed, f"{job.id} is new, answered as a replay"
        assert got.job.finish_estimate is not None, f"{job.id} has no estimate"
        assert got.job.finish_estimate.timestamp() * 1000 >= self.bench.now + 1000, f"{job.id} ends in the past"
        self.jobs[job.id] = job
        if idempotency_key is not None:
            self.keys[account, job.variant, idempotency_key] = job.id

    async def accept_again(self, *, same_body: bool) -> None:
        """The caller repeats an old request with its idempotency key, as a new call with a new id."""
        if not self.keys:
            return
        (_, _, idempotency_key), job_id = self.rnd.choice(sorted(self.keys.items()))
        job = self.jobs[job_id]
        stranger = replace(job, id="never")
        body = "body" if same_body else "other"
        try:
            got = await self._accept(stranger, _generation(1), 1.0, idempotency_key, body)
        except IdempotencyConflict:
            assert not same_body, f"{job_id}: the same body was called a conflict"
            return
        assert same_body, f"{job_id}: another body was taken for the same"
        assert (got.job.id, got.replayed) == (job_id, True), f"{job_id}: not replayed, answered {got}"

    async def claim(self, *, worker: str, resident: tuple[str, ...], limit: int, kind: JobKind) -> None:
        for job in self._due(kind)[:32]:
            job.due = None
        ready = [job for job in self.jobs.values() if job.is_ready and job.kind == kind]
        nonce = f"n{self.moves}"
        claims = await self._maybe_twice(
            lambda: self.bench.store.claim(worker, kind=kind, nonce=nonce, resident=resident, limit=limit), _same
        )
        room = limit
        for claim in claims:
            assert room > 0, f"{worker} got more than it has room for"
            job = self.jobs[claim.lease.job_id]
            assert job in ready, f"{job.id} was handed out while {job.state}, due {job.due}"
            assert claim.lease.attempt == job.attempt + 1, (
                f"{job.id}: attempt {claim.lease.attempt} after {job.attempt}"
            )
            assert (claim.group, claim.account_id) == (job.group, job.account), f"{job.id} handed out as another's"
            beside = [other for other in self._of(kind, "running") if other.worker == worker and other is not job]
            assert not (beside and job.is_suspect), f"{job.id} lost two workers and runs beside {beside[0].id}"
            assert not any(other.is_suspect for other in beside), f"{job.id} runs beside a suspect"
            older = [other for other in ready if _queues_alike(other, job) and _is_older(other, job)]
            assert not older, f"{job.id} was taken before {older[0].id} of the same account and adapter"
            ready.remove(job)
            room -= job.images
            job.state, job.attempt, job.tries = "running", job.attempt + 1, job.tries + 1
            job.worker = worker
            job.deadline = self.bench.now + _ms(self.bench.settings.lease)
            self.leases.append(claim.lease)
        patient = [job for job in ready if self.bench.now - job.since >= _ms(self.bench.fairness.owner_wait)]
        is_apart = any(job.is_suspect for job in self.jobs.values() if job.state in ("queued", "running"))
        assert room <= 0 or len(patient) < len(ready) or not ready or is_apart, (
            f"{worker} went idle while {len(ready)} jobs waited"
        )

    async def beat(self) -> None:
        lease, job, holds = self._some_lease()
        if lease is None or job is None:
            return
        progress = self.rnd.choice((-5, 0, 10, 50, 99, 100, 1000))
        reply = await self._maybe_twice(lambda: self.bench.store.beat(lease, progress=progress), _same)
        wanted = BeatReply.FENCED if not holds else BeatReply.CANCEL if job.cancel else BeatReply.OK
        assert reply is wanted, f"beat of {lease}: {reply}, expected {wanted}"
        if holds:
            job.deadline = self.bench.now + _ms(self.bench.settings.lease)
            job.progress = max(job.progress, min(99, progress))

    async def finish(self) -> None:
        lease, job, holds = self._some_lease()
        if lease is None or job is None:
            return
        images = [_image(lease, index) for index in range(job.images)]
        seconds = self.rnd.uniform(0.5, 8)
        reply = await self._maybe_twice(
            lambda: self.bench.store.finish(lease, images, seconds=seconds),
            _same_or(CommitReply.OK, CommitReply.DUPLICATE),
        )
        if not holds:
            wanted = _word_for_ended(job, lease, completed=CommitReply.DUPLICATE)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        else:
            wanted = CommitReply.OK
            self._end(job, "completed")
            job.progress = 100
        assert reply is wanted, f"finish of {lease}: {reply}, expected {wanted}"
        if reply is CommitReply.OK:
            found = await self.bench.store.image(images[0].image_id, account_id=job.account)
            assert found == images[0], f"{job.id}: its image reads as {found}"
            stranger = await self.bench.store.image(images[0].image_id, account_id="eve")
            assert stranger is None, f"{job.id}: another account reads its image"

    async def fail(self, *, retry: bool) -> None:
        lease, job, holds = self._some_lease()
        if lease is None or job is None:
            return
        reply = await self._maybe_twice(
            lambda: self.bench.store.fail(lease, FAILURE, retry=retry), _same_or(CommitReply.OK, CommitReply.DUPLICATE)
        )
        if not holds:
            wanted = _word_for_ended(job, lease, failed=CommitReply.DUPLICATE, queued=CommitReply.REQUEUED)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        elif retry and job.tries < self.bench.settings.max_attempts:
            wanted = CommitReply.REQUEUED
            self._back_off(job)
        else:
            wanted = CommitReply.OK
            self._end(job, "failed", code=FAILURE.code, ours=True)
        assert reply is wanted, f"fail of {lease}: {reply}, expected {wanted}"

    async def hand_back(self) -> None:
        lease, job, holds = self._some_lease()
        if lease is None or job is None:
            return
        reply = await self._maybe_twice(lambda: self.bench.store.hand_back(lease), _same)
        if not holds:
            wanted = _word_for_ended(job, lease, queued=CommitReply.REQUEUED)
        elif job.cancel:
            wanted = CommitReply.CANCELED
            self._end(job, "canceled", code="canceled")
        else:
            wanted = CommitReply.REQUEUED
            job.state, job.tries = "queued", job.tries - 1
        assert reply is wanted, f"hand back of {lease}: {reply}, expected {wanted}"

    async def cancel(self, *, by_operator: bool) -> None:
        if not self.jobs:
            return
        job = self.rnd.choice(self._preferred(list(self.jobs.values()), lambda job: job.state in ("queued", "running")))
        assert await self.bench.store.cancel(job.id, account_id="eve") is None, f"another account cancelled {job.id}"
        account = None if by_operator else job.account
        reply = await self._maybe_twice(lambda: self.bench.store.cancel(job.id, account_id=account), _same)
        if job.state == "queued":
            self._end(job, "canceled", code="canceled")
        elif job.state == "running":
            job.cancel = True
        assert reply == JobState(job.state), f"cancel of {job.id}: {reply}, expected {job.state}"

    async def reap(self) -> None:
        await self._maybe_twice(lambda: self.bench.store.reap(), lambda first, second: True)
        for kind in JobKind:
            self._reap_leases(kind)
            for job in self._due(kind):
                job.due = None
            limit = self.bench.now - _ms(self.bench.settings.queue_age_limit)
            for job in self._of(kind, "queued"):
                if job.since <= limit:
                    self._end(job, "expired", code="expired", ours=True)

    async def revive(self) -> None:
        if not self.jobs:
            return
        job = self.rnd.choice(self._preferred(list(self.jobs.values()), lambda job: job.state == "failed"))
        was_dead = job.state == "failed"
        assert await self.bench.store.requeue_dead(job.id) == was_dead, f"{job.id}: {job.state}, revived wrongly"
        if was_dead:
            job.state, job.tries, job.since, job.receipt, job.code = "queued", 0, self.bench.now, "", None
            job.losses = 0

    def advance(self, ms: int) -> None:
        self.bench.advance(ms)

    async def check(self) -> None:
        """The auditor's findings, and every job against what the model knows of it."""
        settings = self.bench.settings
        found = audit(self.bench.sync, max_attempts=settings.max_attempts, max_skips=self.bench.fairness.max_skips)
        found = [problem for problem in found if "test-clock" not in problem]
        assert not found, "; ".join(found)
        for job in self.jobs.values():
            await self._check_job(job)
        for kind in JobKind:
            backlog = await self.bench.store.backlog(kind)
            counted = (len(self._ready(kind)), len(self._of(kind, "running")), len(self._delayed(kind)))
            assert (backlog.ready, backlog.leased, backlog.delayed) == counted, f"backlog {backlog}, counted {counted}"

    async def drain(self) -> None:
        """A healthy worker comes back: everything accepted must reach an end."""
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
        self, job: Expected, request: Request, weight: float, idempotency_key: str | None, body: str
    ) -> Any:
        return await self.bench.store.accept(
            job_id=job.id,
            variant=job.variant,
            account_id=job.account,
            request=request,
            group=job.group,
            idempotency_key=idempotency_key,
            body_sha256=body,
            weight=weight,
            receipt=job.receipt,
        )

    async def _maybe_twice(
        self, call: Callable[[], Awaitable[_Answer]], agrees: Callable[[_Answer, _Answer], bool]
    ) -> _Answer:
        """What a client does whose first reply was lost: the same call again. Both answers must tell the same story."""
        self.moves += 1
        first = await call()
        if self.rnd.random() < self.repeat:
            second = await call()
            assert agrees(first, second), f"said {first}, and when asked again {second}"
        return first

    async def _check_job(self, job: Expected) -> None:
        row = self.bench.sync.hmget(key("job", job.id), "state", "attempt", "tries", "progress")
        found = (row[0], int(row[1] or 0), int(row[2] or 0), int(row[3] or 0))
        wanted = (job.state, job.attempt, job.tries, job.progress)
        assert found == wanted, f"{job.id}: {found}, expected {wanted}"
        if job.receipt:
            counted = self.bench.sync.zscore(key("counted", job.account, job.variant), job.receipt)
            is_counted = counted is not None
            assert is_counted != job.given_back, (
                f"{job.id} is {job.state}: its request is{'' if is_counted else ' not'} counted"
            )
        read = await self.bench.store.get(job.id, account_id=job.account, variant=job.variant)
        assert read is not None, f"{job.id} cannot be read by its account"
        assert (None if read.failure is None else read.failure.code) == job.code, f"{job.id}: {read.failure}"
        assert await self.bench.store.get(job.id, account_id="eve") is None, f"another account reads {job.id}"
        other = Variant.B if job.variant is Variant.A else Variant.A
        assert await self.bench.store.get(job.id, account_id=job.account, variant=other) is None, (
            f"{job.id}: both variants"
        )

    def _has_no_room(self, account: str) -> bool:
        settings = self.bench.settings
        waiting = sum(job.state == "queued" for job in self.jobs.values())
        own = sum(job.state in ("queued", "running") and job.account == account for job in self.jobs.values())
        return waiting >= settings.max_queued or own >= settings.max_queued_per_account

    def _count_request(self, job: Expected) -> None:
        """What the gate does before."""
        counted = key("counted", job.account, job.variant)
        self.bench.sync.zadd(counted, {job.receipt: self.bench.now + 3_600_000})
        self.bench.sync.pexpire(counted, 3_600_000)

    def _some_lease(self) -> tuple[Lease | None, Expected | None, bool]:
        """A lease some worker believes it has, the job, and whether it really has it."""
        if not self.leases:
            return None, None, False
        lease = self.rnd.choice(self._preferred(self.leases, self._is_held))
        return lease, self.jobs[lease.job_id], self._is_held(lease)

    def _is_held(self, lease: Lease) -> bool:
        job = self.jobs[lease.job_id]
        return job.state == "running" and job.attempt == lease.attempt

    def _preferred(self, things: list[_Thing], is_interesting: Callable[[_Thing], bool]) -> list[_Thing]:
        """Mostly the interesting ones: a move that finds nothing to do tests little."""
        interesting = [thing for thing in things if is_interesting(thing)]
        return interesting if interesting and self.rnd.random() < 0.7 else things

    def _back_off(self, job: Expected) -> None:
        job.state = "queued"
        due = self.bench.sync.zscore(key("delay", job.kind), job.id)
        assert due is not None, f"{job.id} is not backing off"
        pause = min(_ms(LONGEST_PAUSE), _ms(FIRST_PAUSE) * 2 ** (job.tries - 1))
        assert 0.5 * pause - 1 <= due - self.bench.now <= 1.5 * pause + 1, f"{job.id} pauses {due - self.bench.now} ms"
        job.due = int(due)

    def _reap_leases(self, kind: JobKind) -> None:
        for job in self._of(kind, "running"):
            if job.deadline > self.bench.now:
                continue
            if job.cancel:
                self._end(job, "canceled", code="canceled")
            elif job.tries < self.bench.settings.max_attempts:
                job.state, job.losses = "queued", job.losses + 1
            else:
                self._end(job, "failed", code=FailureCode.GENERATION_FAILED, ours=True)

    def _end(self, job: Expected, state: str, *, code: str | None = None, ours: bool = False) -> None:
        job.state, job.code, job.due = state, code, None
        job.given_back = job.given_back or (ours and bool(job.receipt))

    def _due(self, kind: JobKind) -> list[Expected]:
        delayed = [job for job in self._delayed(kind) if job.due is not None and job.due <= self.bench.now]
        return sorted(delayed, key=lambda job: job.due or 0)

    def _of(self, kind: JobKind, state: str) -> list[Expected]:
        return [job for job in self.jobs.values() if job.kind == kind and job.state == state]

    def _delayed(self, kind: JobKind) -> list[Expected]:
        return [job for job in self._of(kind, "queued") if job.due is not None]

    def _ready(self, kind: JobKind) -> list[Expected]:
        return [job for job in self._of(kind, "queued") if job.due is None]


async def random_move(world: World) -> None:
    """One move of the seeded test, weighted so that jobs live, die and come back."""
    rnd = world.rnd
    kind = rnd.choices((JobKind.GENERATION, JobKind.UPSCALE), (8, 2))[0]
    moves: list[tuple[int, Callable[[], Awaitable[None]]]] = [
        (
            30,
            lambda: world.accept(
                account=rnd.choice(ACCOUNTS),
                group=rnd.choice(GROUPS),
                images=rnd.choice((1, 1, 2, 4)),
                is_upscale=rnd.random() < 0.2,
                weight=rnd.choice((1.0, 2.0)),
            ),
        ),
        (5, lambda: world.accept_again(same_body=rnd.random() < 0.7)),
        (
            25,
            lambda: world.claim(
                worker=rnd.choice(WORKERS),
                resident=tuple(rnd.sample(GROUPS, rnd.randrange(3))),
                limit=rnd.choice((1, 1, 2, 8)),
                kind=kind,
            ),
        ),
        (8, world.beat),
        (14, world.finish),
        (8, lambda: world.fail(retry=rnd.random() < 0.5)),
        (3, world.hand_back),
        (6, world.reap),
        (5, lambda: world.cancel(by_operator=rnd.random() < 0.3)),
        (2, world.revive),
    ]
    if rnd.random() < 0.1:
        world.advance(rnd.choice((1, 400, 3_000, 3_000, 35_000, 35_000, 400_000, 2_000_000)))
    await rnd.choices([move for _, move in moves], [weight for weight, _ in moves])[0]()


async def play(bench: Bench, seed: int, *, moves: int = 200, check_every: int = 10, repeat: float = 0.3) -> int:
    """One seeded game to its end. Raises `AssertionError` with the seed at the first broken promise; returns the moves made."""
    world = World(bench, random.Random(seed), repeat)
    number = 0
    try:
        for number in range(moves):
            await random_move(world)
            if number % check_every == 0:
                await world.check()
        await world.drain()
    except AssertionError as broken:
        raise AssertionError(f"seed {seed}, move {number}: {broken}") from broken
    return world.moves


def _generation(images: int) -> GenerationRequest:
    return GenerationRequest(prompt="a boat", lora_id="model_x", seeds=tuple(range(images)))


def _upscale() -> UpscaleRequest:
    return UpscaleRequest(
        image_id="img_x", scale_factor=2, source_uri="memory://x", source_width=512, source_height=512
    )


def _is_older(other: Expected, job: Expected) -> bool:
    """A revived job keeps its place but waits for its adapter's owner afresh, so its wait must be the longer too."""
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
    return (one.account, one.group, one.is_suspect) == (other.account, other.group, other.is_suspect)


def _word_for_ended(job: Expected, lease: Lease, **words: CommitReply) -> CommitReply:
    """What a late write hears: its own earlier success, the cancel that ended the job, or that it is fenced."""
    if job.attempt != lease.attempt or job.state == "running":
        return CommitReply.FENCED
    return {"canceled": CommitReply.CANCELED, **words}.get(job.state, CommitReply.FENCED)


def _same(first: object, second: object) -> bool:
    return first == second


def _same_job(first: Any, second: Any) -> bool:
    return (first.job.id, first.replayed) == (second.job.id, second.replayed)


def _same_or(first_word: CommitReply, repeat_word: CommitReply) -> Callable[[CommitReply, CommitReply], bool]:
    return lambda first, second: first is second or (first, second) == (first_word, repeat_word)


def _ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
