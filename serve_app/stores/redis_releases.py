"""Releases of Redis and Valkey with the fixes known in November 2026."""

import re

Version = tuple[int, ...]

PATCHED: dict[str, dict[tuple[int, int], Version]] = {
    "redis": {
        (6, 2): (6, 2, 24),
        (7, 2): (7, 2, 16),
        (7, 4): (7, 4, 11),
        (8, 2): (8, 2, 10),
        (8, 4): (8, 4, 6),
        (8, 6): (8, 6, 7),
        (8, 8): (8, 8, 3),
        (8, 10): (8, 10, 2),
    },
    "valkey": {
        (7, 2): (7, 2, 13),
        (8, 0): (8, 0, 10),
        (8, 1): (8, 1, 7),
        (9, 0): (9, 0, 5),
        (9, 1): (9, 1, 1),
    },
}
"""Of each line that is maintained, the first release without known holes: their release notes of May to September 2026.
Before them came those of CVE-2024-31449 and CVE-2024-46981 (2024), CVE-2025-49844 (2025) and CVE-2026-23479, -23631 and -25243:
code run by Lua scripts and by clients that are let in."""


def parse_version(text: str) -> Version:
    """Return the numbers of `7.2.4`, or of the first such text in a program's `--version`.

    Empty when there are none.
    """
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def patched_release(server: str, version: str) -> str | None:
    """Return the release to take instead of this one; None when it has every known fix.

    A line of releases of which nothing is known counts as newer.
    """
    lines = PATCHED.get(server, {})
    have = parse_version(version)
    line = (have[0], have[1]) if len(have) > 1 else (0, 0)
    if line not in lines and line < max(lines, default=(0, 0)):
        line = min(known for known in lines if known > line)  # its own line is not maintained any more
    wanted = lines.get(line)
    return None if wanted is None or have >= wanted else ".".join(map(str, wanted))
