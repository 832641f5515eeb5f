"""The table of faults names tests that there are."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMED = sorted(set(re.findall(r"`([^`]+)`", (HERE / "README.md").read_text())))
FILES = [name for name in NAMED if re.fullmatch(r"([a-z]+/)?test_[a-z_]+", name)]
TESTS = [name for name in NAMED if re.fullmatch(r"…?[a-z]+_[a-z_]+…?", name) and name not in FILES]
WRITTEN = re.findall(r"def test_(\w+)", "".join(path.read_text() for path in HERE.parent.rglob("test_*.py")))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_table_is_there(name: str) -> None:
    assert any((folder / f"{name}.py").is_file() for folder in (HERE, HERE.parent))


@pytest.mark.parametrize("name", TESTS)
def test_a_test_of_the_table_is_written(name: str) -> None:
    assert any(name.strip("…") in written for written in WRITTEN)


def test_the_table_is_read() -> None:
    assert len(FILES) > 15
    assert len(TESTS) > 40
