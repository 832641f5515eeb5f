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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Never

from serve_app.client.access import KEY_VARIABLE, READY_FILE, URL_VARIABLES
from serve_app.client.clients import Client, Job
from serve_app.client.errors import AtelierClientError, WaitTimeout
from serve_app.client.options import GenerationOptions
from serve_app.client.records import FORMATS, format_of

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
RETRY_BUDGET_S = 3.0
"""Retries end after this time: at a terminal, an error soon is better than a long wait."""
TRIED_PROMPT, TRIED_STEPS = "purple mountains under a black sky with a yellow moon", 20
"""A LoRA that recommends no number of steps is tried with 20: a cheap picture tells enough."""


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
                sys.exit(_told(INTERRUPTED, "; ".join(["interrupted", *map(_canceled, client.interrupted)])))
    except ValueError as error:  # such as a file that is too large
        sys.exit(_told(BAD_USAGE, re.sub(r"^(base_)?(url|key): ", r"--\2: ", str(error))))
    except (AtelierClientError, OSError) as error:
        sys.exit(_told(FAILED, re.sub(r"Client\(…, interface='(.)'\)", r"--interface \1", str(error))))
    result = json.dumps(facts, indent=2, ensure_ascii=False, default=datetime.isoformat) if asked.as_json else shown
    sys.stdout.write(f"{result}\n")
    sys.exit(0)


def _told(code: int, message: str) -> int:
    sys.stderr.write(f"atelier: {' '.join(message.split())}\n")
    return code


def _canceled(job: Job) -> str:
    asked = f"the service was asked to cancel {job.id}, which was {job.status}"
    return f"{job.id} is {job.status}" if job.done else asked


def _client(asked: Namespace) -> Client:
    """Raises `ValueError` before anything is drawn where the images could not be written afterwards."""
    if "out" in asked:
        folder = _file(asked, "x").resolve().parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ValueError(f"--out: cannot write in {folder}")
        named, wanted = format_of(_file(asked, "")), asked.output_format
        if named and (named not in FORMATS or wanted not in (None, named)):
            raise ValueError(f"--out: {asked.out} says {named}, and the images are {wanted or 'png, jpeg or webp'}")
        asked.output_format = wanted or named or None
    ready_file = Path(asked.data_dir, READY_FILE) if asked.data_dir else None
    return Client(asked.url, asked.key, interface=asked.interface, retry_budget=RETRY_BUDGET_S, ready_file=ready_file)


def _file(asked: Namespace, name: str, ending: str = "") -> Path:
    """Return the file to write, which has this name unless the caller has named one."""
    out = Path(asked.out)
    file = out / name if out.is_dir() or asked.out.endswith(os.sep) else out
    return file.with_name(f"{file.stem}{ending}{file.suffix}") if ending else file


Result = tuple[Any, str]
"""What `--json` prints, and what a person reads."""


def _generate(client: Client, asked: Namespace) -> Result:
    loras = dict(_use_of(each, asked.weight) for each in asked.lora)
    known = GenerationOptions.__annotations__.keys() | {"image", "mask"}
    options = {name: value for name, value in vars(asked).items() if name in known}
    job = client.generate(asked.prompt, loras=loras, wait=False, **options)
    if job.unknown_words:
        _told(0, f"The base model has never read: {', '.join(job.unknown_words)}.")
    return _saved(client, job, asked, f"Drawing {asked.prompt}")


def _use_of(text: str, weight: float | None) -> tuple[str, float | None]:
    """Read `NAME=WEIGHT`, or a name alone, which may hold `=` too."""
    name, equals, own = text.rpartition("=")
    with suppress(ValueError):
        if equals and name:
            return name, float(own)
    return text, weight


def _upscale(client: Client, asked: Namespace) -> Result:
    job = client.upscale(asked.image, asked.factor, output_format=asked.output_format)
    return _saved(client, job, asked, f"Enlarging {asked.factor or 2}×")


def _try(client: Client, asked: Namespace) -> Result:
    lora, prompt = client.loras.find(asked.lora), asked.prompt
    words = ", ".join((prompt, *(word for word in lora.trigger_words if word.casefold() not in prompt.casefold())))
    options = {"seed": asked.seed, "lora_weight": asked.weight, "output_format": asked.output_format}
    job = client.generate(words, lora_id=lora.id, steps=lora.recommended_steps or TRIED_STEPS, **options)
    return _saved(client, job, asked, f"Drawing with {lora.name}")


