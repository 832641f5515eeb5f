"""Short stories of fairness, grouping and estimates, told on the real scripts at a time of the story's choosing.

Each is a plain function over a `Bench`, so that the mutation run can tell it again with a defect planted.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

from serve_app.domain.errors import Forbidden
from serve_app.domain.jobs import CommitReply, Job, JobKind, Lease, StoredImage
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.stores.jobs import WORKER_LIFE, Fairness
from serve_app.stores.records import DEFAULT_PACE
from serve_app.stores.redis import key
from tests.stores.logical import Bench
from tests.stores.world import FAILURE

WORK = 30 * 512 * 512 / 1e6
"""Of one image at the default size and steps, in megapixel-steps."""
COST = round(WORK, 3) * DEFAULT_PACE[JobKind.GENERATION]
"""Seconds charged for it before anything was measured."""
FAR = timedelta(hours=1)


class Benches(Protocol):
    def __call__(self, fairness: Fairness | None = None) -> Bench: ...


Scenario = Callable[[Benches], Awaitable[None]]


async def accounts_share_by_weight(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 12, weight=2.0)
    await _accept(bench, "bob", 12)
    served = await _serve(bench, 9)
    assert served.count("ann") == 6, served


async def a_small_account_does_not_wait_behind_a_burst(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 12)
    await _accept(bench, "bob", 3)
    served = await _serve(bench, 6)
    assert served.count("bob") == 3, served


async def what_a_job_took_corrects_its_accounts_turn(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 3, weight=2.0)
    await _accept(bench, "bob", 8)
    lease = (await _claim(bench, "w1"))[0]
    assert _turn(bench, "ann") == COST / 2
    await _finish(bench, lease, seconds=5 * COST)
    assert _turn(bench, "ann") == 5 * COST / 2
    assert await _serve(bench, 1) == ["bob"]


async def a_correction_reaches_an_account_with_nothing_waiting(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1)
    await _accept(bench, "bob", 8)
    lease = (await _claim(bench, "w1"))[0]
    await _finish(bench, lease, seconds=4 * COST)
    await _accept(bench, "ann", 1)
    assert _turn(bench, "ann") == 4 * COST


async def an_account_cannot_escape_its_debt_by_going_idle(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, images=4)
    await _accept(bench, "bob", 8)
    assert await _serve(bench, 2) == ["ann", "bob"]
    await _accept(bench, "ann", 1)
    assert await _serve(bench, 3) == ["bob", "bob", "bob"]


async def an_account_cannot_save_up_turns(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 12)
    await _serve(bench, 6)
    await _accept(bench, "bob", 6)
    served = await _serve(bench, 6)
    assert served.count("bob") in (3, 4), served


async def all_are_even_when_the_queue_runs_dry(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, images=4)
    await _serve(bench, 1)
    await _accept(bench, "ann", 3)
    await _accept(bench, "bob", 3)
    served = await _serve(bench, 4)
    assert served.count("ann") == 2, served


async def an_attempt_that_came_to_nothing_costs_its_account_nothing(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 3)
    await _accept(bench, "bob", 3)
    lease = (await _claim(bench, "w1"))[0]
    assert _turn(bench, "ann") == COST
    await bench.store.hand_back(lease)
    assert _turn(bench, "ann") == 0
    lease = (await _claim(bench, "w1"))[0]
    await bench.store.fail(lease, FAILURE, retry=True)
    assert _turn(bench, "ann") == 0
    await _claim(bench, "w1")
    bench.advance(_lease_ms(bench))
    await bench.store.reap()
    assert _turn(bench, "ann") == 0


async def a_returned_job_keeps_its_place(benches: Benches) -> None:
    bench = benches()
    first = (await _accept(bench, "ann", 3))[0]
    lease = (await _claim(bench, "w1"))[0]
    await bench.store.hand_back(lease)
    assert (await _claim(bench, "w1"))[0].job_id == first.id
    bench.advance(_lease_ms(bench))
    await bench.store.reap()
    assert (await _claim(bench, "w1"))[0].job_id == first.id


async def a_held_adapter_is_preferred(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    await _accept(bench, "ann", 1, group="gb")
    assert await _groups(bench, "w1", resident=("gb", "gx")) == ["gb"]


async def of_several_held_adapters_the_oldest_job_comes_first(benches: Benches) -> None:
    bench = benches()
    for group in ("ga", "gb", "gc", "gd", "ge", "gf"):
        await _accept(bench, "ann", 1, group=group)
    assert await _groups(bench, "w1", resident=("gf", "ge", "gd", "gc", "gb"), limit=3) == ["gb", "gc", "gd"]


async def the_fair_head_is_passed_over_a_bounded_number_of_times(benches: Benches) -> None:
    bench = benches(Fairness(max_skips=4, max_wait=FAR, max_lead=1e9))
    await _accept(bench, "ann", 1, group="gb")
    await _accept(bench, "bob", 10, group="ga")
    served = [(await _groups(bench, f"w{n}", resident=("ga",)))[0] for n in range(6)]
    assert served == ["ga"] * 4 + ["gb"] + ["ga"], served


async def the_fair_head_is_passed_over_for_a_bounded_time(benches: Benches) -> None:
    bench = benches(Fairness(max_skips=4, max_wait=timedelta(seconds=10), max_lead=1e9))
    await _accept(bench, "ann", 1, group="gb")
    await _accept(bench, "bob", 10, group="ga")
    assert await _groups(bench, "w1", resident=("ga",)) == ["ga"]
    bench.advance(9_999)
    assert await _groups(bench, "w2", resident=("ga",)) == ["ga"]
    bench.advance(1)
    assert await _groups(bench, "w3", resident=("ga",)) == ["gb"]


async def nobody_is_served_further_ahead_than_the_lead(benches: Benches) -> None:
    bench = benches(Fairness(max_skips=100, max_wait=FAR, max_lead=2.5))
    await _accept(bench, "ann", 1, group="gb")
    await _accept(bench, "bob", 10, group="ga")
    served = [(await _groups(bench, f"w{n}", resident=("ga",)))[0] for n in range(4)]
    assert served == ["ga", "ga", "ga", "gb"], served


async def a_group_is_left_to_the_worker_that_holds_it(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    assert await _groups(bench, "w1", limit=4) == ["ga"]
    await _accept(bench, "bob", 1, group="ga")
    assert await _groups(bench, "w2", limit=4) == []
    assert await _groups(bench, "w1", resident=("ga",), limit=3) == ["ga"]


async def other_work_is_taken_while_a_group_is_left_to_its_owner(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    await _claim(bench, "w1", limit=4)
    await _accept(bench, "ann", 1, group="ga")
    await _accept(bench, "ann", 1, group="gb")
    await _accept(bench, "bob", 1, group="gc")
    assert sorted(await _groups(bench, "w2", limit=4)) == ["gb", "gc"]


async def a_saturated_owner_loses_its_claim(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 2, group="ga")
    assert await _groups(bench, "w1", limit=1) == ["ga"]
    assert await _groups(bench, "w2", limit=1) == ["ga"]


async def a_job_that_waited_for_the_owner_goes_to_anyone(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    await _claim(bench, "w1", limit=4)
    await _accept(bench, "ann", 1, group="ga")
    bench.advance(999)
    assert await _groups(bench, "w2") == []
    bench.advance(1)
    assert await _groups(bench, "w2") == ["ga"]


async def a_worker_not_seen_for_long_owns_nothing(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    await _claim(bench, "w1", limit=4)
    bench.advance(int(WORKER_LIFE.total_seconds() * 1000))
    await _accept(bench, "ann", 1, group="ga")
    assert await _groups(bench, "w2") == ["ga"]


async def a_beat_keeps_its_worker_alive(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, group="ga")
    lease = (await _claim(bench, "w1", limit=4))[0]
    for _ in range(4):
        bench.advance(20_000)
        await bench.store.beat(lease, progress=1)
        await bench.store.reap()
    await _accept(bench, "ann", 1, group="ga")
    assert await _groups(bench, "w2") == []


async def a_worker_gets_the_whole_of_a_job_that_begins_in_its_room(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1, images=4)
    await _accept(bench, "ann", 1)
    assert len(await _claim(bench, "w1", limit=2)) == 1
    assert len(await _claim(bench, "w1", limit=2)) == 1


async def retries_wait_longer_each_time(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 12)
    for shortest in (500, 1000):
        leases = await _claim(bench, "w1", limit=12)
        assert len(leases) == 12
        for lease in leases:
            assert await bench.store.fail(lease, FAILURE, retry=True) is CommitReply.REQUEUED
        pauses = [due - bench.now for _, due in bench.sync.zrange(key("delay", "generation"), 0, -1, withscores=True)]
        assert all(shortest <= pause <= 3 * shortest for pause in pauses), pauses
        assert len(set(pauses)) > 1, "retries must spread"
        bench.advance(shortest - 1)
        assert await _claim(bench, "w1", limit=12) == []
        bench.advance(2 * shortest + 1)


async def a_job_is_tried_as_often_as_allowed(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1)
    replies: list[CommitReply] = []
    for _ in range(bench.settings.max_attempts):
        lease = (await _claim(bench, "w1"))[0]
        replies.append(await bench.store.fail(lease, FAILURE, retry=True))
        bench.advance(10_000)
    assert replies == [CommitReply.REQUEUED, CommitReply.REQUEUED, CommitReply.OK]


async def a_job_that_kills_its_workers_ends(benches: Benches) -> None:
    bench = benches()
    (job,) = await _accept(bench, "ann", 1)
    for _ in range(bench.settings.max_attempts):
        assert len(await _claim(bench, "w1")) == 1
        bench.advance(_lease_ms(bench))
        await bench.store.reap()
    assert [dead.id for dead in await bench.store.dead()] == [job.id]


async def _lose_two_workers(bench: Bench, number: int) -> Sequence[str]:
    """Jobs that were together on two workers that died."""
    jobs = await _accept(bench, "ann", number)
    for worker in ("dead1", "dead2"):
        assert len(await _claim(bench, worker, limit=number)) == number
        bench.advance(_lease_ms(bench))
        await bench.store.reap()
    return [job.id for job in jobs]


async def jobs_that_lost_two_workers_run_alone(benches: Benches) -> None:
    bench = benches()
    suspects = await _lose_two_workers(bench, 3)
    await _accept(bench, "bob", 4)
    for suspect in suspects:
        (lease,) = await _claim(bench, "w1", limit=4)
        assert lease.job_id == suspect
        assert await _claim(bench, "w1", limit=3) == [], "something was put beside it"
        await _finish(bench, lease, seconds=1.0)
    assert len(await _claim(bench, "w1", limit=4)) == 4


async def others_go_on_while_a_suspect_runs(benches: Benches) -> None:
    bench = benches()
    await _lose_two_workers(bench, 2)
    await _claim(bench, "w1", limit=4)
    await _accept(bench, "bob", 2)
    assert len(await _claim(bench, "w2", limit=4)) == 2


async def a_busy_worker_empties_before_it_takes_a_suspect(benches: Benches) -> None:
    bench = benches()
    await _lose_two_workers(bench, 1)
    await _accept(bench, "bob", 2)
    bench.sync.sadd(key("held", "generation", "w1"), "something")
    assert await _claim(bench, "w1", limit=4) == []
    bench.sync.srem(key("held", "generation", "w1"), "something")
    assert len(await _claim(bench, "w1", limit=4)) == 1


async def suspects_pass_to_another_worker_when_theirs_dies(benches: Benches) -> None:
    bench = benches()
    first, second = await _lose_two_workers(bench, 2)
    assert [lease.job_id for lease in await _claim(bench, "w1", limit=4)] == [first]
    bench.sync.delete(key("alone", "generation"))  # as when its life has run out
    bench.advance(_lease_ms(bench))
    await bench.store.reap()
    assert [dead.id for dead in await bench.store.dead()] == [first]
    assert [lease.job_id for lease in await _claim(bench, "w2", limit=4)] == [second]


async def a_beat_keeps_its_worker_apart(benches: Benches) -> None:
    bench = benches()
    await _lose_two_workers(bench, 1)
    (lease,) = await _claim(bench, "w1", limit=4)
    bench.sync.pexpire(key("alone", "generation"), 5_000)
    await bench.store.beat(lease, progress=10)
    assert bench.sync.pttl(key("alone", "generation")) > 5_000


async def estimates_follow_what_was_measured(benches: Benches) -> None:
    bench = benches()
    (job,) = await _accept(bench, "ann", 1)
    assert _seconds_left(bench, job) == round(COST, 3)
    await _finish(bench, (await _claim(bench, "w1"))[0], seconds=10.0)
    (job,) = await _accept(bench, "ann", 1)
    assert _seconds_left(bench, job) == 10.0
    await _finish(bench, (await _claim(bench, "w1"))[0], seconds=20.0)
    (job,) = await _accept(bench, "ann", 1)
    assert _seconds_left(bench, job) == 12.0  # 0.8 of the old and 0.2 of the new


async def estimates_count_the_work_ahead_and_the_workers(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 1)
    await _finish(bench, (await _claim(bench, "w1"))[0], seconds=10.0)
    jobs = await _accept(bench, "ann", 3)
    assert [_seconds_left(bench, job) for job in jobs] == [10.0, 20.0, 30.0]
    await _claim(bench, "w2", limit=0)
    last = await bench.store.get(jobs[2].id, account_id="ann")
    assert last is not None
    assert _seconds_left(bench, last) == 20.0  # two workers share the two jobs ahead
    lease = (await _claim(bench, "w1"))[0]
    await bench.store.beat(lease, progress=60)
    running = await bench.store.get(lease.job_id, account_id="ann")
    assert running is not None
    assert _seconds_left(bench, running) == 4.0


async def an_estimate_is_never_in_the_past(benches: Benches) -> None:
    bench = benches()
    (job,) = await _accept(bench, "ann", 1)
    lease = (await _claim(bench, "w1"))[0]
    bench.advance(3_600_000)
    await bench.store.beat(lease, progress=99)
    late = await bench.store.get(job.id, account_id="ann")
    assert late is not None
    assert _seconds_left(bench, late) == 1.0


async def the_backlog_is_in_seconds_of_one_worker(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 2)
    await _accept(bench, "bob", 1, images=2)
    assert round((await bench.store.backlog(JobKind.GENERATION)).seconds, 2) == round(4 * COST, 2)
    await _finish(bench, (await _claim(bench, "w1"))[0], seconds=10.0)
    assert round((await bench.store.backlog(JobKind.GENERATION)).seconds, 2) == 30.0


async def a_vanished_record_does_not_block_the_queue(benches: Benches) -> None:
    bench = benches()
    first, second = await _accept(bench, "ann", 2)
    bench.sync.delete(key("job", first.id))
    assert [lease.job_id for lease in await _claim(bench, "w1", limit=4)] == [second.id]


async def a_worker_that_asks_again_later_gets_new_jobs(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 2)
    again = await bench.store.claim("w1", kind=JobKind.GENERATION, nonce="n1")
    assert again == await bench.store.claim("w1", kind=JobKind.GENERATION, nonce="n1")
    other = await bench.store.claim("w1", kind=JobKind.GENERATION, nonce="n2")
    assert again[0].lease != other[0].lease


async def a_nonce_is_one_workers_own(benches: Benches) -> None:
    bench = benches()
    await _accept(bench, "ann", 3)
    first = await bench.store.claim("w1", kind=JobKind.GENERATION, nonce="n1")
    other = await bench.store.claim("w2", kind=JobKind.GENERATION, nonce="n1")
    assert first[0].lease != other[0].lease
    await bench.store.claim("w2", kind=JobKind.GENERATION, nonce="n2")
    assert await bench.store.claim("w1", kind=JobKind.GENERATION, nonce="n1") == first


async def an_idempotency_key_is_one_accounts_own(benches: Benches) -> None:
    bench = benches()
    jobs = [await _accept(bench, account, 1, idempotency_key="same") for account in ("ann", "bob")]
    assert jobs[0][0].id != jobs[1][0].id


async def an_adapter_is_asked_about_at_the_accept(benches: Benches) -> None:
    """What was granted or denied last counts, else the file's word; a job that is in stays in."""
    bench = benches()
    request = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=(1,))

    async def is_taken(job_id: str, *, is_open: bool, account: str = "ann", adapter_id: str = "model_x") -> bool:
        accept = bench.store.accept(
            job_id=job_id,
            variant=Variant.A,
            account_id=account,
            request=request,
            group="g",
            adapter_id=adapter_id,
            is_open=is_open,
        )
        try:
            return (await accept).job.id == job_id
        except Forbidden:
            return False

    assert [await is_taken(f"j{is_open}", is_open=is_open) for is_open in (True, False)] == [True, False]
    bench.sync.hset(key("grants", "ann"), "model_x", "allow")
    assert await is_taken("granted", is_open=False)
    assert not await is_taken("other adapter", is_open=False, adapter_id="model_y")
    assert not await is_taken("other account", is_open=False, account="bob")
    assert not await is_taken("unknown", is_open=False, adapter_id="")
    bench.sync.hset(key("grants", "ann"), "model_x", "deny")
    assert not await is_taken("denied", is_open=True)
    assert await is_taken("granted", is_open=False), "the call that was repeated had been let in"
    assert (await bench.store.backlog(JobKind.GENERATION)).ready == 2, "what was refused is in the queue"


