"""Accept and poll of an older commit and of this one, measured in turn in one run.

    .venv/bin/python -m benchmarks.http_against COMMIT [--turns 5] [--seconds 2] [--connections 32]

Each turn runs `benchmarks.http` of the older commit, from a git worktree made for it, and then of this checkout, with
this environment's packages. The ratios are new to old, turn by turn.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import spread
from serve_app.settings import ROOT

MODE = "always"
"""How Redis syncs its file: as the service is shipped."""
_ROW = re.compile(
    rf"^\| (?P<kind>accept|poll) \| {MODE} \| (?P<per_s>[\d.]+) .*?\| [^|]*\| [^|]*\| (?P<cpu_ms>[\d.]+) ",
    re.MULTILINE,
)


class Row(NamedTuple):
    per_s: float
    cpu_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    old: list[dict[str, Row]] = []
    new: list[dict[str, Row]] = []
    with worktree(options.commit) as checkout:
        for turn in range(options.turns):
            for name, folder, rows in (("old", checkout, old), ("new", ROOT, new)):
                rows.append(measure(folder, options.seconds, options.connections))
                sys.stdout.write(f"turn {turn + 1}, {name}: {rows[-1]}\n")
                sys.stdout.flush()
    sys.stdout.write("\n".join(report(old, new)) + "\n")


@contextmanager
def worktree(commit: str) -> Generator[Path]:
    """Check `commit` out in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="http-against-") as parent:
        folder = Path(parent) / "checkout"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", folder], check=True)


def measure(checkout: Path, seconds: float, connections: int) -> dict[str, Row]:
    """Run one round of a checkout's own `benchmarks.http`."""
    command = [sys.executable, "-m", "benchmarks.http", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--connections", str(connections)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = {found["kind"]: Row(float(found["per_s"]), float(found["cpu_ms"])) for found in _ROW.finditer(done.stdout)}
    if done.returncode != 0 or set(rows) != {"accept", "poll"}:
        raise RuntimeError(done.stdout + done.stderr)
    return rows


def report(old: list[dict[str, Row]], new: list[dict[str, Row]]) -> Iterator[str]:
    yield "| | old: per second | new | new / old | old: CPU ms each | new | old / new |"
    yield "|---|---|---|---|---|---|---|"
    for kind in ("accept", "poll"):
        was, now = [rows[kind] for rows in old], [rows[kind] for rows in new]
        rates = [b.per_s / a.per_s for a, b in zip(was, now, strict=True)]
        costs = [a.cpu_ms / b.cpu_ms for a, b in zip(was, now, strict=True)]
        cells = [
            *(spread([row.per_s for row in rows], 0) for rows in (was, now)),
            spread(rates, 2),
            *(spread([row.cpu_ms for row in rows], 2) for rows in (was, now)),
            spread(costs, 2),
        ]
        yield f"| {kind} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
