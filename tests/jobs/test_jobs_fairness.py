"""Fairness, grouping, quarantine, estimates and grants: which job is claimed next, and when callers may expect theirs.

Each test has a new `LogicalQueue`, whose clock it sets, on the real scripts.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.errors import FailureCode, Forbidden
from serve_app.domain.jobs import WORKER_LIFE, Claim, CommitReply, HeartbeatReply, Job, JobKind, Lease
from serve_app.jobs.backlog import DEFAULT_SECONDS_PER_UNIT
from serve_app.jobs.queue import Fairness
from serve_app.store.keys import redis_key
from tests.jobs.job_model import FAILURE
from tests.jobs.logical_queue import LogicalQueue, roomy_settings
from tests.made_jobs import new_job, stored_image
from tests.support import existing

WORK = 30 * 512 * 512 / 1e6
"""The work of one image at the default size and steps, in megapixel-steps."""
COST = round(WORK, 3) * DEFAULT_SECONDS_PER_UNIT[JobKind.GENERATION]
"""Seconds charged for it before anything was measured."""
FAR = timedelta(hours=1)
OpenQueue = Callable[..., LogicalQueue]


@pytest.fixture
async def open_queue(redis_url: str, tmp_path: Path) -> AsyncIterator[OpenQueue]:
    """Return what opens a new queue, with a fairness of its own."""
    opened: list[LogicalQueue] = []

    def queue(fairness: Fairness | None = None) -> LogicalQueue:
        opened.append(LogicalQueue(redis_url, roomy_settings(tmp_path), fairness=fairness, database=3))
        return opened[-1]

    yield queue
    for one in opened:
        await one.close()


@pytest.fixture
def queue(open_queue: OpenQueue) -> LogicalQueue:
    return open_queue()


async def test_accounts_are_served_by_their_shares(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 12, queue_share=2.0)
    await _accept(queue, "bob", 12)
    served = await _serve(queue, 9)
    assert served.count("ann") == 6, served


async def test_a_small_account_does_not_wait_behind_a_burst(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 12)
    await _accept(queue, "bob", 3)
    served = await _serve(queue, 6)
    assert served.count("bob") == 3, served


async def test_the_time_a_job_took_corrects_its_accounts_vtime(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 3, queue_share=2.0)
    await _accept(queue, "bob", 8)
    lease = await _claim_one(queue)
    assert _vtime(queue, "ann") == COST / 2
    await _finish(queue, lease, seconds=5 * COST)
    assert _vtime(queue, "ann") == 5 * COST / 2
    assert await _serve(queue, 1) == ["bob"]


async def test_a_correction_reaches_an_account_with_nothing_waiting(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1)
    await _accept(queue, "bob", 8)
    lease = await _claim_one(queue)
    await _finish(queue, lease, seconds=4 * COST)
    await _accept(queue, "ann", 1)
    assert _vtime(queue, "ann") == 4 * COST


async def test_an_account_cannot_escape_its_debt_by_going_idle(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1, images=4)
    await _accept(queue, "bob", 8)
    assert await _serve(queue, 2) == ["ann", "bob"]
    await _accept(queue, "ann", 1)
    assert await _serve(queue, 3) == ["bob", "bob", "bob"]


async def test_an_account_cannot_save_up_service(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 12)
    await _serve(queue, 6)
    await _accept(queue, "bob", 6)
    served = await _serve(queue, 6)
    assert served.count("bob") in (3, 4), served


async def test_all_are_even_when_the_queue_is_empty(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1, images=4)
    await _serve(queue, 1)
    await _accept(queue, "ann", 3)
    await _accept(queue, "bob", 3)
    served = await _serve(queue, 4)
    assert served.count("ann") == 2, served


async def test_an_attempt_that_came_to_nothing_costs_its_account_nothing(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 3)
    await _accept(queue, "bob", 3)
    lease = await _claim_one(queue)
    assert _vtime(queue, "ann") == COST
    await queue.release(lease)
    assert _vtime(queue, "ann") == 0
    lease = await _claim_one(queue)
    await queue.fail(lease, FAILURE, retry=True)
    assert _vtime(queue, "ann") == 0
    await _claim(queue, "w1")
    await _lose_leases(queue)
    assert _vtime(queue, "ann") == 0


async def test_a_returned_job_keeps_its_place(queue: LogicalQueue) -> None:
    first = (await _accept(queue, "ann", 3))[0]
    lease = await _claim_one(queue)
    await queue.release(lease)
    assert (await _claim_one(queue)).job_id == first.id
    await _lose_leases(queue)
    assert (await _claim_one(queue)).job_id == first.id


async def test_a_held_adapter_is_preferred(queue: LogicalQueue) -> None:
    await _accept_of(queue, "ga", "gb")
    assert await _groups(queue, "w1", resident=("gb", "gx")) == ["gb"]


async def test_of_several_held_adapters_the_oldest_job_comes_first(queue: LogicalQueue) -> None:
    await _accept_of(queue, "ga", "gb", "gc", "gd", "ge", "gf")
    assert await _groups(queue, "w1", resident=("gf", "ge", "gd", "gc", "gb"), limit=3) == ["gb", "gc", "gd"]


async def test_of_more_held_adapters_than_are_looked_at_the_oldest_job_comes_first(queue: LogicalQueue) -> None:
    groups = [f"g{n:02}" for n in range(16)]
    await _accept_of(queue, "gx", *groups)
    assert await _groups(queue, "w1", resident=groups[::-1], limit=3) == groups[:3]


async def test_a_worker_of_hundreds_of_adapters_takes_the_longest_waiting_of_them(queue: LogicalQueue) -> None:
    resident = [f"g{n}" for n in range(300)]
    await _accept_of(queue, "gx", "g270", "gy", "g3")
    assert await _groups(queue, "w1", resident=resident, limit=2) == ["g270", "g3"]
    assert await _groups(queue, "w1", resident=resident, limit=2) == ["gx", "gy"], "none of its own waits any more"


async def test_the_fair_head_is_passed_over_a_bounded_number_of_times(open_queue: OpenQueue) -> None:
    queue = open_queue(Fairness(max_skips=4, max_wait=FAR, max_lead=1e9))
    await _accept(queue, "ann", 1, group="gb")
    await _accept(queue, "bob", 10, group="ga")
    served = [(await _groups(queue, f"w{n}", resident=("ga",)))[0] for n in range(6)]
    assert served == ["ga"] * 4 + ["gb"] + ["ga"], served


async def test_the_fair_head_is_passed_over_for_a_bounded_time(open_queue: OpenQueue) -> None:
    queue = open_queue(Fairness(max_skips=4, max_wait=timedelta(seconds=10), max_lead=1e9))
    await _accept(queue, "ann", 1, group="gb")
    await _accept(queue, "bob", 10, group="ga")
    assert await _groups(queue, "w1", resident=("ga",)) == ["ga"]
    queue.advance(9_999)
    assert await _groups(queue, "w2", resident=("ga",)) == ["ga"]
    queue.advance(1)
    assert await _groups(queue, "w3", resident=("ga",)) == ["gb"]


async def test_nobody_is_served_further_ahead_than_the_lead(open_queue: OpenQueue) -> None:
    queue = open_queue(Fairness(max_skips=100, max_wait=FAR, max_lead=2.5))
    await _accept(queue, "ann", 1, group="gb")
    await _accept(queue, "bob", 10, group="ga")
    served = [(await _groups(queue, f"w{n}", resident=("ga",)))[0] for n in range(4)]
    assert served == ["ga", "ga", "ga", "gb"], served


async def test_a_group_is_left_to_the_worker_that_holds_it(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1, group="ga")
    assert await _groups(queue, "w1", limit=4) == ["ga"]
    await _accept(queue, "bob", 1, group="ga")
    assert await _groups(queue, "w2", limit=4) == []
    assert await _groups(queue, "w1", resident=("ga",), limit=3) == ["ga"]


async def test_a_popular_group_is_left_to_whoever_of_its_many_workers_has_capacity(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1, group="ga")
    assert await _groups(queue, "w0", limit=4) == ["ga"]
    for number in range(1, 11):
        await _accept(queue, "ann", 1, group="ga")
        assert await _groups(queue, f"w{number}", resident=("ga",)) == ["ga"], "and is full"
    await _accept(queue, "bob", 1, group="ga")
    assert await _groups(queue, "w11", limit=4) == []
    assert await _groups(queue, "w0", resident=("ga",), limit=3) == ["ga"]


async def test_other_work_is_taken_while_a_group_is_left_to_its_owner(queue: LogicalQueue) -> None:
    await _give_away(queue, "ga")
    await _accept_of(queue, "ga", "gb")
    await _accept(queue, "bob", 1, group="gc")
    assert sorted(await _groups(queue, "w2", limit=4)) == ["gb", "gc"]


async def test_an_account_far_ahead_gets_nothing_while_a_group_is_left_to_its_owner(open_queue: OpenQueue) -> None:
    for max_lead, expected in ((0.5, []), (1e9, ["gb"])):
        queue = open_queue(Fairness(max_skips=100, max_wait=FAR, max_lead=max_lead))
        await _accept(queue, "ann", 1, group="ga")
        assert await _groups(queue, "w1", limit=4) == ["ga"]
        await _accept(queue, "bob", 2, group="gb", images=4)
        assert await _groups(queue, "w3") == ["gb"]
        await _accept(queue, "ann", 1, group="ga")
        assert await _groups(queue, "w2") == expected


async def test_a_saturated_owner_loses_its_claim(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 2, group="ga")
    assert await _groups(queue, "w1", limit=1) == ["ga"]
    assert await _groups(queue, "w2", limit=1) == ["ga"]


async def test_a_job_that_waited_for_the_owner_goes_to_anyone(queue: LogicalQueue) -> None:
    await _give_away(queue, "ga")
    await _accept_of(queue, "ga")
    queue.advance(999)
    assert await _groups(queue, "w2") == []
    queue.advance(1)
    assert await _groups(queue, "w2") == ["ga"]


async def test_a_worker_not_seen_for_long_owns_nothing(queue: LogicalQueue) -> None:
    await _give_away(queue, "ga")
    queue.advance(int(WORKER_LIFE.total_seconds() * 1000))
    await _accept_of(queue, "ga")
    assert await _groups(queue, "w2") == ["ga"]


async def test_a_heartbeat_keeps_its_worker_alive(queue: LogicalQueue) -> None:
    lease = await _give_away(queue, "ga")
    for _ in range(4):
        queue.advance(20_000)
        await queue.heartbeat(lease, progress=1)
        await queue.reap()
    await _accept(queue, "ann", 1, group="ga")
    assert await _groups(queue, "w2") == []


async def test_a_worker_gets_the_whole_of_a_job_that_begins_within_its_capacity(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1, images=4)
    await _accept(queue, "ann", 1)
    assert len(await _claim(queue, "w1", limit=2)) == 1
    assert len(await _claim(queue, "w1", limit=2)) == 1


async def test_retries_wait_longer_each_time(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 12)
    for shortest in (500, 1000):
        leases = await _claim(queue, "w1", limit=12)
        assert len(leases) == 12
        for lease in leases:
            assert await queue.fail(lease, FAILURE, retry=True) is CommitReply.REQUEUED
        pauses = [
            due - queue.now for _, due in queue.sync.zrange(redis_key("delay", "generation"), 0, -1, withscores=True)
        ]
        assert all(shortest <= pause <= 3 * shortest for pause in pauses), pauses
        assert len(set(pauses)) > 1, "retries must spread"
        queue.advance(shortest - 1)
        assert await _claim(queue, "w1", limit=12) == []
        queue.advance(2 * shortest + 1)


async def test_a_released_job_may_pause_and_keeps_its_attempts(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    for _ in range(queue.settings.max_attempts + 1):
        (lease,) = await _claim(queue, "w1")
        assert await queue.release(lease, pause=timedelta(seconds=5)) is CommitReply.REQUEUED
        queue.advance(4_999)
        assert await _claim(queue, "w1") == []
        queue.advance(1)
    assert [lease.job_id for lease in await _claim(queue, "w1")] == [job.id]


async def test_a_job_that_kills_its_workers_ends(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    for _ in range(queue.settings.max_attempts):
        assert len(await _claim(queue, "w1")) == 1
        await _lose_leases(queue)
    assert [dead.id for dead in await queue.dead_letters.list()] == [job.id]


async def _lose_two_workers(queue: LogicalQueue, number: int, **more: Any) -> Sequence[str]:
    """Jobs that were together on two workers that died."""
    jobs = await _accept(queue, "ann", number, **more)
    for worker in ("dead1", "dead2"):
        assert len(await _claim(queue, worker, limit=number)) == number
        await _lose_leases(queue)
    return [job.id for job in jobs]


async def test_jobs_that_lost_two_workers_run_alone(queue: LogicalQueue) -> None:
    quarantined = await _lose_two_workers(queue, 3)
    await _accept(queue, "bob", 4)
    for job_id in quarantined:
        (lease,) = await _claim(queue, "w1", limit=4)
        assert lease.job_id == job_id
        assert await _claim(queue, "w1", limit=3) == [], "something was put beside it"
        await _finish(queue, lease, seconds=1.0)
    assert len(await _claim(queue, "w1", limit=4)) == 4


async def test_others_go_on_while_a_quarantined_job_runs(queue: LogicalQueue) -> None:
    await _lose_two_workers(queue, 2)
    await _claim(queue, "w1", limit=4)
    await _accept(queue, "bob", 2)
    assert len(await _claim(queue, "w2", limit=4)) == 2


async def test_a_busy_worker_empties_before_it_takes_a_quarantined_job(queue: LogicalQueue) -> None:
    await _lose_two_workers(queue, 1)
    await _accept(queue, "bob", 2)
    queue.sync.sadd(redis_key("claimed", "generation", "w1"), "something")
    assert await _claim(queue, "w1", limit=4) == []
    queue.sync.srem(redis_key("claimed", "generation", "w1"), "something")
    assert len(await _claim(queue, "w1", limit=4)) == 1


async def test_quarantined_jobs_pass_to_another_worker_when_theirs_dies(queue: LogicalQueue) -> None:
    first, second = await _lose_two_workers(queue, 2)
    assert [lease.job_id for lease in await _claim(queue, "w1", limit=4)] == [first]
    queue.sync.delete(redis_key("quarantine_worker", "generation"))  # as when its life has run out
    await _lose_leases(queue)
    assert [dead.id for dead in await queue.dead_letters.list()] == [first]
    assert [lease.job_id for lease in await _claim(queue, "w2", limit=4)] == [second]


async def test_a_heartbeat_keeps_its_worker_in_quarantine(queue: LogicalQueue) -> None:
    await _lose_two_workers(queue, 1)
    (lease,) = await _claim(queue, "w1", limit=4)
    queue.sync.pexpire(redis_key("quarantine_worker", "generation"), 5_000)
    await queue.heartbeat(lease, progress=10)
    assert queue.sync.pttl(redis_key("quarantine_worker", "generation")) > 5_000


async def test_estimates_follow_what_was_measured(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    assert _seconds_left(queue, job) == round(COST, 3)
    await _finish(queue, await _claim_one(queue), seconds=10.0)
    (job,) = await _accept(queue, "ann", 1)
    assert _seconds_left(queue, job) == 10.0
    await _finish(queue, await _claim_one(queue), seconds=20.0)
    (job,) = await _accept(queue, "ann", 1)
    assert _seconds_left(queue, job) == 12.0  # 0.8 of the old and 0.2 of the new


async def test_the_busy_speed_stays_near_the_fastest(queue: LogicalQueue) -> None:
    speeds: list[float] = []
    for number, seconds in enumerate((10.0, 20.0, 5.0), start=1):
        await _accept(queue, "ann", 1)
        await _finish(queue, await _claim_one(queue), seconds=seconds)
        backlog = await queue.stats.backlog(JobKind.GENERATION)
        speeds.append(backlog.busy_seconds_per_unit * backlog.accepted / number)
    assert [round(speed, 1) for speed in speeds] == [10.0, 10.0, 9.5]
    assert speeds[1] > speeds[0], "a slower worker is learnt, if slowly"


async def test_estimates_count_the_work_ahead_and_the_workers(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1)
    await _finish(queue, await _claim_one(queue), seconds=10.0)
    jobs = await _accept(queue, "ann", 3)
    assert [_seconds_left(queue, job) for job in jobs] == [10.0, 20.0, 30.0]
    await _claim(queue, "w2", limit=0)
    assert _seconds_left(queue, await _seen(queue, jobs[2].id)) == 20.0  # two workers share the two jobs ahead
    lease = await _claim_one(queue)
    await queue.heartbeat(lease, progress=60)
    assert _seconds_left(queue, await _seen(queue, lease.job_id)) == 4.0


async def test_an_estimate_grows_while_nothing_runs(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    queue.advance(240_000)
    assert _seconds_left(queue, await _seen(queue, job.id)) == round(240 + COST, 3)
    await _claim_one(queue)
    assert _seconds_left(queue, await _seen(queue, job.id)) == round(COST, 3)


async def test_an_estimate_is_never_in_the_past(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    lease = await _claim_one(queue)
    queue.advance(3_600_000)
    await queue.heartbeat(lease, progress=99)
    assert _seconds_left(queue, await _seen(queue, job.id)) == 1.0


async def test_the_backlog_is_in_seconds_of_one_worker(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 2)
    await _accept(queue, "bob", 1, images=2)
    first = await queue.stats.backlog(JobKind.GENERATION)
    assert round(first.seconds, 2) == round(4 * COST, 2)
    await _finish(queue, await _claim_one(queue), seconds=10.0)
    await _claim(queue, "w1")
    later = await queue.stats.backlog(JobKind.GENERATION)
    assert round(later.seconds, 2) == 30.0
    assert later.ready_seconds < later.seconds, "what runs does not wait"
    assert later.accepted == first.accepted > 0, "what is done was accepted all the same"


async def test_a_vanished_record_does_not_block_the_queue(queue: LogicalQueue) -> None:
    first, second = await _accept(queue, "ann", 2)
    queue.sync.delete(redis_key("job", first.id))
    assert [lease.job_id for lease in await _claim(queue, "w1", limit=4)] == [second.id]


async def test_a_vanished_record_leaves_every_place(queue: LogicalQueue) -> None:
    jobs = await _accept(queue, "ann", 3)
    delayed, leased = await _claim(queue, "w1", limit=2)
    await queue.fail(delayed, FAILURE, retry=True)
    assert leased.job_id == jobs[1].id
    for job in jobs:
        queue.sync.delete(redis_key("job", job.id))
    queue.advance(round(queue.settings.queue_age_limit.total_seconds() * 1000))
    assert await _claim(queue, "w1", limit=4) == []
    await queue.reap()
    for place in ("delay", "lease", "age"):
        assert queue.sync.zcard(redis_key(place, "generation")) == 0, place


async def test_a_vanished_record_leaves_the_quarantine(queue: LogicalQueue) -> None:
    (job_id,) = await _lose_two_workers(queue, 1)
    queue.sync.delete(redis_key("job", job_id))
    assert await _claim(queue, "w1", limit=4) == []
    assert queue.sync.zcard(redis_key("quarantine", "generation")) == 0


async def test_a_vanished_queue_does_not_block_the_others(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 1)
    (other,) = await _accept(queue, "bob", 1)
    queue.sync.delete(redis_key("queue", "generation", "ann"))
    assert [lease.job_id for lease in await _claim(queue, "w1", limit=4)] == [other.id]


async def test_a_nonce_is_one_workers_own_and_of_one_call(queue: LogicalQueue) -> None:
    await _accept(queue, "ann", 4)

    async def claimed(worker: str, nonce: str) -> list[Claim]:
        return await queue.claim(worker, pool=JobKind.GENERATION, nonce=nonce)

    calls = (("w1", "n1"), ("w2", "n1"), ("w2", "n2"), ("w1", "n2"))
    first = [await claimed(*each) for each in calls[:3]]
    assert await claimed("w1", "n1") == first[0], "another worker's later calls do not end its own"
    assert len({claim.lease for (claim,) in [*first, await claimed(*calls[3])]}) == 4


async def test_an_adapter_is_asked_about_at_the_accept(queue: LogicalQueue) -> None:
    """The last grant or denial counts, else to whom the LoRA is offered."""

    async def is_taken(job_id: str, adapter_id: str, account: str = "ann") -> bool:
        try:
            return (await queue.accept(new_job(account, job_id=job_id, lora_id=adapter_id))).job.id == job_id
        except Forbidden:
            return False

    _offer(queue, "open", is_open=True)
    _offer(queue, "own", owner="ann")
    _offer(queue, "offered", to="ann")
    _offer(queue, "named", to="Ann & Co")
    _offer(queue, "closed")
    usable = ["open", "own", "offered", "named"]
    queue.sync.hset(redis_key("account", "ann"), "name", "Ann & Co")
    assert [await is_taken(f"to ann: {lora}", lora) for lora in usable] == [True] * 4
    assert [await is_taken(f"to bob: {lora}", lora, "bob") for lora in usable] == [True, False, False, False]
    assert not await is_taken("closed", "closed")
    assert not await is_taken("unknown", "gone")
    assert queue.sync.hget(redis_key("job", "to ann: open"), "group") == "weights"
    queue.sync.hset(redis_key("grants", "ann"), mapping={"closed": "allow", "gone": "allow"})
    assert await is_taken("granted", "closed")
    assert not await is_taken("granted, but gone", "gone")
    assert not await is_taken("granted to another", "closed", "bob")
    queue.sync.hset(redis_key("grants", "ann"), mapping=dict.fromkeys([*usable, "closed"], "deny"))
    assert not any([await is_taken(f"denied: {lora}", lora) for lora in [*usable, "closed"]])
    assert await is_taken("granted", "closed"), "the call that was repeated had been accepted"
    assert (await queue.stats.backlog(JobKind.GENERATION)).ready == 6, "what was refused is in the queue"


async def test_an_adapter_is_asked_about_until_the_end(queue: LogicalQueue) -> None:
    """A job that may no longer use its adapter fails at its next claim, heartbeat or commit.

    No other job fails.
    """
    names = ("waits", "withdrawn", "removed", "runs", "ends", "open")
    for name in names:
        _offer(queue, name, to="bob", is_open=name == "open")
    queue.sync.hset(redis_key("grants", "ann"), mapping=dict.fromkeys(names, "allow"))
    of_ann = {name: (await _accept(queue, "ann", 1, lora_id=name))[0].id for name in names}
    of_others = [(await _accept(queue, "bob", 1, lora_id=name))[0].id for name in ("waits", "")]
    queue.sync.hset(redis_key("grants", "ann"), "waits", "deny")
    queue.sync.hdel(redis_key("grants", "ann"), "withdrawn", "open")
    queue.sync.delete(redis_key("lora", "removed"))
    leases = {lease.job_id: lease for lease in await _claim(queue, "w1", limit=8)}
    assert set(leases) == {of_ann["runs"], of_ann["ends"], of_ann["open"], *of_others}
    assert {await queue.heartbeat(lease, progress=1) for lease in leases.values()} == {HeartbeatReply.OK}
    queue.sync.hset(redis_key("grants", "ann"), "runs", "deny")
    assert await queue.heartbeat(leases[of_ann["runs"]], progress=1) is HeartbeatReply.FORBIDDEN
    assert await queue.fail(leases[of_ann["runs"]], FAILURE, retry=False) is CommitReply.OK
    queue.sync.delete(redis_key("lora", "ends"))
    assert await queue.finish(leases[of_ann["ends"]], [], seconds=1.0) is CommitReply.FORBIDDEN
    for job_id in (of_ann["open"], *of_others):
        await _finish(queue, leases[job_id], seconds=1.0)
    for name in ("waits", "withdrawn", "removed", "ends"):
        assert await _failure(queue, of_ann[name]) is FailureCode.LORA_UNAVAILABLE
    assert (await queue.stats.backlog(JobKind.GENERATION)).ready == 0


async def test_one_claim_ends_a_bounded_number_of_jobs(queue: LogicalQueue) -> None:
    _offer(queue, "model_x", is_open=True)
    await _accept(queue, "ann", 6, lora_id="model_x")
    queue.sync.hset(redis_key("grants", "ann"), "model_x", "deny")
    for left in (2, 0):
        assert await _claim(queue, "w1", limit=8) == []
        assert (await queue.stats.backlog(JobKind.GENERATION)).ready == left


async def test_a_forbidden_job_leaves_the_quarantine(queue: LogicalQueue) -> None:
    _offer(queue, "model_x", is_open=True)
    (job_id,) = await _lose_two_workers(queue, 1, lora_id="model_x")
    queue.sync.hset(redis_key("grants", "ann"), "model_x", "deny")
    assert await _claim(queue, "w2") == []
    assert await _failure(queue, job_id) is FailureCode.LORA_UNAVAILABLE
    await _accept(queue, "bob", 1)
    queue.advance(_lease_ms(queue) + 1)
    assert len(await _claim(queue, "w3")) == 1


async def test_waiting_jobs_of_a_withdrawn_lora_end_in_batches(queue: LogicalQueue) -> None:
    """Wherever they wait, those of the account alone that may no longer use it; each is looked at once."""
    _offer(queue, "model_x", is_open=True)
    (quarantined,) = await _lose_two_workers(queue, 1, lora_id="model_x")
    (held,) = await _claim(queue, "w1")
    (backing_off,) = await _accept(queue, "ann", 1, lora_id="model_x")
    await queue.fail((await _claim(queue, "w2"))[0], FAILURE, retry=True)
    await queue.release(held)
    of_bob = await _accept(queue, "bob", 2, lora_id="model_x")
    last, other = await _accept(queue, "ann", 1, lora_id="model_x"), await _accept(queue, "ann", 1)
    await queue.grant(lora="model_x", account="ann", decision="deny")
    for looked_at, ended in ((2, [quarantined, backing_off.id]), (2, []), (1, [last[0].id])):
        assert await queue.reap(limit=2) == looked_at
        assert {await _failure(queue, job_id) for job_id in ended} <= {FailureCode.LORA_UNAVAILABLE}
    assert [await _failure(queue, kept.id) for kept in (*of_bob, *other)] == [None] * 3
    assert queue.sync.exists(redis_key("loras_withdrawn")) == 0
    assert queue.sync.zrange(redis_key("lora_jobs", "model_x"), 0, -1) == [job.id for job in of_bob]


async def test_a_job_that_comes_back_after_its_lora_was_withdrawn_ends(queue: LogicalQueue) -> None:
    _offer(queue, "model_x", is_open=True)
    (job,) = await _accept(queue, "ann", 1, lora_id="model_x")
    await _claim(queue, "w1")
    queue.sync.zadd(
        redis_key("lora_jobs", "model_x"), {job.id: 1}
    )  # as a version that does not know the index leaves it
    await queue.grant(lora="model_x", account="ann", decision="deny")
    await queue.reap()
    assert await _failure(queue, job.id) is None
    assert queue.sync.exists(redis_key("lora_jobs", "model_x")) == 0
    queue.advance(_lease_ms(queue) + 1)
    for _ in range(2):
        await queue.reap()
        assert await _failure(queue, job.id) is FailureCode.LORA_UNAVAILABLE
        assert await queue.dead_letters.requeue(job.id)
        assert await _failure(queue, job.id) is None
    await _accept(queue, "bob", 1, lora_id="model_x")
    assert queue.sync.pttl(redis_key("lora_jobs", "model_x")) > 0


async def test_dead_workers_are_forgotten(queue: LogicalQueue) -> None:
    await _claim(queue, "w1", limit=3)
    queue.advance(int(WORKER_LIFE.total_seconds() * 1000))
    await queue.reap()
    assert queue.sync.zcard(redis_key("workers", JobKind.GENERATION)) == 0
    assert queue.sync.hlen(redis_key("capacity", JobKind.GENERATION)) == 0


async def test_a_dead_letter_goes_after_retention(queue: LogicalQueue) -> None:
    (job,) = await _accept(queue, "ann", 1)
    lease = await _claim_one(queue)
    await queue.fail(lease, FAILURE, retry=False)
    assert [dead.id for dead in await queue.dead_letters.list()] == [job.id]
    life = queue.sync.pttl(redis_key("job", job.id))
    retention = queue.settings.retention.total_seconds() * 1000
    assert retention - 60_000 < life <= retention
    queue.advance(int(retention))
    await queue.reap()
    assert queue.sync.zcard(redis_key("dead")) == 0


async def _lose_leases(queue: LogicalQueue) -> None:
    """Let every lease run out, as when its worker has died."""
    queue.advance(_lease_ms(queue))
    await queue.reap()


def _lease_ms(queue: LogicalQueue) -> int:
    return round(queue.settings.lease.total_seconds() * 1000)


def _offer(queue: LogicalQueue, lora_id: str, *, owner: str = "", is_open: bool = False, to: str = "") -> None:
    """Write a LoRA's record."""
    record = {"owner": owner, "open": "1" if is_open else "", "sha256": "weights"}
    queue.sync.hset(redis_key("lora", lora_id), mapping=record)
    if to:
        queue.sync.zadd(redis_key("loras_offered", to), {lora_id: 1})


