"""The tests of the job scripts can fail: every planted defect is found."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis

from serve_app.stores.embedded import ensure_redis, stop_redis
from tests.faults.mutants import MUTANTS, QUICK, Mutant, finding, source


@pytest.fixture(scope="module")
def mutant_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("mutants")
    server = ensure_redis(home)
    with redis.Redis.from_url(server.url) as client:
        cast(Any, client).config_set("appendfsync", "no")
    yield server.url
    stop_redis(home)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_defect_fits_the_script_it_is_planted_in(mutant: Mutant) -> None:
    assert source(mutant).count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
async def test_a_planted_defect_is_found(mutant: Mutant, mutant_url: str) -> None:
    assert await finding(mutant, mutant_url) is not None


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_every_planted_defect_is_found(mutant: Mutant, mutant_url: str) -> None:
    assert await finding(mutant, mutant_url) is not None


@pytest.mark.soak
async def test_nothing_is_found_where_nothing_is_planted(mutant_url: str) -> None:
    assert await finding(Mutant("none", "queue", "", ""), mutant_url) is None
