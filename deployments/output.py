"""What `atelier up` prints: stages, addresses, keys and examples, or one line of JSON."""

import json
import shlex
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn

from deployments.demo import EXAMPLE_PROMPT, Demo
from serve_app.client.access import READY_FILE

NAME_WIDTH = 36


class Stages:
    """The stages of a start: each is one line with its seconds when it ends, and on a terminal also while it runs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._running: dict[str, tuple[TaskID, float]] = {}

    def begin(self, name: str) -> None:
        self._running[name] = self._progress.add_task(name, total=None), time.monotonic()

    def update(self, name: str, progress: str) -> None:
        self._progress.update(self._running[name][0], description=f"{name}: {progress}")

    def end(self, name: str, note: str = "") -> None:
        task, began = self._running.pop(name)
        self._progress.remove_task(task)
        self._progress.console.print(f"  {name:<{NAME_WIDTH}}{time.monotonic() - began:6.1f} s  {note}".rstrip())

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """A stage that ends with the block, unless an exception leaves it."""
        self.begin(name)
        yield
        self.end(name)


@dataclass(frozen=True, slots=True)
class Reporter:
    """Prints for a person, or with `as_json` only the ready line for a program; errors go to stderr."""

    as_json: bool = False

    def info(self, text: str) -> None:
        if not self.as_json:
            print(text, flush=True)

    def error(self, reason: str) -> None:
        print(f"atelier: {reason}", file=sys.stderr, flush=True)

    def stopping(self) -> None:
        """Say so after a signal, and show the cursor, which a killed process may have hidden."""
        if not self.as_json:
            Console().show_cursor()
        self.info("Stopping ...")

    @contextmanager
    def stages(self) -> Generator[Stages]:
        console = Console(quiet=self.as_json, highlight=False, markup=False, soft_wrap=True)
        columns = (SpinnerColumn(), TextColumn(f"{{task.description:<{NAME_WIDTH}}}{{task.elapsed:5.0f}} s"))
        progress = Progress(*columns, console=console, transient=True)
        with progress if console.is_terminal else nullcontext():  # a file would get an empty line at its end
            yield Stages(progress)

    def ready(self, demo: Demo) -> None:
        """Print the ready line for a program: requests are accepted from now on."""
        if self.as_json:
            print(json.dumps(demo.ready), flush=True)

    def welcome(self, demo: Demo, lora_id: str | None, *, data_dir: Path, logs: Path) -> None:
        """Print what a person needs next: addresses, keys, example requests, where things are."""
        self.info(f"""
Atelier is ready.

  Base address   {demo.base_url}
  Key for A      {demo.keys["a"]}   (Authorization: Bearer)
  Key for B      {demo.keys["b"]}   (X-API-Key)
  Console        {demo.sign_in_url}   (signs you in, once)
                 {demo.console_url}   (account {demo.account}, password {demo.console_password})
  Operators      {demo.base_url}/operators   (an operator is made by: atelier operators create NAME)
  Guide          {demo.base_url}/guide/
  Reference      {demo.base_url}/docs/a   {demo.base_url}/docs/b   {demo.base_url}/docs/jobs
  Data           {data_dir}   (keys in {READY_FILE}, readable by you only)
  Logs           {logs}

{_examples(demo, lora_id) if lora_id else "The catalog holds no LoRA yet: add one, then generate."}

Ctrl-C stops everything.
""")


def _examples(demo: Demo, lora_id: str) -> str:
    """Two curl lines for each interface: one to generate, one to poll."""
    a = {"prompt": EXAMPLE_PROMPT, "lora_id": lora_id, "seed": 7}
    b = {"positive_prompt": EXAMPLE_PROMPT, "model_id": lora_id, "seed": 0}
    bearer, api_key = f"Authorization: Bearer {demo.keys['a']}", f"X-API-Key: {demo.keys['b']}"
    return f"""Interface A: generate, then poll with the request_id of the answer until it holds the image's address:
{_post(demo, bearer, a)}
curl -s {demo.base_url}/v1/generate/REQUEST_ID -H '{bearer}'

Interface B: generate, then poll with the run_id of the answer:
{_post(demo, api_key, b)}
curl -s {demo.base_url}/v1/generations/RUN_ID -H '{api_key}'"""


def _post(demo: Demo, credential: str, body: dict[str, str | int]) -> str:
    generate = f"curl -s {demo.base_url}/v1/generate -H 'Content-Type: application/json'"
    return f"{generate} -H '{credential}' -d {shlex.quote(json.dumps(body))}"