async def _accept(queue: LogicalQueue, account: str, number: int, *, group: str = "g", **more: Any) -> Sequence[Job]:
    jobs: list[Job] = []
    for _ in range(number):
        job_id = f"{account}-{queue.sync.incr('{job:0}:test-clock:jobs')}"
        jobs.append((await queue.accept(new_job(account, job_id=job_id, weights=group, **more))).job)
    return jobs


async def _accept_of(queue: LogicalQueue, *groups: str) -> None:
    """A job of ann's of each group."""
    for group in groups:
        await _accept(queue, "ann", 1, group=group)


async def _give_away(queue: LogicalQueue, group: str) -> Lease:
    """Let the worker w1, which has places left, own the group."""
    await _accept_of(queue, group)
    return await _claim_one(queue, limit=4)


async def _claim(queue: LogicalQueue, worker: str, *, limit: int = 1, resident: Sequence[str] = ()) -> list[Lease]:
    return [claim.lease for claim in await _claims(queue, worker, limit, resident)]


async def _claim_one(queue: LogicalQueue, *, limit: int = 1) -> Lease:
    return (await _claim(queue, "w1", limit=limit))[0]


async def _claims(queue: LogicalQueue, worker: str, limit: int, resident: Sequence[str]) -> list[Claim]:
    nonce = str(queue.sync.incr("{job:0}:test-clock:nonces"))
    return await queue.claim(worker, pool=JobKind.GENERATION, nonce=nonce, resident=resident, limit=limit)


