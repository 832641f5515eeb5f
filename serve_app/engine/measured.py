"""What an engine has done, for whoever measures it."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

MOST_KEPT = 4096
"""Of each, while nobody takes them."""

_Item = TypeVar("_Item")


class StepTiming(NamedTuple):
    """One step of one batch: how long, rows of the forward pass, distinct adapters in it."""

    seconds: float
    rows: int
    adapters: int


class Measured:
    """Steps, loads of adapters and evictions since they were last taken. Any thread adds, and one takes."""

    def __init__(self) -> None:
        self.steps: deque[StepTiming] = deque(maxlen=MOST_KEPT)
        self.loads: deque[float] = deque(maxlen=MOST_KEPT)
        """Seconds that reading and packing each adapter took."""
        self.evictions: deque[str] = deque(maxlen=MOST_KEPT)
        """Adapters that lost their slot."""


def take(items: deque[_Item]) -> Iterator[_Item]:
    """Remove and yield what is there."""
    for _ in range(len(items)):
        yield items.popleft()
