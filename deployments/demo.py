"""The demo account of a one-machine service: its keys in the data directory, its first image."""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.api.parts import AccountParts
from serve_app.atomic_files import write_atomically
from serve_app.cli.accounts import this_operator
from serve_app.client import Client
from serve_app.client.access import READY_FILE
from serve_app.domain.accounts import Plan
from serve_app.domain.audit import Act
from serve_app.domain.requests import Variant
from serve_app.settings import Settings

ACCOUNT = "demo"
INTERFACES = {"a": frozenset({Variant.A}), "b": frozenset({Variant.B}), "both": frozenset(Variant)}
EXAMPLE_PROMPT = "purple mountains under a black sky with a yellow moon"
"""This prompt looks good with the catalog's first LoRA at 512 × 512."""
FIRST_IMAGE_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """Holds the demo account's access, which is kept in a 0600 file; elsewhere a key is shown only once."""

    base_url: str
    account: str
    keys: dict[str, str]
    console_password: str
    sign_in_url: str = ""
    """This address signs in to the console once, and is not kept."""

    @property
    def console_url(self) -> str:
        return f"{self.base_url}/console"

    @property
    def ready(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "console_url": self.console_url, "account": self.account, "keys": self.keys}


async def demo_account(settings: Settings, accounts: AccountParts, base_url: str) -> Demo:
    """Return the demo account with the last start's keys; one that no longer works is replaced."""
    file = settings.data_dir / READY_FILE
    stored = _read(file)
    account_id, password = await _account(settings, accounts, stored)
    keys = {name: await _working_key(accounts, account_id, name, stored) for name in INTERFACES}
    token = await accounts.links.create(account_id, LinkPurpose.SIGN_IN)
    demo = Demo(
        base_url=base_url,
        account=ACCOUNT,
        keys=keys,
        console_password=password,
        sign_in_url=f"{base_url}/console/links/{token}",
    )
    text = json.dumps({**demo.ready, "console_password": password}, indent=2) + "\n"
    write_atomically(file, text)
    return demo


async def _account(settings: Settings, accounts: AccountParts, stored: Demo | None) -> tuple[str, str]:
    """The account's id and its console password: the stored one, while the account exists."""
    account, password = await accounts.store.get(ACCOUNT), secrets.token_urlsafe(9)
    if account is None:
        highest = {variant: _highest_plan(settings, variant).name for variant in Variant}
        account = await accounts.store.create(
            ACCOUNT, plan_a=highest[Variant.A], plan_b=highest[Variant.B], password=password
        )
        await accounts.audit.record(account.id, Act.ACCOUNT_CREATED, this_operator())
    elif stored is not None:
        password = stored.console_password
    else:
        await accounts.store.set_password(account.id, password)
        await accounts.audit.record(account.id, Act.PASSWORD_SET, this_operator())
    return account.id, password


async def _working_key(accounts: AccountParts, account_id: str, name: str, stored: Demo | None) -> str:
    """The stored key, unless it was revoked or its data is gone."""
    secret, interfaces = stored.keys.get(name, "") if stored else "", INTERFACES[name]
    results = [await accounts.auth.authenticate(secret, variant, counted=False) for variant in interfaces]
    if all(auth.caller is not None and auth.caller.account_id == account_id for auth in results):
        return secret
    key, made = await accounts.api_keys.create(account_id, name=f"demo {name}", interfaces=interfaces)
    await accounts.audit.record(account_id, Act.KEY_CREATED, this_operator(), key.id)
    return made


def first_image(demo: Demo, lora_id: str, path: Path, on_progress: Callable[[int], None]) -> None:
    """Draw one image into `path` through the HTTP interface. Raises `AtelierClientError`."""
    with Client(demo.base_url, demo.keys["a"]) as client:
        job = client.generate(EXAMPLE_PROMPT, lora_id=lora_id, steps=20, seed=1)
        write_atomically(path, job.wait(FIRST_IMAGE_LIMIT_S, on_progress).images[0].download())


def _read(file: Path) -> Demo | None:
    try:
        stored = json.loads(file.read_text())
        return Demo(**{name: stored[name] for name in Demo.__slots__ if name != "sign_in_url"})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _highest_plan(settings: Settings, variant: Variant) -> Plan:
    plans = [plan for plan in settings.plan_table.values() if plan.variant is variant]
    return max(plans, key=lambda plan: plan.limit / plan.window.total_seconds())
