"""The commands of `atelier` that an account asks a service for, here or elsewhere: they need the SDK alone.

The exit code is 0 for success, 1 for failure, 2 for bad usage, 130 after Ctrl-C. An error is one line on stderr.
"""

import json
import os
import re
import sys
import time
import webbrowser
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Never

from serve_app.client.access import KEY_VARIABLE, READY_FILE, URL_VARIABLES
from serve_app.client.clients import Client, Job
from serve_app.client.display import shown_bar
from serve_app.client.errors import AtelierClientError
from serve_app.client.options import GenerationOptions
from serve_app.client.records import FORMATS, format_of

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
RETRY_BUDGET_S = 3.0
"""Retries end after this time: at a terminal, an error soon is better than a long wait."""
TRIED_PROMPT, TRIED_STEPS = "purple mountains under a black sky with a yellow moon", 20
"""A LoRA that recommends no number of steps is tried with 20: a cheap picture tells enough."""
SHOWN_PROMPT = 60
"""A table shows this many characters of a prompt."""


def main(words: Sequence[str]) -> Never:
    """Carry out a command line, and exit."""
    parser = _parser()
    if not words:
        parser.print_help()
        sys.exit(BAD_USAGE)
    asked = parser.parse_args(words)
    try:
        with _client(asked) as client:
            try:
                facts, shown = asked.run(client, asked)
            except KeyboardInterrupt:
                sys.exit(_told(INTERRUPTED, f"interrupted{_canceled(client.interrupted)}"))
    except ValueError as error:  # such as a file that is too large
        sys.exit(_told(BAD_USAGE, re.sub(r"^(base_)?(url|key): ", r"--\2: ", str(error))))
    except (AtelierClientError, OSError) as error:
        sys.exit(_told(FAILED, str(error)))
    except KeyboardInterrupt:
        sys.exit(_told(INTERRUPTED, "interrupted"))
    result = json.dumps(facts, indent=2, ensure_ascii=False, default=datetime.isoformat) if asked.as_json else shown
    sys.stdout.write(f"{result}\n")
    sys.exit(0)


def _told(code: int, message: str) -> int:
    sys.stderr.write(f"atelier: {' '.join(message.split())}\n")
    return code


def _canceled(jobs: Iterable[Job]) -> str:
    """Say of each job that a call began whether it has stopped."""
    said = {True: "{} is {}", False: "the service was asked to cancel {}, which was {}"}
    return "".join(f"; {said[job.done].format(job.id, job.status)}" for job in jobs)


def _client(asked: Namespace) -> Client:
    """Raises `ValueError` before anything is drawn where the images could not be written afterwards."""
    if hasattr(asked, "out"):
        folder = _file(asked, "x").resolve().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"--out: cannot write in {folder}")
        _choose_format(asked)
    ready_file = Path(asked.data_dir, READY_FILE) if asked.data_dir else None
    interface: Any = getattr(asked, "interface", "a")
    return Client(asked.url, asked.key, interface=interface, retry_budget=RETRY_BUDGET_S, ready_file=ready_file)


def _choose_format(asked: Namespace) -> None:
    """Ask for the format that the name of the file says."""
    named = format_of(_file(asked, ""))
    if named and (named not in FORMATS or asked.output_format not in (None, named)):
        raise ValueError(
            f"--out: {asked.out} says {named}, and the images are {asked.output_format or 'png, jpeg or webp'}"
        )
    asked.output_format = asked.output_format or named or None


def _file(asked: Namespace, name: str) -> Path:
    """Return the file to write, which has this name unless the caller has named one."""
    return asked.out if asked.out is not None and not asked.out.is_dir() else (asked.out or Path()) / name


Result = tuple[Any, str]
"""What `--json` prints, and what a person reads."""


def _generate(client: Client, asked: Namespace) -> Result:
    loras = dict(_use_of(each, asked.weight) for each in asked.lora)
    known = GenerationOptions.__annotations__.keys() | {"image", "mask"}
    options = {name: value for name, value in vars(asked).items() if name in known}
    job = client.generate(asked.prompt, loras=loras, wait=False, **options)
    if job.unknown_words:
        _told(0, f"The base model has never read: {', '.join(job.unknown_words)}.")
    return _wait_and_save(job, asked, _drawing(job, ", ".join(loras)))


def _use_of(text: str, weight: float | None) -> tuple[str, float | None]:
    """Read `NAME=WEIGHT`, or a name alone, which may hold `=` too."""
    name, equals, own = text.rpartition("=")
    with suppress(ValueError):
        if equals and name:
            return name, float(own)
    return text, weight


def _upscale(client: Client, asked: Namespace) -> Result:
    job = client.upscale(asked.image, asked.factor, output_format=asked.output_format)
    return _wait_and_save(job, asked, f"Enlarging {asked.factor or 2}×")


