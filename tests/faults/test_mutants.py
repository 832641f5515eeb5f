"""The tests of the job scripts can fail: every planted defect is found."""

import pytest

from tests.faults.mutants import MUTANTS, QUICK, Mutant, finding, source


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_defect_fits_the_script_it_is_planted_in(mutant: Mutant) -> None:
    assert source(mutant).count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.script_text
@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
async def test_a_planted_defect_is_found(mutant: Mutant, redis_url: str) -> None:
    assert await finding(mutant, redis_url) is not None


@pytest.mark.soak
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_every_planted_defect_is_found(mutant: Mutant, redis_url: str) -> None:
    assert await finding(mutant, redis_url) is not None


@pytest.mark.soak
async def test_nothing_is_found_where_nothing_is_planted(redis_url: str) -> None:
    assert await finding(Mutant("none", "queue", "", ""), redis_url) is None
