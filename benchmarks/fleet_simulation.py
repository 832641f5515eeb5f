"""Simulates a fleet of generators on the real job queue and scaling decision, in logical time."""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.autoscaling_policy import _apply_delay_logic  # pyright: ignore[reportPrivateUsage]
from ray.serve.config import AutoscalingConfig

from benchmarks.fleet_load import HOUR_MS, Arrival
from benchmarks.fleet_outcome import Outcome, Sample
from benchmarks.fleet_replica import ClaimedJob, Engine, SimulatedReplica
from deployments.config import SPARE, Autoscaling
from deployments.scaling import ArrivalRate, wanted_replicas
from serve_app.domain.jobs import CommitReply, JobKind, NewJob
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.backlog import ask_backlog, backlog_from
from serve_app.jobs.queue import REAPED_AT_ONCE
from serve_app.store.keys import redis_key
from serve_app.worker.prefetch import DRAWS
from tests.jobs.logical_queue import LogicalQueue

KIND = JobKind.GENERATION
POLL_MS, SAMPLE_EVERY_MS = 500, 60_000
LEASE_MS, REAP_EVERY_MS = 30_000, 2_000
RECENT_ADAPTERS = 8_192
"""`finish.lua` remembers as many."""


class Scale(Autoscaling):
    """Serve's bounds, and what the policy counts by."""

    target_s: float = 60
    spare: float = SPARE


SHIPPED = Scale(min_replicas=0, max_replicas=8, upscale_delay_s=5, downscale_delay_s=120, downscale_to_zero_delay_s=900)
"""Those of `configs/production.yaml`."""
ENGINE = Engine()


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """A fleet of simulated generators.

    `scale` is the YAML's `replicas`; the shipped cluster's by default. `cold_start_ms` is from the decision to the
    first claim. Serve decides every second; a longer `scale_every_ms` makes a simulated day cheaper to compute.
    """

    scale: Scale = SHIPPED
    engine: Engine = ENGINE
    cold_start_ms: int = 60_000
    scale_every_ms: int = 1_000
    node_losses: int = 0
    """How often, at even distances, a node dies with all its replicas; Serve starts others elsewhere."""
    node_replicas: int = 4


