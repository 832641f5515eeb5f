"""The demo account of a one-machine service: its keys, kept in the data directory, and its first image."""

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    """The demo account on the highest plans, with keys that work: those of the last start, and a new one for each that
    does not any more."""
    file = resources.settings.data_dir / READY_FILE
    kept = _read(file)
    account_id, password = await _account(resources, kept)
    keys = {name: await _working_key(resources, account_id, name, kept) for name in INTERFACES}
    demo = Demo(base_url=base_url, account=ACCOUNT, keys=keys, console_password=password)
    write_private(file, json.dumps({**demo.ready, "console_password": password}, indent=2) + "\n")
    return demo


async def _account(resources: Resources, kept: Demo | None) -> tuple[str, str]:
    """The account's id and its console password: the one that was kept, while there is such an account."""
    accounts = resources.accounts
    account, password = await accounts.account(ACCOUNT), secrets.token_urlsafe(9)
    if account is None:
        highest = {variant: _highest_plan(resources, variant).name for variant in Variant}
        account = await accounts.create_account(
            ACCOUNT, plan_a=highest[Variant.A], plan_b=highest[Variant.B], password=password
        )
    elif kept is not None:
        password = kept.console_password
    else:
        await accounts.set_password(account.id, password)
    return account.id, password


async def _working_key(resources: Resources, account_id: str, name: str, kept: Demo | None) -> str:
    """The kept key, unless the data it belonged to is gone, or it was revoked."""
    secret, interfaces = kept.keys.get(name, "") if kept else "", INTERFACES[name]
    gates = [await resources.accounts.gate(secret, variant, counted=False) for variant in interfaces]
    if all(gate.caller is not None and gate.caller.account_id == account_id for gate in gates):
        return secret
    return (await resources.accounts.create_key(account_id, name=f"demo {name}", interfaces=interfaces))[1]


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


def _highest_plan(resources: Resources, variant: Variant) -> Plan:
    plans = [plan for plan in resources.settings.plan_table.values() if plan.variant is variant]
    return max(plans, key=lambda plan: plan.limit / plan.window.total_seconds())
