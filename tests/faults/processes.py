"""Finds the processes of one running service, below the process that started it, and no others."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")

VICTIMS: Mapping[str, str] = {
    "generator": "ray::ServeReplica:atelier:generator",
    "upscaler": "ray::ServeReplica:atelier:upscaler",
    "ingress": "ray::ServeReplica:atelier:ingress",
    "housekeeper": "ray::ServeReplica:atelier:housekeeper",
    "controller": "ray::ServeController",
    "proxy": "ray::ProxyActor",
    "haproxy manager": "ray::HAProxyManager",
    "haproxy": "/haproxy -db",
}
"""What a process of each part shows in its command line."""
CONSTRUCTORS = (".__init__", ".initialize")
"""What Ray adds to it meanwhile."""


def descendants(root: int) -> dict[int, str]:
    """pid → command line of every process under `root`."""
    parents = {pid: parent for pid in _pids() if (parent := _parent(pid)) is not None}
    found: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found.keys()
        found |= {pid: command_line(pid) for pid in frontier}
    return found


def of_part(root: int, part: str) -> list[int]:
    """The pids of one part of the service that `root` runs."""
    return sorted(pid for pid, line in descendants(root).items() if VICTIMS[part] in line)


def started_of_part(root: int, part: str) -> list[int]:
    """Those that are at work: Ray shows in the title of a process that its constructor runs."""
    lines = descendants(root)
    return sorted(
        pid for pid, line in lines.items() if VICTIMS[part] in line and not any(call in line for call in CONSTRUCTORS)
    )


def is_alive(pid: int) -> bool:
    """False for a zombie too."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> bool:
    """`kill -9`; False when it was gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def program(pid: int) -> str:
    """The name of the program that a process runs; empty for one that has ended."""
    try:
        return (PROC / str(pid) / "exe").readlink().name
    except OSError:
        return ""


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int | None:
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])
