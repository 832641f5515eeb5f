"""Finds the processes of one running service, below the process that started it, and no others."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

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
"""What Ray adds to the title of a process while its constructor runs."""


def descendants(root: int) -> dict[int, str]:
    """pid → command line of every process under `root`."""
    try:
        below = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    return {process.pid: command_line(process.pid) for process in below}


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
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
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
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def program(pid: int) -> str:
    """The name of the program that a process runs; empty for one that has ended."""
    try:
        return Path(psutil.Process(pid).exe()).name
    except (psutil.Error, OSError):
        return ""
