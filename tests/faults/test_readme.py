"""The table of faults names tests that there are."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = sorted(set(re.findall(r"`([^`]+)`", (HERE / "README.md").read_text())))
FILES = [name for name in NAMED if re.fullmatch(r"([a-z]+/)?test_[a-z_]+", name)]
TESTS = [name for name in NAMED if re.fullmatch(r"…?[a-z]+_[a-z_]+…?", name) and name not in FILES]
WRITTEN = re.findall(r"def test_(\w+)", "".join(path.read_text() for path in HERE.parent.rglob("test_*.py")))


def test_every_file_and_test_of_the_table_is_there() -> None:
    here = {name for name in FILES if any((folder / f"{name}.py").is_file() for folder in (HERE, HERE.parent))}
    assert [name for name in FILES if name not in here] == []
    assert [name for name in TESTS if not any(name.strip("…") in written for written in WRITTEN)] == []
    assert (len(FILES) > 15, len(TESTS) > 40) == (True, True), "the table is read"
