"""`atelier keys`: the secrets that accounts send, each shown once."""

import shlex
from typing import Annotated

import typer

from serve_app.cli.accounts import AccountName, find_account
from serve_app.cli.command import Answer, operator, table
from serve_app.cli.ending import BadUsage, Failed
from serve_app.domain.accounts import ApiKey
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources

app = typer.Typer(no_args_is_help=True, help="API keys: made, listed, revoked. The key itself is shown once.")


@operator(app, "create")
async def create(
    resources: Resources,
    account: AccountName,
    interfaces: Annotated[str, typer.Option(help="a (bearer), b (X-API-Key), or a,b.")] = "a,b",
    name: Annotated[str, typer.Option(help="A word to know the key by.")] = "",
) -> Answer:
    """Make a key and print it, this once: only its hash is kept."""
    variants = _variants(interfaces)
    found = await find_account(resources, account)
    key, secret = await resources.accounts.create_key(found.id, name=name, interfaces=variants)
    return Answer(facts={"key": secret, **_facts(key)}, shown=secret)


@operator(app, "list")
async def list_keys(resources: Resources, account: AccountName) -> Answer:
    """An account's keys, revoked ones too."""
    found = await find_account(resources, account)
    keys = await resources.accounts.keys(found.id)
    rows = [_row(key) for key in keys]
    return Answer(
        facts={"account": found.id, "keys": [_facts(key) for key in keys]},
        shown=table(
            ("ID", "KEY", "NAME", "INTERFACES", "CREATED", "LAST USED", "STATE"),
            rows,
            empty=f"No keys yet: atelier keys create {shlex.quote(found.name)}",
        ),
    )


@operator(app, "revoke")
async def revoke(
    resources: Resources,
    key_id: Annotated[str, typer.Argument(help="The key's id, from `atelier keys list`.", show_default=False)],
) -> Answer:
    """Make a key worthless from its next use, everywhere."""
    if not await resources.accounts.revoke_key(key_id):
        raise Failed(f"no key {key_id!r} (see: atelier keys list ACCOUNT)")
    return Answer(facts={"id": key_id, "revoked": True}, shown=f"{key_id}: revoked")


def _variants(interfaces: str) -> frozenset[Variant]:
    names = {name.strip().lower() for name in interfaces.split(",")}
    if not names <= set(Variant):
        raise BadUsage(f"--interfaces: must be a, b or a,b, not {interfaces!r}")
    return frozenset(Variant(name) for name in names)


def _facts(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.id,
        "account": key.account_id,
        "name": key.name,
        "hint": key.hint,
        "interfaces": sorted(key.interfaces),
        "created_at": key.created_at.isoformat(),
        "last_used_at": key.last_used_at.isoformat() if key.last_used_at else None,
        "revoked": key.revoked,
    }


def _row(key: ApiKey) -> tuple[str, ...]:
    used = f"{key.last_used_at:%Y-%m-%d %H:%M}" if key.last_used_at else "never"
    state = "revoked" if key.revoked else "active"
    return key.id, key.hint, key.name, ",".join(sorted(key.interfaces)), f"{key.created_at:%Y-%m-%d %H:%M}", used, state