async def dead_workers_are_forgotten(benches: Benches) -> None:
    bench = benches()
    await _claim(bench, "w1", limit=3)
    bench.advance(int(WORKER_LIFE.total_seconds() * 1000))
    await bench.store.reap()
    assert bench.sync.zcard(key("workers", JobKind.GENERATION)) == 0
    assert bench.sync.hlen(key("room", JobKind.GENERATION)) == 0


async def a_dead_letter_goes_after_retention(benches: Benches) -> None:
    bench = benches()
    (job,) = await _accept(bench, "ann", 1)
    lease = (await _claim(bench, "w1"))[0]
    await bench.store.fail(lease, FAILURE, retry=False)
    assert [dead.id for dead in await bench.store.dead()] == [job.id]
    life = bench.sync.pttl(key("job", job.id))
    retention = bench.settings.retention.total_seconds() * 1000
    assert retention - 60_000 < life <= retention
    bench.advance(int(retention))
    await bench.store.reap()
    assert bench.sync.zcard(key("dead")) == 0


SCENARIOS: tuple[Scenario, ...] = (
    accounts_share_by_weight,
    a_small_account_does_not_wait_behind_a_burst,
    what_a_job_took_corrects_its_accounts_turn,
    a_correction_reaches_an_account_with_nothing_waiting,
    an_account_cannot_escape_its_debt_by_going_idle,
    an_account_cannot_save_up_turns,
    all_are_even_when_the_queue_runs_dry,
    an_attempt_that_came_to_nothing_costs_its_account_nothing,
    a_returned_job_keeps_its_place,
    a_held_adapter_is_preferred,
    of_several_held_adapters_the_oldest_job_comes_first,
    the_fair_head_is_passed_over_a_bounded_number_of_times,
    the_fair_head_is_passed_over_for_a_bounded_time,
    nobody_is_served_further_ahead_than_the_lead,
    a_group_is_left_to_the_worker_that_holds_it,
    other_work_is_taken_while_a_group_is_left_to_its_owner,
    a_saturated_owner_loses_its_claim,
    a_job_that_waited_for_the_owner_goes_to_anyone,
    a_worker_not_seen_for_long_owns_nothing,
    a_beat_keeps_its_worker_alive,
    a_worker_gets_the_whole_of_a_job_that_begins_in_its_room,
    retries_wait_longer_each_time,
    a_job_is_tried_as_often_as_allowed,
    a_job_that_kills_its_workers_ends,
    jobs_that_lost_two_workers_run_alone,
    others_go_on_while_a_suspect_runs,
    a_busy_worker_empties_before_it_takes_a_suspect,
    suspects_pass_to_another_worker_when_theirs_dies,
    a_beat_keeps_its_worker_apart,
    estimates_follow_what_was_measured,
    estimates_count_the_work_ahead_and_the_workers,
    an_estimate_is_never_in_the_past,
    the_backlog_is_in_seconds_of_one_worker,
    a_vanished_record_does_not_block_the_queue,
    a_worker_that_asks_again_later_gets_new_jobs,
    a_nonce_is_one_workers_own,
    an_idempotency_key_is_one_accounts_own,
    an_adapter_is_asked_about_at_the_accept,
    dead_workers_are_forgotten,
    a_dead_letter_goes_after_retention,
)


