"""The bar of `client.loras.add` in terminals and notebooks. Needs rich."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from serve_app.client.upload import OnSent

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def upload_bar(label: str) -> Generator[OnSent]:
    """Show the bytes sent, then that the service checks the file; the bar goes when the block ends.

    with upload_bar("ink") as bar:
        client.loras.add("ink.safetensors", base="pocket", on_progress=bar)
    """
    from rich.console import Console

    console = Console(stderr=True)
    with _notebook_bar(label) if console.is_jupyter else _terminal_bar(label, console) as sent:
        yield sent


@contextmanager
def _terminal_bar(label: str, console: "Console") -> Generator[OnSent]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(f"Uploading {label}", total=None)

        def sent(done: int, total: int) -> None:
            doing = "Checking" if done >= total else "Uploading"
            progress.update(bar, description=f"{doing} {label}", completed=done, total=total)

        yield sent


@contextmanager
def _notebook_bar(label: str) -> Generator[OnSent]:
    """Show a line of text under the cell: rich shows nothing there without ipywidgets."""
    from IPython.display import display

    def line(text: str) -> dict[str, str]:
        return {"text/plain": text}

    handle: Any = display(line(f"Uploading {label}"), raw=True, display_id=True)
    shown = ""

    def sent(done: int, total: int) -> None:
        nonlocal shown
        text = f"Checking {label}" if done >= total else f"Uploading {label}: {100 * done // total} %"
        if text != shown:
            handle.update(line(text), raw=True)
            shown = text

    try:
        yield sent
    finally:
        handle.update(line(""), raw=True)


@contextmanager
def upload_progress(label: str, on_progress: OnSent | None, *, shows_bar: bool) -> Generator[OnSent | None]:
    """Yield what is called with the bytes sent: a bar, or `on_progress`. Raises `ValueError` for both."""
    if not shows_bar:
        yield on_progress
        return
    if on_progress is not None:
        raise ValueError("progress: give either progress or on_progress")
    with upload_bar(label) as bar:
        yield bar
