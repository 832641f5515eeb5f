"""`atelier generate` and `atelier upscale`: images through the HTTP interface."""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serve_app.cli.command import Result, command
from serve_app.cli.exit_codes import BadUsage, Failed
from serve_app.cli.local import access
from serve_app.client import Client, Job, Unauthorized, UnsupportedOption
from serve_app.settings import Settings

RETRY_BUDGET_S = 3.0
"""Retries end after this time: at a terminal, an error soon is better than a long wait."""

BaseUrl = Annotated[
    str | None, typer.Option(envvar="ATELIER_BASE_URL", help="Address of the service; by default the local one.")
]
Key = Annotated[
    str | None, typer.Option(envvar="ATELIER_KEY", help="An API key; by default that of the local service.")
]
Out = Annotated[
    Path | None, typer.Option(help="File to write; several images get -1, -2, … By default ID.png in this directory.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the images.")]


def add_image_commands(app: typer.Typer) -> None:
    command(app, "generate")(_generate)
    command(app, "upscale")(_upscale)


def _generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="What the image shows.", show_default=False)],
    lora: Annotated[str, typer.Option(help="The adapter's name or id (see: atelier loras list).", show_default=False)],
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None,
    steps: Annotated[int | None, typer.Option(help="20 to 50.")] = None,
    weight: Annotated[float | None, typer.Option(help="Strength of the adapter: 0.1 to 1.")] = None,
    guidance: Annotated[float | None, typer.Option(help="How closely the image follows the prompt: 1 to 20.")] = None,
    width: Annotated[int | None, typer.Option(help="512 or 768.")] = None,
    height: Annotated[int | None, typer.Option(help="512 or 768.")] = None,
    num_images: Annotated[int | None, typer.Option(help="1 to 4.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid (interface b).")] = None,
    interface: Annotated[Literal["a", "b"], typer.Option(help="a: bearer key. b: X-API-Key, other sizes.")] = "a",
    out: Out = None,
    base_url: BaseUrl = None,
    key: Key = None,
    timeout: Timeout = 600.0,
) -> Result:
    """Generate images from a prompt with a LoRA adapter."""
    must_be_writable(out)
    with open_client(settings, base_url, key, interface) as client:
        try:
            job = client.generate(
                prompt, lora_id=lora_id_of(client, lora), seed=seed, steps=steps, lora_weight=weight, guidance_scale=guidance,
                width=width, height=height, num_images=num_images, negative_prompt=negative_prompt,
            )  # fmt: skip
        except UnsupportedOption as error:
            raise BadUsage(f"--{str(error).replace('_', '-')}") from None
        drawn = f"{num_images or 1} × {width or 512}×{height or 512}, {lora}"
        return wait_and_save(job, out, timeout, doing=f"Drawing {drawn}")


def _upscale(
    settings: Settings,
    image_id: Annotated[str, typer.Argument(help="Id of an image of this account: img_…", show_default=False)],
    factor: Annotated[int | None, typer.Option(help="2 or 4; 2 by default.")] = None,
    out: Out = None,
    base_url: BaseUrl = None,
    key: Key = None,
    timeout: Timeout = 600.0,
) -> Result:
    """Upscale an image of this account."""
    must_be_writable(out)
    with open_client(settings, base_url, key, "a") as client:
        return wait_and_save(client.upscale(image_id, factor), out, timeout, doing=f"Enlarging {factor or 2}×")


@contextmanager
def open_client(
    settings: Settings, base_url: str | None, key: str | None, interface: Literal["a", "b"]
) -> Generator[Client]:
    found = access(settings, base_url=base_url, key=key, interface=interface)
    try:
        client = Client(found.base_url, found.key, interface=interface, retry_budget=RETRY_BUDGET_S)
    except ValueError as error:
        raise BadUsage(f"--{str(error).replace('_', '-')}") from None
    with client:
        yield client


def lora_id_of(client: Client, name_or_id: str) -> str:
    """The id of the adapter with this name or id. Raises `Failed` when the key may use none, or several match."""
    try:
        models = client.models()
    except Unauthorized:
        return name_or_id  # a key for interface a only cannot list models: the value must be an id
    found = [model for model in models if name_or_id.casefold() in (model.id.casefold(), model.name.casefold())]
    if len(found) == 1:
        return found[0].id
    known = ", ".join(model.name for model in models) or "none"
    what = f"{len(found)} adapters are named" if found else "no adapter"
    raise Failed(f"--lora: {what} {name_or_id!r} for this account (available: {known})")


def wait_and_save(job: Job, out: Path | None, timeout: float, *, doing: str = "") -> Result:
    """`doing` labels the bar; by default the job's id."""
    began = time.monotonic()
    try:
        _wait_with_progress_bar(job, timeout, doing or job.id)
    except KeyboardInterrupt:
        raise Failed(f"stopped waiting; {job.id} continues in the service") from None
    seconds = time.monotonic() - began
    images = job.images
    files = [_output_path(out, job.id, index, len(images)) for index in range(len(images))]
    for image, file in zip(images, files, strict=True):
        image.download(file)
    facts = [
        {"image_id": image.image_id, "url": image.url, "width": image.width, "height": image.height, "file": str(file)}
        for image, file in zip(images, files, strict=True)
    ]
    lines = [f"{file}  {image.image_id or ''}".rstrip() for image, file in zip(images, files, strict=True)]
    return Result(facts={"id": job.id, "seconds": round(seconds, 2), "images": facts}, shown="\n".join(lines))


def must_be_writable(out: Path | None) -> None:
    """Raise `BadUsage` before the images are generated, not after."""
    folder = out.resolve().parent if out else Path.cwd()
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise BadUsage(f"--out: cannot write in {folder}")


def _wait_with_progress_bar(job: Job, timeout: float, doing: str) -> None:
    """Wait with a progress bar on stderr, with the time that is left: stdout holds only the result."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task(escape(doing), total=100)
        job.wait(timeout, on_progress=lambda percent: progress.update(bar, completed=percent))


def _output_path(out: Path | None, run_id: str, index: int, how_many: int) -> Path:
    wanted = out or Path(f"{run_id}.png")
    return wanted if how_many == 1 else wanted.with_name(f"{wanted.stem}-{index + 1}{wanted.suffix}")