def _lease_ms(bench: Bench) -> int:
    return round(bench.settings.lease.total_seconds() * 1000)


async def _accept(
    bench: Bench,
    account: str,
    number: int,
    *,
    group: str = "g",
    images: int = 1,
    weight: float = 1.0,
    idempotency_key: str | None = None,
) -> Sequence[Job]:
    request = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=tuple(range(images)))
    jobs: list[Job] = []
    for _ in range(number):
        accepted = await bench.store.accept(
            job_id=f"{account}-{bench.sync.incr('{job:0}:test-clock:jobs')}",
            variant=Variant.A,
            account_id=account,
            request=request,
            group=group,
            weight=weight,
            idempotency_key=idempotency_key,
        )
        jobs.append(accepted.job)
    return jobs


async def _claim(bench: Bench, worker: str, *, limit: int = 1, resident: Sequence[str] = ()) -> list[Lease]:
    nonce = str(bench.sync.incr("{job:0}:test-clock:nonces"))
    claims = await bench.store.claim(worker, kind=JobKind.GENERATION, nonce=nonce, resident=resident, limit=limit)
    return [claim.lease for claim in claims]


async def _groups(bench: Bench, worker: str, *, limit: int = 1, resident: Sequence[str] = ()) -> list[str]:
    nonce = str(bench.sync.incr("{job:0}:test-clock:nonces"))
    claims = await bench.store.claim(worker, kind=JobKind.GENERATION, nonce=nonce, resident=resident, limit=limit)
    return [claim.group for claim in claims]


async def _serve(bench: Bench, number: int) -> list[str]:
    """The accounts that the next claims serve, each by a worker that holds every adapter."""
    served: list[str] = []
    for turn in range(number):
        leases = await _claim(bench, f"s{turn}", resident=("g",))
        served += [lease.job_id.split("-")[0] for lease in leases]
    return served


async def _finish(bench: Bench, lease: Lease, *, seconds: float) -> None:
    image = StoredImage(
        image_id=f"img_{lease.job_id}", image_uri="memory://x", width=512, height=512, sha256="0" * 64, size_bytes=1
    )
    assert await bench.store.finish(lease, [replace(image)], seconds=seconds) is CommitReply.OK


def _turn(bench: Bench, account: str) -> float:
    return float(bench.sync.zscore(key("turn", JobKind.GENERATION), account))


def _seconds_left(bench: Bench, job: Job) -> float:
    assert job.finish_estimate is not None
    return round(job.finish_estimate.timestamp() - bench.now / 1000, 3)
