"""The demo account of a one-machine service: its keys, kept in the data directory, and its first image."""

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from serve_app.cli.local import READY_FILE
from serve_app.domain.accounts import Plan
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources

ACCOUNT = "demo"
INTERFACES = {"a": frozenset({Variant.A}), "b": frozenset({Variant.B}), "both": frozenset(Variant)}
PROMPT = "a red circle above a blue square"
FIRST_IMAGE_LIMIT_S = 300.0
POLL_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What the data directory's 0600 file holds. Only a one-machine service keeps secrets: elsewhere a key is shown once."""

    base_url: str
    account: str
    keys: dict[str, str]
    console_password: str

    @property
    def console_url(self) -> str:
        return f"{self.base_url}/console"

    @property
    def ready(self) -> dict[str, Any]:
        """What a ready file says."""
        return {
            "base_url": self.base_url,
            "console_url": self.console_url,
            "account": self.account,
            "keys": self.keys,
        }


async def demo_account(resources: Resources, base_url: str) -> Demo:
    """The demo account on the highest plans, with keys that work: those of the last start where they still do."""
    file = resources.settings.data_dir / READY_FILE
    kept = _read(file)
    if kept is not None and await _all_work(kept, resources):
        demo = replace(kept, base_url=base_url)
    else:
        demo = await _new_demo(resources, base_url)
    write_private(file, json.dumps({**demo.ready, "console_password": demo.console_password}, indent=2) + "\n")
    return demo


async def _new_demo(resources: Resources, base_url: str) -> Demo:
    accounts = resources.accounts
    password = secrets.token_urlsafe(9)
    account = await accounts.account(ACCOUNT)
    if account is None:
        highest = {variant: _highest_plan(resources, variant).name for variant in Variant}
        account = await accounts.create_account(
            ACCOUNT, plan_a=highest[Variant.A], plan_b=highest[Variant.B], password=password
        )
    else:
        await accounts.set_password(account.id, password)
    keys: dict[str, str] = {}
    for name, interfaces in INTERFACES.items():
        _, keys[name] = await accounts.create_key(account.id, name=f"demo {name}", interfaces=interfaces)
    return Demo(base_url=base_url, account=account.name, keys=keys, console_password=password)


def write_private(path: Path, text: str) -> None:
    """Write a 0600 file whole: readers see the old text or the new, never half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def first_image(demo: Demo, lora_id: str, path: Path, report: Callable[[int], None]) -> bool:
    """Draw one image into `path` through the HTTP interface, as a caller would; False when its job failed."""
    headers = {"Authorization": f"Bearer {demo.keys['a']}"}
    with httpx.Client(base_url=demo.base_url, headers=headers, timeout=30) as client:
        body = {"prompt": PROMPT, "lora_id": lora_id, "steps": 20, "seed": 7}
        accepted = client.post("/v1/generate", json=body).raise_for_status().json()
        record = _poll(client, accepted["request_id"], report)
        if record["status"] != "completed":
            return False
        png = client.get(record["images"][0]["url"]).raise_for_status().content
    Image.open(BytesIO(png)).verify()
    path.write_bytes(png)
    return True


def _poll(client: httpx.Client, request_id: str, report: Callable[[int], None]) -> dict[str, Any]:
    deadline = time.monotonic() + FIRST_IMAGE_LIMIT_S
    while True:
        record = client.get(f"/v1/generate/{request_id}").raise_for_status().json()
        if record["status"] != "processing" or time.monotonic() > deadline:
            return record
        report(record["progress"])
        time.sleep(POLL_S)


def _read(file: Path) -> Demo | None:
    try:
        kept = json.loads(file.read_text())
        return Demo(**{name: kept[name] for name in Demo.__slots__})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


async def _all_work(demo: Demo, resources: Resources) -> bool:
    """False when the data the keys belonged to is gone, or a key was revoked."""
    for name, interfaces in INTERFACES.items():
        for variant in interfaces:
            gate = await resources.accounts.gate(demo.keys.get(name, ""), variant, counted=False)
            if gate.caller is None:
                return False
    return True


def _highest_plan(resources: Resources, variant: Variant) -> Plan:
    plans = [plan for plan in resources.settings.plan_table.values() if plan.variant is variant]
    return max(plans, key=lambda plan: plan.limit / plan.window.total_seconds())