def _saved(client: Client, job: Job, asked: Namespace, doing: str) -> Result:
    """Wait for the images, with a bar on stderr that `doing` labels, and write them."""
    began = time.monotonic()
    try:
        client.execute(client.ended(job, doing, progress=True, timeout=asked.timeout))
    except WaitTimeout as over:
        raise WaitTimeout(f"{over}: `atelier jobs cancel {job.id} --url {client.service.base_url}` stops it") from None
    facts: dict[str, Any] = {**_facts(job), "seconds": round(time.monotonic() - began, 2)}
    written: list[dict[str, Any]] = facts["images"]
    for index, (image, fact) in enumerate(zip(job.images, written, strict=True), 1):
        ending = f"-{index}" if len(job.images) > 1 else ""
        fact["file"] = str(image.save(_file(asked, f"{job.id}{image.suffix}", ending)))
    if asked.open and not all(webbrowser.open(Path(fact["file"]).resolve().as_uri()) for fact in written):
        _told(0, "--open: this machine has no program that opens the images")
    return facts, "\n".join(f"{fact['file']}  {fact['image_id']}" for fact in written)


def _loras(client: Client, asked: Namespace) -> Result:
    found = client.loras.list(base_model=asked.base, q=asked.search)
    rows = [(lora.name, lora.id, lora.base_model, ", ".join(lora.trigger_words)) for lora in found]
    shown = _table(("NAME", "ID", "BASE MODEL", "TRIGGER WORDS"), rows) if rows else "No such LoRAs."
    return {"loras": [asdict(lora) for lora in found]}, shown


def _jobs(client: Client, asked: Namespace) -> Result:
    if asked.limit < 1:
        raise ValueError("--limit: must be at least 1")
    found = client.jobs(asked.limit)
    prompts = [" ".join(str(job.request.get("prompt", "")).split()) for job in found]
    rows = [(job.id, job.status, f"{job.progress} %", said[:60]) for job, said in zip(found, prompts, strict=True)]
    shown = _table(("ID", "STATUS", "PROGRESS", "PROMPT"), rows) if rows else "No jobs yet."
    return {"jobs": [_facts(job) for job in found]}, shown


def _cancel(client: Client, asked: Namespace) -> Result:
    job = client.cancel(asked.job)
    words = {"canceled": "canceled", "running": "will stop at its next step"}
    return _facts(job), f"{job.id}: {words.get(job.status, f'already {job.status}')}"


def _facts(job: Job) -> dict[str, Any]:
    names = ("id", "status", "progress", "error_code", "error", "request")
    images = [{name: getattr(image, name) for name in ("image_id", "url", "width", "height")} for image in job.images]
    return {**{name: getattr(job, name) for name in names}, "images": images}


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


