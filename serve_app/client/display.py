"""What a terminal or a notebook shows: a bar while something goes on, and pictures in a grid. Needs no other package."""

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

WIDTH, LONGEST_LABEL = 28, 32
"""The characters of the bar, and the most of the words before it: with what follows they fit into 80 columns."""
_ERASE = "\r\x1b[2K"

Show = Callable[[str, float], object]
"""A callback that is given what is being done, and how much of it is done, from 0 to 1."""


@contextmanager
def shown_bar(label: str, *, wanted: bool = True) -> Generator[Show | None]:
    """Show a bar under the notebook's cell or on a terminal's stderr; it goes when the block ends.

    Yields None where nobody would see it: where stderr is neither, as in a log, or it is not wanted.
    """
    write = (_notebook_line() or _terminal_line()) if wanted else None
    if write is None:
        yield None
        return
    began = time.monotonic()

    def show(text: str, done: float) -> None:
        full = int(WIDTH * done)
        left = f", {(time.monotonic() - began) * (1 - done) / done:.0f} s left" if 0 < done < 1 else ""
        words = " ".join(text.split())[:LONGEST_LABEL]
        write(f"{words} {'━' * full}{'─' * (WIDTH - full)} {100 * done:.0f} %{left}")

    show(label, 0.0)
    try:
        yield show
    finally:
        write("")


def _terminal_line() -> Callable[[str], object] | None:
    def write(text: str) -> None:
        sys.stderr.write(f"{_ERASE}{text}")
        sys.stderr.flush()

    return write if sys.stderr.isatty() else None


def _notebook_line() -> Callable[[str], object] | None:
    """A line of text under the cell; None outside a notebook."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        return None
    handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)


class Cell(NamedTuple):
    """A picture of a grid: its address, what is written below it, and what is shown on pointing at it."""

    source: str
    caption: str
    title: str


def grid_html(cells: Iterable[Cell]) -> str:
    """Pictures side by side, each over its caption, as HTML."""
    figures = "".join(
        f'<figure style="margin:0"><img src="{escape(source)}" title="{escape(title)}" alt="{escape(title)}" '
        f'style="max-width:256px;max-height:256px"><figcaption>{escape(caption)}</figcaption></figure>'
        for source, caption, title in cells
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>'