def _try(client: Client, asked: Namespace) -> Result:
    found, prompt = client.loras.find(asked.lora), asked.prompt
    words = ", ".join((prompt, *(word for word in found.trigger_words if word.casefold() not in prompt.casefold())))
    steps = found.recommended_steps or TRIED_STEPS
    job = client.generate(
        words,
        lora_id=found.id,
        seed=asked.seed,
        steps=steps,
        lora_weight=asked.weight,
        output_format=asked.output_format,
    )
    return _wait_and_save(job, asked, _drawing(job, found.name))


def _drawing(job: Job, loras: str) -> str:
    """What a generation draws, for its progress bar: `Drawing 2 × 512², Neon`."""
    images, width, height = (job.request[name] for name in ("num_images", "width", "height"))
    size = f"{width}²" if width == height else f"{width}×{height}"
    return f"Drawing {images} × {size}{', ' if loras else ''}{loras}"


def _wait_and_save(job: Job, asked: Namespace, doing: str) -> Result:
    """`doing` labels the bar, which is on stderr: stdout holds only the result."""
    began = time.monotonic()
    with shown_bar(doing) as show:
        job.wait(asked.timeout, on_progress=show and (lambda percent: show(doing, percent / 100)))
    seconds = time.monotonic() - began
    files = [_numbered(_file(asked, f"{job.id}{each.suffix}"), n, len(job.images)) for n, each in enumerate(job.images)]
    for image, file in zip(job.images, files, strict=True):
        image.save(file)
    for file in files if asked.open else ():
        if not webbrowser.open(file.resolve().as_uri()):
            raise OSError(f"--open: this machine has no program that opens {file}")
    images = [
        {"image_id": image.image_id, "url": image.url, "width": image.width, "height": image.height, "file": str(file)}
        for image, file in zip(job.images, files, strict=True)
    ]
    shown = "\n".join(f"{image['file']}  {image['image_id']}" for image in images)
    return {"id": job.id, "seconds": round(seconds, 2), "images": images}, shown


def _numbered(wanted: Path, index: int, how_many: int) -> Path:
    return wanted if how_many == 1 else wanted.with_name(f"{wanted.stem}-{index + 1}{wanted.suffix}")


def _loras(client: Client, asked: Namespace) -> Result:
    found = client.loras.list(base_model=asked.base, q=asked.search)
    rows = [(lora.name, lora.id, lora.base_model, ", ".join(lora.trigger_words)) for lora in found]
    shown = _table(("NAME", "ID", "BASE MODEL", "TRIGGER WORDS"), rows) if rows else "No such LoRAs."
    return {"loras": [asdict(lora) for lora in found]}, shown


def _jobs(client: Client, asked: Namespace) -> Result:
    found = client.jobs(asked.limit)
    rows = [(job.id, job.status, f"{job.progress} %", _prompt(job)) for job in found]
    shown = _table(("ID", "STATUS", "PROGRESS", "PROMPT"), rows) if rows else "No jobs yet."
    return {"jobs": [_facts(job) for job in found]}, shown


def _prompt(job: Job) -> str:
    prompt = " ".join(str(job.request.get("prompt", "")).split())
    return prompt if len(prompt) <= SHOWN_PROMPT else f"{prompt[: SHOWN_PROMPT - 1]}…"


def _facts(job: Job) -> dict[str, Any]:
    names = ("id", "status", "progress", "error_code", "error", "request")
    images = [{"image_id": image.image_id, "url": image.url} for image in job.images]
    return {**{name: getattr(job, name) for name in names}, "images": images}


def _cancel(client: Client, asked: Namespace) -> Result:
    job = client.cancel(asked.job)
    words = {"canceled": "canceled", "running": "will stop at its next step"}
    return _facts(job), f"{job.id}: {words.get(job.status, f'already {job.status}')}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (columns, *rows))


