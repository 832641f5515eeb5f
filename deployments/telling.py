"""What `atelier up` tells: a person how it goes, a program one line of JSON when it is ready; both what went wrong."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deployments.demo import Demo
from serve_app.cli.local import READY_FILE


@dataclass(frozen=True, slots=True)
class Teller:
    """Stdout is the person's, or with `as_json` the program's; complaints go to stderr."""

    as_json: bool = False

    def say(self, text: str) -> None:
        if not self.as_json:
            print(text, flush=True)

    def complain(self, reason: str) -> None:
        print(f"atelier: {reason}", file=sys.stderr, flush=True)

    def drawing(self) -> Callable[[int], None]:
        """Told the progress of the first image: a line that counts on a terminal, else one that stands."""
        if not self.as_json and sys.stdout.isatty():
            return lambda progress: print(f"\rDrawing a first image ... {progress:3d} %", end="", flush=True)
        self.say("Drawing a first image ...")
        return lambda progress: None

    def ready(self, demo: Demo) -> None:
        """Requests are accepted from now on."""
        if self.as_json:
            print(json.dumps(demo.ready), flush=True)

    def welcome(self, demo: Demo, lora_id: str | None, *, data_dir: Path, logs: Path) -> None:
        self.say(f"""
Atelier is ready.

  Base address   {demo.base_url}
  Key for A      {demo.keys["a"]}   (Authorization: Bearer)
  Key for B      {demo.keys["b"]}   (X-API-Key)
  Console        {demo.console_url}   (account {demo.account}, password {demo.console_password})
  Documentation  {demo.base_url}/docs/a   {demo.base_url}/docs/b
  Data           {data_dir}   (keys in {READY_FILE}, readable by you only)
  Logs           {logs}

{_examples(demo, lora_id) if lora_id else "The catalog holds no LoRA yet: add one, then generate."}

Ctrl-C stops everything.
""")


def _examples(demo: Demo, lora_id: str) -> str:
    """A line for each interface that works when pasted."""
    generate = f"curl -s {demo.base_url}/v1/generate -H 'Content-Type: application/json'"
    a = {"prompt": "a red circle", "lora_id": lora_id}
    b = {"positive_prompt": "a red circle", "model_id": lora_id}
    return f"""Interface A, then poll {demo.base_url}/v1/generate/REQUEST_ID with the same key:
{generate} -H 'Authorization: Bearer {demo.keys["a"]}' -d '{json.dumps(a)}'

Interface B, then poll {demo.base_url}/v1/generations/RUN_ID with the same key:
{generate} -H 'X-API-Key: {demo.keys["b"]}' -d '{json.dumps(b)}'"""
