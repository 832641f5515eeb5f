"""`atelier keys` creates, lists, changes, rolls and revokes API keys. A key itself is shown once."""

import shlex
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from serve_app.api.parts import AccountParts, LoraParts
from serve_app.cli.accounts import AccountName, find_account, this_operator
from serve_app.cli.command import BadUsage, Failed, Result, command, listing
from serve_app.cli.loras import find_adapter
from serve_app.domain.accounts import ALL_SCOPES, ApiKey, Scope
from serve_app.domain.audit import Act
from serve_app.domain.durations import parse_duration
from serve_app.domain.errors import NotFound
from serve_app.domain.requests import Variant
from serve_app.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Create, list, roll and revoke API keys. The key itself is shown once.")

KeyId = Annotated[str, typer.Argument(help="The key's id, from `atelier keys list`.", show_default=False)]


@command(app, "create")
async def create(
    settings: Settings,
    accounts: AccountParts,
    loras: LoraParts,
    account: AccountName,
    interfaces: Annotated[str, typer.Option(help="a (bearer), b (X-API-Key), or a,b.")] = "a,b",
    name: Annotated[str, typer.Option(help="A name for the key.")] = "",
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lifetime: 30d, 12h, 45m, 90s. [never]")
    ] = None,
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What the key may do: read, generate, loras. May be repeated. [all]")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A LoRA that the key may use, by id or name. May be repeated. [all]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Requests per window of the account's plan. [the plan's limit]")
    ] = None,
) -> Result:
    """Create a key and print it once: only its hash is stored."""
    variants = _variants(interfaces)
    life = None if expires_in is None else _duration("--expires-in", expires_in)
    if life == timedelta():
        raise BadUsage("--expires-in: must be longer than zero")
    plans = None if limit is None else settings.plan_table
    found = await find_account(accounts.store, account, plans=plans)
    adapters = frozenset([(await find_adapter(loras.catalog, each)).id for each in lora]) if lora else None
    key, secret = await accounts.api_keys.create(
        found.id,
        name=name,
        interfaces=variants,
        expires_in=life,
        scopes=frozenset(scope) if scope else ALL_SCOPES,
        adapters=adapters,
        limit=limit,
    )
    await accounts.audit.record(found.id, Act.KEY_CREATED, this_operator(), key.id)
    return Result(facts={"key": secret, **_facts(key)}, shown=secret)


@command(app, "list")
async def list_keys(accounts: AccountParts, account: AccountName) -> Result:
    """List an account's keys, including revoked and expired ones."""
    found = await find_account(accounts.store, account)
    keys = await accounts.api_keys.list(found.id)
    columns = ("ID", "KEY", "NAME", "INTERFACES", "MAY", "LIMIT", "CREATED", "LAST USED", "EXPIRES", "STATE")
    empty = f"No keys yet: atelier keys create {shlex.quote(found.name)}"
    return listing("keys", keys, _facts, columns, _row, empty=empty, account=found.id)


@command(app, "edit")
async def edit(
    settings: Settings,
    accounts: AccountParts,
    key_id: KeyId,
    limit: Annotated[
        int, typer.Option(min=0, help="Requests per window of the account's plan; 0 for the plan's limit.")
    ],
) -> Result:
    """Change a key's limit, effective from its next use."""
    if limit and (account_id := await accounts.api_keys.account_of(key_id)):
        await find_account(accounts.store, account_id, plans=settings.plan_table)
    try:
        key = await accounts.api_keys.set_limit(key_id, limit or None)
    except NotFound as error:
        raise Failed(f"{error.message} (see: atelier keys list ACCOUNT)") from None
    await accounts.audit.record(key.account_id, Act.KEY_CHANGED, this_operator(), key.id)
    return Result(facts=_facts(key), shown=f"{key.id}: {_limit(key)}")


@command(app, "roll")
async def roll(
    accounts: AccountParts,
    key_id: KeyId,
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long the old key stays valid: 7d, 1h, 0s.")] = "1h",
) -> Result:
    """Replace a key with a new one and print it once.

    The new key has the same name, interfaces, scopes, LoRAs, limit and lifetime.
    """
    try:
        key, secret = await accounts.api_keys.roll(key_id, grace=_duration("--grace", grace))
    except NotFound as error:
        raise Failed(f"{error.message} (see: atelier keys list ACCOUNT)") from None
    await accounts.audit.record(key.account_id, Act.KEY_ROLLED, this_operator(), f"{key_id} {key.id}")
    return Result(facts={"key": secret, "replaces": key_id, **_facts(key)}, shown=secret)


@command(app, "revoke")
async def revoke(accounts: AccountParts, key_id: KeyId) -> Result:
    """Revoke a key, effective from its next use."""
    if not await accounts.api_keys.revoke(key_id):
        raise Failed(f"no key {key_id!r} (see: atelier keys list ACCOUNT)")
    account_id = await accounts.api_keys.account_of(key_id)
    await accounts.audit.record(account_id or "", Act.KEY_REVOKED, this_operator(), key_id)
    return Result(facts={"id": key_id, "revoked": True}, shown=f"{key_id}: revoked")


def _variants(interfaces: str) -> frozenset[Variant]:
    names = {name.strip().lower() for name in interfaces.split(",")}
    if not names <= set(Variant):
        raise BadUsage(f"--interfaces: must be a, b or a,b, not {interfaces!r}")
    return frozenset(Variant(name) for name in names)


def _duration(option: str, text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError as wrong:
        raise BadUsage(f"{option}: {wrong}") from None


def _facts(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.id,
        "account": key.account_id,
        "name": key.name,
        "hint": key.hint,
        "interfaces": key.interfaces,
        "scopes": key.scopes,
        "loras": key.adapters,
        "limit": key.limit,
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "expires_at": key.expires_at,
        "revoked": key.revoked,
        "state": key.state(datetime.now(UTC)),
    }


def _row(key: ApiKey) -> tuple[str, ...]:
    interfaces, state = ",".join(sorted(key.interfaces)), key.state(datetime.now(UTC))
    times = (_minute(key.created_at), _minute(key.last_used_at), _minute(key.expires_at))
    return key.id, key.hint, key.name, interfaces, _may(key), _limit(key), *times, state


def _may(key: ApiKey) -> str:
    scopes = "all" if key.scopes == ALL_SCOPES else ",".join(sorted(key.scopes))
    if key.adapters is None:
        return scopes
    return f"{scopes}, {len(key.adapters)} LoRA{'' if len(key.adapters) == 1 else 's'}"


def _limit(key: ApiKey) -> str:
    return "the plan's" if key.limit is None else f"{key.limit} a window"


def _minute(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M}" if time else "never"
