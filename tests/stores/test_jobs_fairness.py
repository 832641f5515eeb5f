"""Who is served next, and what callers are told about it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.stores.jobs import Fairness
from tests.stores.logical import Bench, story_settings
from tests.stores.scenarios import SCENARIOS, Benches, Scenario


@pytest.fixture
async def benches(game_url: str, tmp_path: Path) -> AsyncIterator[Benches]:
    opened: list[Bench] = []

    def bench(fairness: Fairness | None = None) -> Bench:
        opened.append(Bench(game_url, story_settings(tmp_path), fairness=fairness, database=3))
        return opened[-1]

    yield bench
    for one in opened:
        await one.close()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_the_queue_tells_this_story(scenario: Scenario, benches: Benches) -> None:
    await scenario(benches)