def option(*names: str, **how: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What argparse's `add_argument` takes."""
    return names, how


FLAG: dict[str, Any] = {"action": "store_const", "const": True}
PROMPTED = (
    option("prompt", help="What the image shows."),
    option("--lora", action="append", default=[], help="A LoRA's name or id, alone or as NAME=WEIGHT. At most four."),
    option("--weight", type=float, help="Strength of LoRAs that name none: -2 to 2."),
    option("--seed", type=int, help="The same seed gives the same image."),
    option("--steps", type=int, help="1 to 150; by default what the LoRA was made for."),
    option("--sampler", help="Such as euler or dpm++2m-karras."),
    option("--base-model", help="One that the LoRAs can be drawn on; by default their own."),
    option("--image", help="What to begin from: a file, an address or an image's id."),
    option("--strength", type=float, help="How much of it is redrawn: 0.01 to 1."),
    option("--mask", help="As --image: white where it is redrawn."),
    option("--guidance", type=float, dest="guidance_scale", help="How closely the image follows the prompt: 1 to 20."),
    option("--guidance-start", type=float, help="The fraction of the steps at which guidance begins: 0 up to 1."),
    option("--guidance-end", type=float, help="The fraction of the steps at which it ends."),
    option("--width", type=int, help="Pixels; by default what the base model was made for."),
    option("--height", type=int, help="Pixels; by default what the base model was made for."),
    option("--num-images", type=int, help="1 to 8."),
    option("--negative-prompt", help="What to avoid."),
    option("--prompt-weights", **FLAG, help="Read (red:1.5) and [green] in prompts as weights."),
    option("--embed-settings", **FLAG, help="Write prompt and settings into the files, as A1111 does."),
)
ENLARGED = (
    option("image", help="An image of this account by its id, a file or an address."),
    option("--factor", type=int, help="2 or 4; 2 by default."),
)
TRIED = (
    option("lora", help="Its name or id."),
    option("--prompt", default=TRIED_PROMPT, help="What the image shows; the LoRA's trigger words are appended."),
    option("--weight", type=float, help="Strength of the LoRA: -2 to 2."),
    option("--seed", type=int, default=1, help="The same seed gives the same image."),
)
DELIVERED = (
    option("--out", default="", help="File or folder to write; several images get -1, -2, … By default the job's id."),
    option("--format", choices=FORMATS, dest="output_format", help="The files; by default as --out is named, or png."),
    option("--open", action="store_true", help="Open the images with a program of this machine."),
    option("--timeout", type=float, default=600.0, help="Seconds to wait for the images; 600 by default."),
)
LISTED = (
    option("--base", help="Only those of this base model."),
    option("--search", help="Only those with this in name, description or trigger words."),
)
LIMITED = (option("--limit", type=int, default=20, help="Maximum number of jobs; 20 by default."),)
SHARED = (
    option("--json", dest="as_json", action="store_true", help="Result in JSON."),
    option("--url", "--base-url", help=f"Address of the service; by default {URL_VARIABLES[0]} or the local one."),
    option("--key", help=f"An API key; by default {KEY_VARIABLE} or that of the local service."),
    option("--interface", choices=("a", "b"), default="a", help="Send the key as a bearer key or as X-API-Key."),
    option("--data-dir", help="Where the local service keeps its data; by default ATELIER_DATA_DIR or var."),
)

COMMANDS = {
    "generate": ("Generate images from a prompt, with LoRAs or without.", _generate, PROMPTED + DELIVERED),
    "upscale": ("Enlarge an image.", _upscale, ENLARGED + DELIVERED),
    "loras try": ("Draw one image with a LoRA and its trigger words.", _try, TRIED + DELIVERED),
    "loras list": ("List the LoRAs that the account may use.", _loras, LISTED),
    "jobs list": ("List the account's newest jobs.", _jobs, LIMITED),
    "jobs cancel": ("Cancel a job: at its next step while it runs.", _cancel, (option("job", help="Its id."),)),
}
"""What each is for, what carries it out, and its options beside those that all share."""
OPERATORS = ("loras list", "jobs list", "jobs cancel")
"""An operator's are called so too, where the service's packages are installed, and have no `--url` and `--key`."""


def is_of_account(words: Sequence[str]) -> bool:
    """Return whether a command line is for `main`, where the service's packages are installed too."""
    name = words[0] if words and words[0] in COMMANDS else " ".join(words[:2])
    given = {word.partition("=")[0] for word in words}
    return name in COMMANDS and (name not in OPERATORS or bool(given & {"--url", "--base-url", "--key"}))


def _parser() -> _Parser:
    parser = _Parser(prog="atelier", description="Atelier: text-to-image generation with many LoRA adapters.")
    parser.add_argument("--version", action="version", version=f"atelier {version('atelier')}")
    groups = {"": parser.add_subparsers(metavar="COMMAND", required=True)}
    for name, words in (("loras", "List and try LoRAs."), ("jobs", "List and cancel jobs.")):
        groups[name] = groups[""].add_parser(name, help=words).add_subparsers(metavar="COMMAND", required=True)
    groups[""].add_parser("mcp", help="Serve an assistant by the Model Context Protocol; takes no options.")
    for name, (words, run, options) in COMMANDS.items():
        group, _, own = name.rpartition(" ")
        command = groups[group].add_parser(own, help=words, description=words, allow_abbrev=False)
        command.set_defaults(run=run)
        for names, how in (*options, *SHARED):
            command.add_argument(*names, **how)
    return parser
