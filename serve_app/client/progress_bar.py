"""The bar of `client.loras.add` in terminals and notebooks. Needs rich."""

from collections.abc import Generator
from contextlib import contextmanager

from serve_app.client.upload import OnSent


@contextmanager
def upload_bar(label: str) -> Generator[OnSent]:
    """Show the bytes sent, then that the service checks the file; the bar goes when the block ends.

    with upload_bar("ink") as bar:
        client.loras.add("ink.safetensors", base="pocket", on_progress=bar)
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"Uploading {label}", total=None)

        def sent(done: int, total: int) -> None:
            doing = "Checking" if done >= total else "Uploading"
            progress.update(bar, description=f"{doing} {label}", completed=done, total=total)

        yield sent


@contextmanager
def upload_progress(label: str, on_progress: OnSent | None, *, shows_bar: bool) -> Generator[OnSent | None]:
    """Yields what is called with the bytes sent: a bar, or `on_progress`. Raises `ValueError` for both."""
    if not shows_bar:
        yield on_progress
        return
    if on_progress is not None:
        raise ValueError("progress: give either progress or on_progress")
    with upload_bar(label) as bar:
        yield bar
