"""The project's size is a budget: `tests/size.toml` says how much there may be of everything that has to be read.

A change that needs more raises its figure in a commit of its own, which says why. `.venv/bin/python -m tests.test_size`
prints the file as it would be with today's figures.
"""

import ast
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support import ROOT

BUDGET = ROOT / "tests" / "size.toml"
CODE = {".py", ".lua", ".html", ".css", ".js"}
LONGEST_LINE, LONGEST_FUNCTION = 120, 60


def tracked(*folders: str, suffixes: Iterable[str]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in suffixes and path.is_file()]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def long_lines(paths: Iterable[Path]) -> int:
    return sum(len(line) > LONGEST_LINE for path in paths for line in path.read_text().splitlines())


def long_functions(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION:
                yield f"{path.relative_to(ROOT)}: {node.name}"


def measured() -> dict[str, dict[str, int]]:
    """Return today's figures, by the sections and names of the budget."""
    product = tracked("serve_app", "deployments", suffixes=CODE)
    python = [path for path in product if path.suffix == ".py"]
    by_folder: Counter[str] = Counter()
    for path in product:
        folder = path.relative_to(ROOT).parent
        by_folder["/".join(folder.parts[:2])] += lines([path])
    prose = tracked(suffixes={".md"})
    return {
        "lines of the product": dict(sorted(by_folder.items())),
        "lines": {
            "product": lines(product),
            "tests": lines(tracked("tests", suffixes=CODE)),
            "benchmarks": lines(tracked("benchmarks", suffixes=CODE)),
        },
        "files": {"Python files of the product": len(python)},
        "words": {"docs": sum(len(path.read_text().split()) for path in tracked("docs", suffixes={".md"}))},
        "longer than they should be": {
            "lines of code": long_lines(tracked("serve_app", "deployments", "tests", "benchmarks", suffixes=CODE)),
            "lines of prose": long_lines(prose),
            "functions": len(list(long_functions(python))),
        },
    }


def test_nothing_exceeds_its_budget() -> None:
    allowed = tomllib.loads(BUDGET.read_text())
    found = measured()
    assert {section: [*rows] for section, rows in found.items()} == {each: [*rows] for each, rows in allowed.items()}
    over = {
        f"{section}: {name}": f"{size}, and may be {allowed[section][name]}"
        for section, rows in found.items()
        for name, size in rows.items()
        if size > allowed[section][name]
    }
    assert not over, f"raise tests/size.toml in a commit of its own that says why, or take something away: {over}"


if __name__ == "__main__":
    for section, rows in measured().items():
        print(f'["{section}"]', *(f'"{name}" = {size}' for name, size in rows.items()), "", sep="\n")  # noqa: T201
