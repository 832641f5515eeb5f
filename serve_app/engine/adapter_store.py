"""Holds the numbers of all adapters of one base model in one piece of memory, which is taken once and never moves.

Memory is counted in lines. A batch's rows are gathered line by line, so that an adapter lies as it was packed, at its
own layers and ranks, whatever the other adapters are.
"""

from collections.abc import Collection
from itertools import pairwise

import torch
from torch import Tensor

LINE_BYTES = 128
"""A line is the least that is copied at once: long enough for a device's memory, short enough to waste little."""
WORD = torch.int64
"""The type that lines are moved as, whatever numbers they hold."""
WORDS = LINE_BYTES // WORD.itemsize
ZEROS, ONES = 0, 1
"""Two lines that are always there: of zeros, and of float32 ones."""
RESERVED = 2


class AdapterStore:
    """Lines of memory on a device, taken and given back in spans. Only the step thread may use it.

    A CPU gives memory its pages at their first use, so a large store that is little used costs little.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size_bytes: int) -> None:
        """`dtype` is that of the adapters' weights."""
        self.device, self.dtype = device, dtype
        self.lines = torch.empty(max(size_bytes // LINE_BYTES, RESERVED), WORDS, dtype=WORD, device=device)
        self.lines[ZEROS] = 0
        self.lines[ONES].view(torch.float32).fill_(1)
        self._spans = {0: RESERVED}
        self.most_bytes = (len(self.lines) - RESERVED) * LINE_BYTES

    @property
    def numbers(self) -> Tensor:
        """View all lines as numbers of the adapters' type, [lines · numbers a line]."""
        return self.lines.view(self.dtype).view(-1)

    @property
    def size_bytes(self) -> int:
        """Return bytes of the spans that are taken. Any thread may ask."""
        return sum(self._spans.copy().values()) * LINE_BYTES

    def write(self, start: int, lines: Tensor) -> None:
        """Copy an adapter's lines to where they were given space."""
        self.lines[start : start + len(lines)].copy_(lines, non_blocking=True)

    def take(self, count: int) -> int | None:
        """Take `count` lines in a row; return where they begin, or None where no gap is long enough."""
        start = next((start for start, end in self._gaps(self._spans) if end - start >= count), None)
        if start is not None:
            self._spans[start] = count
        return start

    def free(self, start: int) -> None:
        del self._spans[start]

    def could_take(self, count: int, *, without: Collection[int] = ()) -> bool:
        """Return whether `count` lines would fit if the spans that begin at `without` were free."""
        kept = {start: length for start, length in self._spans.items() if start not in without}
        return any(end - start >= count for start, end in self._gaps(kept))

    def _gaps(self, spans: dict[int, int]) -> list[tuple[int, int]]:
        """Return the begin and end of what lies free between spans, in order."""
        edges = [*sorted((start, start + length) for start, length in spans.items()), (len(self.lines), 0)]
        return [(end, start) for (_, end), (start, _) in pairwise(edges)]


def line_count(size_bytes: int) -> int:
    return -(-size_bytes // LINE_BYTES)
