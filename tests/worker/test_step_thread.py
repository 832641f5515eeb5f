"""The step thread counts failed steps, each once, and starts again at an image."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta

import numpy as np
import pytest

from serve_app.domain.jobs import Claim, JobKind
from serve_app.worker.executor import Executor
from serve_app.worker.step_thread import MAX_FAILED_STEPS, StepFailed, StepThread
from tests.support import wait_until
from tests.worker.scripted_executor import ScriptedRun


class FragileExecutor(Executor):
    """Every step fails while a run named bad… is live; removing lost runs always succeeds."""

    pool = JobKind.GENERATION

    def __init__(self) -> None:
        self._live: set[str] = set()
        self.has_lost_runs = False

    @property
    def free_runs(self) -> int:
        return 8

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self.has_lost_runs

    def add(self, *run_ids: str) -> None:
        self._live.update(run_ids)

    async def start(self, claim: Claim, run_ids: Sequence[str]) -> None:
        self._live.update(run_ids)

    def step(self) -> Sequence[ScriptedRun]:
        if any(run_id.startswith("bad") for run_id in self._live):
            raise RuntimeError("the device refuses")
        self.has_lost_runs = False
        drawn, self._live = self._live, set()
        return [ScriptedRun(run_id, np.zeros((1, 1, 3), np.uint8)) for run_id in drawn]

    def abort(self, run_id: str) -> bool:
        self._live.discard(run_id)
        self.has_lost_runs = True
        return True

    def progress(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(self._live, (0, 1))


class HeldExecutor(FragileExecutor):
    """A step takes until `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end = threading.Event(), threading.Event()

    def step(self) -> Sequence[ScriptedRun]:
        drawn = list(self._live)
        self.began.set()
        assert self.may_end.wait(30)
        self._live.clear()
        self.has_lost_runs = False
        return [ScriptedRun(run_id, np.zeros((1, 1, 3), np.uint8)) for run_id in drawn]


@pytest.fixture
def executor() -> FragileExecutor:
    return FragileExecutor()


@pytest.fixture
async def steps(executor: FragileExecutor) -> AsyncIterator[StepThread]:
    thread = StepThread(executor, on_finished=lambda: None)
    thread.start()
    yield thread
    await thread.close(timedelta(seconds=30))


async def _step(executor: FragileExecutor, steps: StepThread, run_id: str) -> None:
    """Until the run has ended, and the executor has removed it."""
    (ending,) = steps.expect([run_id])
    executor.add(run_id)
    steps.wake()
    try:
        async with asyncio.timeout(30):
            await ending
    finally:
        steps.forget([run_id])
        await wait_until(lambda: not executor.has_lost_runs)


async def test_an_executor_that_only_removes_lost_runs_is_broken(executor: FragileExecutor, steps: StepThread) -> None:
    for number in range(MAX_FAILED_STEPS):
        assert not steps.is_broken
        with pytest.raises(StepFailed):
            await _step(executor, steps, f"bad-{number}")
    assert steps.is_broken


async def test_images_between_failures_reset_the_count(executor: FragileExecutor, steps: StepThread) -> None:
    for number in range(MAX_FAILED_STEPS):
        with pytest.raises(StepFailed):
            await _step(executor, steps, f"bad-{number}")
        await _step(executor, steps, f"good-{number}")
    assert not steps.is_broken


async def test_a_failed_step_leaves_the_runs_alone_that_had_ended(executor: FragileExecutor, steps: StepThread) -> None:
    good, bad = steps.expect(["good", "bad"])
    executor.add("good")
    steps.wake()
    async with asyncio.timeout(30):
        await good
        executor.add("bad")
        steps.wake()
        with pytest.raises(StepFailed):
            await bad
    assert (await good).run_id == "good"
    assert steps.is_finished("good")


async def test_a_failure_counts_once_however_busy_the_event_loop_is(
    executor: FragileExecutor, steps: StepThread
) -> None:
    (ending,) = steps.expect(["bad"])
    executor.add("bad")
    steps.wake()
    deadline = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < deadline:
        pass  # the loop does nothing else
    with pytest.raises(StepFailed):
        await ending
    assert not steps.is_broken


async def test_a_step_that_makes_place_tells_it_though_no_run_has_ended() -> None:
    class Narrowing(FragileExecutor):
        """A run takes half of its place after its first step, as where its guidance ends."""

        has_place = False

        @property
        def free_runs(self) -> int:
            return int(self.has_place)

        def step(self) -> Sequence[ScriptedRun]:
            self.has_place = True
            return ()

    executor, is_told = Narrowing(), asyncio.Event()
    steps = StepThread(executor, on_finished=is_told.set)
    steps.start()
    (ending,) = steps.expect(["narrowing"])
    executor.add("narrowing")
    steps.wake()
    async with asyncio.timeout(30):
        await is_told.wait()
    assert not ending.done()
    steps.forget(["narrowing"])
    await steps.close(timedelta(seconds=30))


async def test_a_thread_ends_that_is_closed_just_before_it_looks_for_work(executor: FragileExecutor) -> None:
    steps = StepThread(executor, on_finished=lambda: None)
    about_to_clear, may_clear = threading.Event(), threading.Event()

    class Awake(threading.Event):
        """The event that wakes the thread, held where a wake may get lost."""

        def clear(self) -> None:
            about_to_clear.set()
            may_clear.wait(30)
            super().clear()

    vars(steps)["_awake"] = Awake()
    steps.start()
    await asyncio.to_thread(about_to_clear.wait, 30)
    closing = asyncio.create_task(steps.close(timedelta(seconds=30)))
    await asyncio.sleep(0)  # `close` has set the event
    may_clear.set()
    await asyncio.wait_for(closing, 10)
    assert steps.is_broken, "the thread has not ended"


async def test_a_run_that_is_forgotten_during_its_last_step_is_dropped_alone() -> None:
    executor, has_finished = HeldExecutor(), asyncio.Event()
    steps = StepThread(executor, on_finished=has_finished.set)
    steps.start()
    forgotten, kept = steps.expect(["forgotten", "kept"])
    for run_id in ("forgotten", "kept"):
        executor.add(run_id)
    steps.wake()
    await asyncio.to_thread(executor.began.wait, 30)
    steps.forget(["forgotten"])
    executor.may_end.set()
    async with asyncio.timeout(30):
        assert (await kept).run_id == "kept"
        await has_finished.wait()
    assert forgotten.cancelled()
    await steps.close(timedelta(seconds=30))


@pytest.mark.filterwarnings("error")
def test_a_step_that_outlives_the_event_loop_ends_without_an_error() -> None:
    executor = HeldExecutor()
    steps = StepThread(executor, on_finished=lambda: None)

    async def begin() -> None:
        steps.start()
        steps.expect(["run"])
        executor.add("run")
        steps.wake()
        await asyncio.to_thread(executor.began.wait, 30)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    executor.may_end.set()
    asyncio.run(steps.close(timedelta(seconds=30)))
    assert steps.is_broken, "the thread has ended"


async def test_runs_of_a_step_share_its_time_by_their_work(executor: FragileExecutor, steps: StepThread) -> None:
    futures = [*steps.expect(["a"], 1.0), *steps.expect(["b"], 3.0)]
    executor.add("a", "b")
    steps.wake()
    async with asyncio.timeout(30):
        await asyncio.gather(*futures)
    of_a, of_b = steps.seconds(["a"]), steps.seconds(["b"])
    assert of_a > 0
    assert of_b == pytest.approx(3 * of_a)
