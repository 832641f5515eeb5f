"""`atelier generate`, `atelier upscale` and `atelier loras try` make images through the HTTP interface."""

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from serve_app.cli.command import BadUsage, Failed, Result
from serve_app.cli.loras import Lora as LoraName
from serve_app.client import Client, Job
from serve_app.client.access import KEY_VARIABLE, READY_FILE, URL_VARIABLES
from serve_app.client.display import shown_bar
from serve_app.settings import Settings

RETRY_BUDGET_S = 3.0
"""Retries end after this time: at a terminal, an error soon is better than a long wait."""
TRIED_PROMPT, TRIED_STEPS = "purple mountains under a black sky with a yellow moon", 20
"""A LoRA that recommends no number of steps is tried with 20: a cheap picture tells enough."""


@dataclass(frozen=True, kw_only=True, repr=False)  # it holds a key
class Delivery:
    """Whom a command asks for images, how long it waits for them, and where they go."""

    out: Annotated[
        Path | None,
        typer.Option(
            help="File or folder to write; several images get -1, -2, … By default named by the job's id, in this folder."
        ),
    ] = None
    open_images: Annotated[bool, typer.Option("--open", help="Open the images in the viewer of this machine.")] = False
    base_url: Annotated[
        str | None, typer.Option(envvar=[*URL_VARIABLES], help="Address of the service; by default the local one.")
    ] = None
    key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="An API key; by default that of the local service.")
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the images.")] = 600.0

    def file(self, name: str) -> Path:
        """Return the file to write, which has this name unless the caller has named one."""
        return self.out if self.out is not None and not self.out.is_dir() else (self.out or Path()) / name


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a generation is asked for besides prompt and LoRAs, by the names that `Client.generate` has for it."""

    seed: Annotated[int | None, typer.Option(help="The same seed gives the same image.")] = None
    steps: Annotated[int | None, typer.Option(help="1 to 150; by default what the LoRA was made for.")] = None
    sampler: Annotated[str | None, typer.Option(help="Such as euler or dpm++2m-karras.")] = None
    base_model: Annotated[
        str | None, typer.Option(help="One that the LoRAs can be drawn on; by default their own.")
    ] = None
    image: Annotated[str | None, typer.Option(help="What to begin from: a file, or an image's id.")] = None
    strength: Annotated[float | None, typer.Option(help="How much of it is redrawn: 0.01 to 1.")] = None
    mask: Annotated[str | None, typer.Option(help="A file or an image's id: white where it is redrawn.")] = None
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance", help="How closely the image follows the prompt: 1 to 20.")
    ] = None
    guidance_start: Annotated[
        float | None, typer.Option(help="The fraction of the steps at which guidance begins: 0 up to 1.")
    ] = None
    guidance_end: Annotated[float | None, typer.Option(help="The fraction of the steps at which it ends.")] = None
    width: Annotated[int | None, typer.Option(help="Pixels; by default what the base model was made for.")] = None
    height: Annotated[int | None, typer.Option(help="Pixels; by default what the base model was made for.")] = None
    num_images: Annotated[int | None, typer.Option(help="1 to 8.")] = None
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid.")] = None
    prompt_weights: Annotated[
        bool | None, typer.Option("--prompt-weights", help="Read (red:1.5) and [green] in prompts as weights.")
    ] = None
    embed_settings: Annotated[
        bool | None, typer.Option("--embed-settings", help="Write prompt and settings into the files, as A1111 does.")
    ] = None
    output_format: Annotated[
        Literal["png", "jpeg", "webp"] | None, typer.Option("--format", help="The files: png by default.")
    ] = None


def generate(
    settings: Settings,
    prompt: Annotated[str, typer.Argument(help="What the image shows.", show_default=False)],
    *,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA's name or id (see: atelier loras list), alone or as NAME=WEIGHT. At most four."),
    ] = None,
    weight: Annotated[float | None, typer.Option(help="Strength of LoRAs that name none: -2 to 2.")] = None,
    drawing: Drawing,
    interface: Annotated[
        Literal["a", "b"], typer.Option(help="How the key is sent: a as a bearer key, b as X-API-Key.")
    ] = "a",
    delivery: Delivery,
) -> Result:
    """Generate images from a prompt, with LoRAs or without."""
    loras = dict(_use_of(each, weight) for each in lora or ())
    with _client(settings, delivery, interface) as client:
        job = client.generate(prompt, loras=loras, wait=False, **vars(drawing))
        _warn_of(job.unknown_words)
        return _wait_and_save(job, delivery, doing=_drawing(job, ", ".join(loras)))


def _use_of(text: str, weight: float | None) -> tuple[str, float | None]:
    """Read `NAME=WEIGHT`, or a name alone, which may hold `=` too."""
    name, equals, own = text.rpartition("=")
    with suppress(ValueError):
        if equals and name:
            return name, float(own)
    return text, weight


def upscale(
    settings: Settings,
    image: Annotated[str, typer.Argument(help="An image of this account by its id, or a file.", show_default=False)],
    factor: Annotated[int | None, typer.Option(help="2 or 4; 2 by default.")] = None,
    *,
    delivery: Delivery,
) -> Result:
    """Upscale an image."""
    with _client(settings, delivery) as client:
        return _wait_and_save(client.upscale(image, factor), delivery, doing=f"Enlarging {factor or 2}×")


def try_lora(
    settings: Settings,
    lora: LoraName,
    prompt: Annotated[
        str, typer.Option(help="What the image shows; the LoRA's trigger words are appended.")
    ] = TRIED_PROMPT,
    weight: Annotated[float | None, typer.Option(help="Strength of the adapter: -2 to 2.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same image.")] = 1,
    *,
    delivery: Delivery,
) -> Result:
    """Draw one image with a LoRA and its trigger words, with the key of an account that may use it."""
    with _client(settings, delivery) as client:
        found = client.loras.find(lora)
        words = ", ".join((prompt, *(word for word in found.trigger_words if word.casefold() not in prompt.casefold())))
        steps = found.recommended_steps or TRIED_STEPS
        job = client.generate(words, lora_id=found.id, seed=seed, steps=steps, lora_weight=weight)
        return _wait_and_save(job, delivery, doing=_drawing(job, found.name))


@contextmanager
def _client(settings: Settings, delivery: Delivery, interface: Literal["a", "b"] = "a") -> Generator[Client]:
    """Raises `BadUsage` before anything is generated where the images could not be written afterwards."""
    folder = delivery.file("x").resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise BadUsage(f"--out: cannot write in {folder}")
    base_url, key, ready_file = delivery.base_url, delivery.key, settings.data_dir / READY_FILE
    try:
        client = Client(base_url, key, interface=interface, retry_budget=RETRY_BUDGET_S, ready_file=ready_file)
    except ValueError as error:
        field, colon, why = str(error).partition(": ")
        raise BadUsage(
            f"--{field.replace('_', '-')}{colon}{why}" if field in ("base_url", "key") else str(error)
        ) from None
    with client:
        try:
            yield client
        except ValueError as error:  # a file that is too large
            raise BadUsage(str(error)) from None


def _warn_of(unknown_words: Sequence[str]) -> None:
    """Warn on stderr of prompt words that the base model was not trained on."""
    if unknown_words:
        text = f"The base model has never read: {', '.join(unknown_words)}."
        Console(file=sys.stderr).print(Text(text, style="yellow"))


def _drawing(job: Job, loras: str) -> str:
    """What a generation draws, for its progress bar: `Drawing 2 × 512², Neon`."""
    images, width, height = (job.request[name] for name in ("num_images", "width", "height"))
    size = f"{width}²" if width == height else f"{width}×{height}"
    return f"Drawing {images} × {size}{', ' if loras else ''}{loras}"


def _wait_and_save(job: Job, delivery: Delivery, *, doing: str) -> Result:
    """`doing` labels the bar."""
    began = time.monotonic()
    try:
        with shown_bar(doing) as show:  # on stderr: stdout holds only the result
            job.wait(delivery.timeout, on_progress=show and (lambda percent: show(doing, percent / 100)))
    except KeyboardInterrupt:
        raise Failed(f"stopped; the service was asked to cancel {job.id}") from None
    seconds = time.monotonic() - began
    images = [
        (image, _output_path(delivery.file(f"{job.id}{image.suffix}"), place, len(job.images)))
        for place, image in enumerate(job.images)
    ]
    for image, file in images:
        image.download(file)
    if delivery.open_images:
        _open([file for _, file in images])
    facts = [
        {"image_id": image.image_id, "url": image.url, "width": image.width, "height": image.height, "file": str(file)}
        for image, file in images
    ]
    shown = "\n".join(f"{file}  {image.image_id}" for image, file in images)
    return Result(facts={"id": job.id, "seconds": round(seconds, 2), "images": facts}, shown=shown)


def _open(files: Sequence[Path]) -> None:
    """Raises `Failed` where this machine has no viewer: the images are written by then."""
    for file in files:
        if typer.launch(str(file)) != 0:
            raise Failed(f"--open: this machine has no program that opens {file}")


def _output_path(wanted: Path, index: int, how_many: int) -> Path:
    return wanted if how_many == 1 else wanted.with_name(f"{wanted.stem}-{index + 1}{wanted.suffix}")