class _Parser(ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> Never:
        missing = re.search(r"argument COMMAND: invalid choice: '(.*?)'", message)
        if missing:
            message = (
                f"only the Python SDK is installed, whose commands are {', '.join(COMMANDS)} and mcp, not {missing[1]}: "
                "for the service, `make setup` in a checkout, or `pip install '.[server]'` there"
            )
        sys.exit(_told(BAD_USAGE, message))


def _generate_options(command: ArgumentParser) -> None:
    add = command.add_argument
    add("prompt", help="What the image shows.")
    add("--lora", action="append", default=[], help="A LoRA's name or id, alone or as NAME=WEIGHT. At most four.")
    add("--weight", type=float, help="Strength of LoRAs that name none: -2 to 2.")
    add("--seed", type=int, help="The same seed gives the same image.")
    add("--steps", type=int, help="1 to 150; by default what the LoRA was made for.")
    add("--sampler", help="Such as euler or dpm++2m-karras.")
    add("--base-model", help="The base model; by default that of the LoRAs.")
    add("--image", help="What to begin from: a file, an address or an image's id.")
    add("--strength", type=float, help="How much of it is redrawn: 0.01 to 1.")
    add("--mask", help="As --image: white where it is redrawn.")
    add("--guidance", type=float, dest="guidance_scale", help="How closely the image follows the prompt: 1 to 20.")
    add("--guidance-start", type=float, help="The fraction of the steps at which guidance begins: 0 up to 1.")
    add("--guidance-end", type=float, help="The fraction of the steps at which it ends.")
    add("--width", type=int, help="Pixels; by default what the base model was made for.")
    add("--height", type=int, help="Pixels; by default what the base model was made for.")
    add("--num-images", type=int, help="1 to 8.")
    add("--negative-prompt", help="What to avoid.")
    add("--prompt-weights", **_FLAG, help="Read (red:1.5) and [green] in prompts as weights.")
    add("--embed-settings", **_FLAG, help="Write prompt and settings into the files, as A1111 does.")
    add("--interface", choices=("a", "b"), default="a", help="How the key is sent: a as a bearer key, b as X-API-Key.")


def _upscale_options(command: ArgumentParser) -> None:
    command.add_argument("image", help="An image of this account by its id, a file or an address.")
    command.add_argument("--factor", type=int, help="2 or 4; 2 by default.")


def _try_options(command: ArgumentParser) -> None:
    add = command.add_argument
    add("lora", help="Its name or id.")
    add("--prompt", default=TRIED_PROMPT, help="What the image shows; the LoRA's trigger words are appended.")
    add("--weight", type=float, help="Strength of the LoRA: -2 to 2.")
    add("--seed", type=int, default=1, help="The same seed gives the same image.")


def _loras_options(command: ArgumentParser) -> None:
    command.add_argument("--base", help="Only those of this base model.")
    command.add_argument("--search", help="Only those with this in name, description or trigger words.")


def _jobs_options(command: ArgumentParser) -> None:
    command.add_argument("--limit", type=int, default=20, help="Maximum number of jobs; 20 by default.")


def _cancel_options(command: ArgumentParser) -> None:
    command.add_argument("job", help="Its id.")


def _delivery_options(command: ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--out",
        type=Path,
        help="File or folder to write; several images get -1, -2, … By default named by the job's id, here.",
    )
    add("--format", choices=FORMATS, dest="output_format", help="The files; by default as --out is named, or png.")
    add("--open", action="store_true", help="Open the images with a program of this machine.")
    add("--timeout", type=float, default=600.0, help="Seconds to wait for the images; 600 by default.")


def _shared_options(command: ArgumentParser) -> None:
    add = command.add_argument
    add("--json", dest="as_json", action="store_true", help="Result in JSON.")
    add("--url", "--base-url", help=f"Address of the service; by default {URL_VARIABLES[0]} or the local one.")
    add("--key", help=f"An API key; by default {KEY_VARIABLE} or that of the local service.")
    add("--data-dir", help="Where the local service keeps its data; by default ATELIER_DATA_DIR or var.")


_FLAG: dict[str, Any] = {"action": "store_true", "default": None}


class Command(NamedTuple):
    """What a command is for, and how its options are read and carried out."""

    help: str
    run: Callable[[Client, Namespace], Result]
    options: Callable[[ArgumentParser], None]
    draws: bool = False
    is_shared: bool = False
    """Says whether operators have one of this name, which has no `--url` and `--key`."""


COMMANDS = {
    "generate": Command("Generate images from a prompt, with LoRAs or without.", _generate, _generate_options, draws=True),
    "upscale": Command("Enlarge an image.", _upscale, _upscale_options, draws=True),
    "loras try": Command("Draw one image with a LoRA and its trigger words.", _try, _try_options, draws=True),
    "loras list": Command("List the LoRAs that the account may use.", _loras, _loras_options, is_shared=True),
    "jobs list": Command("List the account's newest jobs.", _jobs, _jobs_options, is_shared=True),
    "jobs cancel": Command(
        "Cancel a job: immediately while it is queued, at its next step while it runs.",
        _cancel, _cancel_options, is_shared=True,
    ),
}  # fmt: skip


def is_of_account(words: Sequence[str]) -> bool:
    """Return whether a command line is for `main`, where the service's packages are installed too."""
    command = COMMANDS.get(words[0] if words and words[0] in COMMANDS else " ".join(words[:2]))
    given = {word.partition("=")[0] for word in words}
    return command is not None and (not command.is_shared or bool(given & {"--url", "--base-url", "--key"}))


def _parser() -> _Parser:
    parser = _Parser(prog="atelier", description="Atelier: text-to-image generation with many LoRA adapters.")
    parser.add_argument("--version", action="version", version=f"atelier {version('atelier')}")
    alone = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {
        name: alone.add_parser(name, help=words).add_subparsers(metavar="COMMAND", required=True)
        for name, words in (("loras", "List and try LoRAs."), ("jobs", "List and cancel jobs."))
    }
    for name, each in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        command = groups.get(group, alone).add_parser(own, help=each.help, description=each.help, allow_abbrev=False)
        command.set_defaults(run=each.run)
        each.options(command)
        if each.draws:
            _delivery_options(command)
        _shared_options(command)
    return parser
