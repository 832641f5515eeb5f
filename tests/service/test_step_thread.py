"""The step thread: one failure is one strike, and only an image wipes strikes out."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pytest

from serve_app.domain.jobs import Claim, Failure, JobKind
from serve_app.service.bench import Pixels
from serve_app.service.step_thread import MAX_STRIKES, StepFailed, StepThread
from tests.support import wait_until


class Drawn(NamedTuple):
    key: str
    image: Pixels | None
    failure: Failure | None = None


class FragileBench:
    """Its device draws what is well, and refuses to draw anything beside a run that is not; it can always be tidied up."""

    kind = JobKind.GENERATION
    free_rows = 8
    resident: Sequence[str] = ()

    def __init__(self) -> None:
        self._live: set[str] = set()
        self.is_untidy = False

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self.is_untidy

    def add(self, key: str) -> None:
        self._live.add(key)

    async def start(self, claim: Claim, keys: Sequence[str]) -> None:
        self._live.update(keys)

    def step(self) -> Sequence[Drawn]:
        if any(key.startswith("bad") for key in self._live):
            raise RuntimeError("the device refuses")
        self.is_untidy = False
        drawn, self._live = self._live, set()
        return [Drawn(key, np.zeros((1, 1, 3), np.uint8)) for key in drawn]

    def abort(self, key: str) -> bool:
        self._live.discard(key)
        self.is_untidy = True
        return True

    def progress(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(self._live, (0, 1))


@pytest.fixture
def bench() -> FragileBench:
    return FragileBench()


@pytest.fixture
async def steps(bench: FragileBench) -> AsyncIterator[StepThread]:
    thread = StepThread(bench, on_finished=lambda: None)
    thread.start()
    yield thread
    await thread.close(timedelta(seconds=30))


async def _step(bench: FragileBench, steps: StepThread, key: str) -> None:
    """Until the run has ended, and the bench has been tidied after it."""
    (ending,) = steps.expect([key])
    bench.add(key)
    steps.wake()
    try:
        async with asyncio.timeout(30):
            await ending
    finally:
        steps.forget([key])
        await wait_until(lambda: not bench.is_untidy)


async def test_a_bench_that_only_ever_tidies_up_is_broken(bench: FragileBench, steps: StepThread) -> None:
    for number in range(MAX_STRIKES):
        assert not steps.is_broken
        with pytest.raises(StepFailed):
            await _step(bench, steps, f"bad-{number}")
    assert steps.is_broken


async def test_images_between_failures_wipe_them_out(bench: FragileBench, steps: StepThread) -> None:
    for number in range(MAX_STRIKES):
        with pytest.raises(StepFailed):
            await _step(bench, steps, f"bad-{number}")
        await _step(bench, steps, f"good-{number}")
    assert not steps.is_broken


async def test_a_failure_counts_once_however_busy_the_event_loop_is(bench: FragileBench, steps: StepThread) -> None:
    (ending,) = steps.expect(["bad"])
    bench.add("bad")
    steps.wake()
    deadline = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < deadline:
        pass  # the loop gets to nothing else
    with pytest.raises(StepFailed):
        await ending
    assert not steps.is_broken
