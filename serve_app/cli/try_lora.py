"""`atelier loras try`: a first picture with a LoRA, through the HTTP interface."""

from typing import Annotated

import typer

from serve_app.cli.command import Result, command
from serve_app.cli.images import (
    BaseUrl,
    Key,
    Open,
    Out,
    Timeout,
    drawing,
    find_lora,
    must_be_writable,
    open_client,
    wait_and_save,
)
from serve_app.settings import Settings

PROMPT = "purple mountains under a black sky with a yellow moon"
SIZE, STEPS = 512, 20
"""The cheapest picture of interface A."""


def add_try_command(group: typer.Typer) -> None:
    command(group, "try")(_try)


def _try(
    settings: Settings,
    lora: Annotated[str, typer.Argument(metavar="LORA", help="The adapter's id or name.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="What the image shows; the LoRA's trigger words are appended.")] = PROMPT,
    weight: Annotated[float | None, typer.Option(help="Strength of the adapter: 0.1 to 1.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same image.")] = 1,
    out: Out = None,
    open_images: Open = False,
    base_url: BaseUrl = None,
    key: Key = None,
    timeout: Timeout = 600.0,
) -> Result:
    """Draw one image with a LoRA and its trigger words, with the key of an account that may use it."""
    must_be_writable(out)
    with open_client(settings, base_url, key, "a") as client:
        found = client.loras.get(find_lora(client, lora).id)
        words = ", ".join((prompt, *(word for word in found.trigger_words if word.casefold() not in prompt.casefold())))
        job = client.generate(
            words, lora_id=found.id, seed=seed, steps=STEPS, lora_weight=weight, width=SIZE, height=SIZE
        )
        doing = drawing(1, SIZE, SIZE, found.name)
        return wait_and_save(job, out, timeout, doing=doing, open_images=open_images)
