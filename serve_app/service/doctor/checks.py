"""Result of one doctor check."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, its level, what was found, and advice when it is not ok."""

    name: str
    level: Level
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Level.OK, found)


def warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.FAIL, found, advice)
