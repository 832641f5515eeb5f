"""Every protection has a test that fails without it."""

from pathlib import Path

import pytest

from tests.faults.protections import PROTECTIONS, ROOT, Protection, fails_without


@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda protection: protection.name)
def test_what_is_taken_away_is_there(protection: Protection) -> None:
    for file, old, new in protection.changes:
        assert (ROOT / file).read_text().count(old) == 1
        assert old != new
    file, _, test = protection.test.partition("::")
    assert f"def {test}" in Path(file).read_text()


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("protection", PROTECTIONS, ids=lambda protection: protection.name)
def test_its_test_fails_without_it(protection: Protection, tmp_path: Path) -> None:
    assert fails_without(protection, tmp_path)
