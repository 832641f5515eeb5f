"""A bar in terminals and notebooks for `on_progress` of `client.loras.add`. Needs rich."""

from collections.abc import Generator
from contextlib import contextmanager

from serve_app.client.upload import OnSent


@contextmanager
def upload_bar(label: str) -> Generator[OnSent]:
    """Show the bytes sent, then that the service checks the file; the bar goes when the block ends.

    with upload_bar("ink") as bar:
        client.loras.add("ink.safetensors", base_model="pocket", on_progress=bar)
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