class Simulation:
    """Moves the clock from event to event until every job has ended; replica-hours count until `end_ms`."""

    def __init__(
        self,
        queue: LogicalQueue,
        fleet: Fleet,
        arrivals: Sequence[Arrival],
        end_ms: int,
        seed: int,
        on_sample: Callable[[Sample], None] = lambda _: None,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._arrivals = arrivals
        self._end_ms = end_ms
        self._on_sample = on_sample
        self._random = random.Random(seed)
        self._start = queue.now
        self._now = 0
        self._events: list[tuple[int, int, Callable[[], Any]]] = []
        self._event_number = 0
        self._replicas: list[SimulatedReplica] = []
        """Those that Serve counts, the oldest first; draining ones are not among them."""
        self._draining: list[SimulatedReplica] = []
        self._idle: dict[str, SimulatedReplica] = {}
        """Those with free runs that ask for nothing until something waits."""
        self._signed_in_at = -POLL_MS
        self._waiting = 0
        self._unfinished = len(arrivals)
        self._target = 0
        self._policy_state: dict[str, Any] = {}
        self._scaling = _serve_config(fleet.scale)
        self._outcome = Outcome()
        self._demand = ArrivalRate()
        self._recent_adapters = deque[str](maxlen=RECENT_ADAPTERS)

    async def run(self) -> Outcome:
        self._at(0, self._scale)
        self._at(0, self._sample)
        for loss in range(1, self._fleet.node_losses + 1):
            self._at(round(loss * self._end_ms / (self._fleet.node_losses + 1)), self._lose_node)
        for number, arrival in enumerate(self._arrivals):
            await self._run_until(arrival.at)
            await self._accept(number, arrival)
        await self._run_until(None)
        self._target = 0
        self._start_and_stop()
        return self._outcome

    async def _run_until(self, at: int | None) -> None:
        """Let the events happen before `at`, or until every job has ended."""
        while self._events[0][0] < at if at is not None else self._unfinished:
            when, _, event = heapq.heappop(self._events)
            self._set_clock(when)
            pending = event()
            if pending is not None:
                await pending
        if at is not None:
            self._set_clock(at)

    async def _accept(self, number: int, arrival: Arrival) -> None:
        await self._queue_now().accept(
            NewJob(
                job_id=f"j{number}",
                variant=Variant.A,
                account_id=arrival.account,
                request=GenerationRequest(
                    prompt="a boat", loras=(LoraUse("model_x"),), seeds=tuple(range(arrival.images))
                ),
                weights=arrival.lora,
            )
        )
        if self._waiting == 0:
            self._sign_in_idle()
        self._waiting += 1
        hinted = self._random.choice(self._replicas) if self._replicas else None  # the hint: any replica's
        if hinted is not None and hinted.ready_at <= self._now:
            await self._visit(hinted)
        self._wake_idle()

    def _sign_in_idle(self) -> None:
        """Write what idle workers' polls of an empty queue have written meanwhile: none is simulated."""
        if self._now < self._signed_in_at + POLL_MS:
            return
        self._signed_in_at = self._now
        if not self._idle:
            return
        pipeline = self._queue_now().sync.pipeline(transaction=False)
        pipeline.zadd(redis_key("workers", KIND), dict.fromkeys(self._idle, self._start + self._now))
        pipeline.hset(redis_key("capacity", KIND), mapping={r.name: r.free_runs for r in self._idle.values()})
        pipeline.execute()

    def _wake_idle(self) -> None:
        if not self._waiting:
            return
        for replica in self._idle.values():
            self._poll_later(replica, self._random.randrange(POLL_MS))
        self._idle.clear()

    def _rest(self, replica: SimulatedReplica) -> None:
        """After a visit: ask again soon while there is something to ask for."""
        if replica.is_polling or not replica.free_runs:
            return
        if self._waiting:
            self._poll_later(replica, POLL_MS)
        else:
            self._idle[replica.name] = replica

    def _poll_later(self, replica: SimulatedReplica, in_ms: int) -> None:
        replica.is_polling = True

        async def poll() -> None:
            replica.is_polling = False
            if not replica.is_gone:
                await self._visit(replica)

        self._at(self._now + in_ms, poll)

    async def _visit(self, replica: SimulatedReplica) -> None:
        """Bring a replica up to now: end what is done, claim, step on."""
        for job in replica.advance(self._now):
            await self._finish(job)
        replica.admit()
        if not replica.is_draining:
            await self._claim(replica)
            self._rest(replica)
        elif replica.is_idle:
            self._draining.remove(replica)
            self._gone(replica)
        self._visit_at_next_change(replica)

    async def _finish(self, job: ClaimedJob) -> None:
        assert await self._queue_now().finish(job.claim.lease, [], seconds=job.seconds) is CommitReply.OK
        self._recent_adapters.append(job.claim.weights)
        assert job.began is not None
        arrival = self._arrivals[int(job.claim.lease.job_id.removeprefix("j"))]
        waits = self._outcome.burst_waits if arrival.in_burst else self._outcome.waits
        waits.append((job.began - arrival.at) / 1000)
        self._unfinished -= 1

    async def _claim(self, replica: SimulatedReplica) -> None:
        """Claim until there is nothing more to get, as a worker does."""
        while replica.free_runs and self._waiting:
            self._outcome.asked += 1
            claims = await self._queue_now().claim(
                replica.name,
                pool=KIND,
                nonce=str(self._outcome.asked),
                resident=sorted(replica.held),
                limit=replica.free_runs,
            )
            if not claims:
                return
            for claim in claims:
                self._outcome.resident += replica.take(claim)
            self._waiting -= len(claims)
            self._idle.pop(replica.name, None)
            self._outcome.claims += len(claims)
            replica.admit()

    async def _prefetch(self, replica: SimulatedReplica) -> None:
        """Begin to read an adapter of the latest jobs; the next after it is there."""
        if replica.is_gone or replica.is_draining or replica.is_full:
            return
        draws = self._random.choices(self._recent_adapters, k=DRAWS) if self._recent_adapters else []
        self._at(self._now + round(replica.engine.load_ms), lambda: self._hold(replica, draws))
        self._at(self._now + replica.engine.prefetch_ms, lambda: self._prefetch(replica))

    async def _hold(self, replica: SimulatedReplica, draws: Sequence[str]) -> None:
        group = None if replica.is_gone else replica.prefetch(draws)
        if group is not None:
            self._outcome.prefetched += 1
            await self._queue_now().recent_adapters.add_owner(KIND, group, replica.name)

    def _visit_at_next_change(self, replica: SimulatedReplica) -> None:
        at = replica.next_change()
        if at is None:
            return
        replica.changes += 1
        number = replica.changes
        self._at(math.ceil(at), lambda: self._visit(replica) if number == replica.changes else None)

    def _scale(self) -> None:
        """Serve's controller: the policy's wish, Serve's own delays, the YAML's bounds."""
        wanted = self._wanted()
        if self._replicas or not wanted:
            wanted, self._policy_state = _apply_delay_logic(
                wanted, self._target, self._scaling, dict(self._policy_state), _now=self._now / 1000
            )
        scale = self._fleet.scale
        self._target = min(max(wanted, scale.min_replicas), scale.max_replicas)
        self._start_and_stop()
        self._at(self._now + self._fleet.scale_every_ms, self._scale)

    def _wanted(self) -> int:
        pipeline = self._queue_now().sync.pipeline(transaction=False)
        ask_backlog(pipeline, KIND)
        backlog = backlog_from(KIND, pipeline.execute())
        self._demand.add(self._now / 1000, backlog.accepted)
        arriving = self._demand.units_per_second
        return wanted_replicas(backlog, arriving, self._fleet.scale.target_s, self._fleet.scale.spare)

    def _start_and_stop(self) -> None:
        while len(self._replicas) < self._target:
            self._outcome.cold_starts += 1
            ready_at = self._now + self._fleet.cold_start_ms
            name = f"r{self._outcome.cold_starts}"
            replica = SimulatedReplica(name, self._fleet.engine, started=self._now, ready_at=ready_at)
            self._replicas.append(replica)
            self._at(ready_at, lambda replica=replica: None if replica.is_draining else self._visit(replica))
            if self._fleet.engine.prefetch_ms:
                self._at(ready_at, lambda replica=replica: self._prefetch(replica))
        while len(self._replicas) > self._target:
            replica = self._replicas.pop()  # the newest, as Serve does
            replica.is_draining = True
            self._idle.pop(replica.name, None)
            if replica.is_idle:
                self._gone(replica)
            else:
                self._draining.append(replica)

    def _gone(self, replica: SimulatedReplica) -> None:
        replica.is_gone = True
        until = min(self._now, self._end_ms)
        self._outcome.gpu_hours += max(0, until - replica.started) / HOUR_MS

    def _lose_node(self) -> None:
        """Let a node's replicas die with what they draw; their jobs wait for the end of their leases."""
        first = self._random.randrange(max(1, len(self._replicas)))
        lost = self._replicas[first : first + self._fleet.node_replicas]
        self._replicas[first : first + self._fleet.node_replicas] = []
        for replica in lost:
            replica.is_draining = True
            replica.changes += 1
            self._idle.pop(replica.name, None)
            self._gone(replica)
            self._outcome.lost += len(replica.jobs)
        self._start_and_stop()
        orphans = sum(len(replica.jobs) for replica in lost)
        self._at(self._now + LEASE_MS + REAP_EVERY_MS, lambda: self._reap(orphans))

    async def _reap(self, orphans: int) -> None:
        """Requeue what died. No other heartbeat is simulated: those of the living are made up for first."""
        for replica in [*self._replicas, *self._draining]:
            for job in replica.jobs:
                await self._queue_now().heartbeat(job.claim.lease, progress=0)
        while await self._queue_now().reap() >= REAPED_AT_ONCE:
            pass
        self._waiting += orphans
        self._wake_idle()

    def _sample(self) -> None:
        outcome, now = self._outcome, min(self._now, self._end_ms)
        running = sum(max(0, now - each.started) for each in [*self._replicas, *self._draining]) / HOUR_MS
        loads = outcome.claims - outcome.resident
        replicas = len(self._replicas)
        outcome.samples.append(
            Sample(self._now, replicas, self._waiting, outcome.claims, loads, outcome.gpu_hours + running)
        )
        self._on_sample(outcome.samples[-1])
        self._at(self._now + SAMPLE_EVERY_MS, self._sample)

    def _at(self, at: int, event: Callable[[], Any]) -> None:
        self._event_number += 1
        heapq.heappush(self._events, (at, self._event_number, event))

    def _set_clock(self, at: int) -> None:
        self._now = max(self._now, at)

    def _queue_now(self) -> LogicalQueue:
        """Return the queue at the time simulated, which Redis learns only now: most events ask nothing."""
        late = self._start + self._now - self._queue.now
        if late:
            self._queue.advance(late)
        return self._queue


def _serve_config(scale: Scale) -> AutoscalingConfig:
    return AutoscalingConfig(**scale.model_dump(exclude={"target_s", "spare"}, exclude_none=True))