async def _seen(queue: LogicalQueue, job_id: str) -> Job:
    return existing(await queue.reader.find(job_id))


async def _failure(queue: LogicalQueue, job_id: str) -> FailureCode | None:
    failure = (await _seen(queue, job_id)).failure
    return failure and failure.code


async def _groups(queue: LogicalQueue, worker: str, *, limit: int = 1, resident: Sequence[str] = ()) -> list[str]:
    return [claim.weights for claim in await _claims(queue, worker, limit, resident)]


async def _serve(queue: LogicalQueue, number: int) -> list[str]:
    """The accounts that the next claims serve, each by a worker that holds every adapter."""
    served: list[str] = []
    for turn in range(number):
        leases = await _claim(queue, f"s{turn}", resident=("g",))
        served += [lease.job_id.split("-")[0] for lease in leases]
    return served


async def _finish(queue: LogicalQueue, lease: Lease, *, seconds: float) -> None:
    assert await queue.finish(lease, [stored_image("memory://x")], seconds=seconds) is CommitReply.OK


def _vtime(queue: LogicalQueue, account: str) -> float:
    return float(queue.sync.zscore(redis_key("vtime", JobKind.GENERATION), account))


def _seconds_left(queue: LogicalQueue, job: Job) -> float:
    assert job.finish_estimate is not None
    return round(job.finish_estimate.timestamp() - queue.now / 1000, 3)
