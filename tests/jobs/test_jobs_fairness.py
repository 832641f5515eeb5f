"""Fairness, grouping and estimates: which job is claimed next, and when callers may expect theirs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.jobs.queue import Fairness
from tests.jobs.logical_queue import LogicalQueue, roomy_settings
from tests.jobs.scenarios import SCENARIOS, OpenQueue, Scenario


@pytest.fixture
async def open_queue(redis_url: str, tmp_path: Path) -> AsyncIterator[OpenQueue]:
    opened: list[LogicalQueue] = []

    def queue(fairness: Fairness | None = None) -> LogicalQueue:
        opened.append(LogicalQueue(redis_url, roomy_settings(tmp_path), fairness=fairness, database=3))
        return opened[-1]

    yield queue
    for one in opened:
        await one.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_the_queue_behaves_as_in_the_scenario(scenario: Scenario, open_queue: OpenQueue) -> None:
    await scenario(open_queue)
