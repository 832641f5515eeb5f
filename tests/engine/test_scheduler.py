"""Batch keys share the compute; runs of a key share the steps."""

from collections import Counter

import torch

from serve_app.engine.run import BatchKey, Conditioning, Run, RunRequest
from serve_app.engine.sampler import Schedule
from serve_app.engine.scheduler import Scheduler

SMALL, LARGE = BatchKey("m", (4, 64, 64), 77), BatchKey("m", (4, 96, 96), 77)
NO_SCHEDULE = Schedule(torch.zeros(0), torch.zeros(0), torch.zeros(0), 1, 1.0, (False,) * 10, 10, ())


def run(name: str, key: BatchKey, rows: int = 2) -> Run:
    return Run(
        request=RunRequest(run_id=name, prompt="", steps=10),
        batch_key=key,
        conditioning=Conditioning(torch.zeros(rows, 1, 1), {}),
        slot=0,
        schedule=NO_SCHEDULE,
        guided=range(10),
        generator=torch.Generator(),
        state=[torch.zeros(0)],
    )


def names(batch: list[Run]) -> list[str]:
    return sorted(one.request.run_id for one in batch)


def test_a_batch_is_of_one_key_and_fits_the_rows() -> None:
    scheduler = Scheduler(max_runs=16, max_rows=8)
    for i in range(6):
        scheduler.add(run(f"small{i}", SMALL))
        scheduler.add(run(f"large{i}", LARGE, rows=1))
    for _ in range(20):
        batch = scheduler.next_batch()
        assert len({one.batch_key for one in batch}) == 1
        assert sum(one.rows for one in batch) <= 8


def test_a_large_shape_does_not_starve_a_small_one() -> None:
    """Over time each shape gets the same compute.

    96² costs 2.25 times 64², so it steps 2.25 times less often.
    """
    scheduler = Scheduler(max_runs=16, max_rows=8)
    for i in range(4):
        scheduler.add(run(f"small{i}", SMALL))
        scheduler.add(run(f"large{i}", LARGE))
    steps = Counter(scheduler.next_batch()[0].batch_key for _ in range(650))
    assert abs(steps[SMALL] / steps[LARGE] - 2.25) < 0.05


def test_one_small_run_among_many_large_ones_steps_as_often_as_they_do() -> None:
    scheduler = Scheduler(max_runs=16, max_rows=16)
    scheduler.add(run("small", SMALL))
    for i in range(7):
        scheduler.add(run(f"large{i}", LARGE))
    steps = Counter(scheduler.next_batch()[0].batch_key for _ in range(100))
    assert steps[SMALL] >= steps[LARGE]


def test_runs_beyond_a_batch_take_turns() -> None:
    scheduler = Scheduler(max_runs=16, max_rows=4)
    for i in range(5):
        scheduler.add(run(f"{i}", SMALL))
    steps = Counter(name for _ in range(50) for name in names(scheduler.next_batch()))
    assert max(steps.values()) - min(steps.values()) <= 1


def test_a_narrowed_key_gets_smaller_batches_and_others_do_not() -> None:
    scheduler = Scheduler(max_runs=16, max_rows=8)
    for i in range(4):
        scheduler.add(run(f"small{i}", SMALL))
        scheduler.add(run(f"large{i}", LARGE))
    scheduler.limit_rows(LARGE, 4)
    sizes = {batch[0].batch_key: len(batch) for batch in (scheduler.next_batch() for _ in range(10))}
    assert sizes == {SMALL: 4, LARGE: 2}


def test_finished_runs_leave_and_free_their_rows() -> None:
    scheduler = Scheduler(max_runs=2, max_rows=8)
    done, live = run("done", SMALL), run("live", SMALL)
    done.step = 10
    scheduler.add(done)
    scheduler.add(live)
    assert scheduler.free_runs == 0
    assert scheduler.pop_finished(scheduler.next_batch()) == [done]
    assert scheduler.free_runs == 1
    assert scheduler.next_batch() == [live]
    scheduler.remove(live)
    assert scheduler.next_batch() == []
