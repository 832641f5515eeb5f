"""`atelier loras` adds, lists, shows and removes adapters, and grants or revokes their use."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.status import Status

from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.cli.accounts import AccountName, find_account, this_operator
from serve_app.cli.command import BadUsage, Failed, Result, command, listing, table
from serve_app.domain.audit import Act
from serve_app.domain.catalog import Adapter, Offer, bases_of_loras
from serve_app.domain.errors import InvalidParameter, PayloadTooLarge
from serve_app.engine_options import DEFAULT_MAX_RANK, MAX_RANK
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.registration import remove_lora
from serve_app.loras.sources import LoraSources
from serve_app.operations.reports import OperatorReader
from serve_app.settings import Settings
from serve_app.store.storage import DiskReserve

app = typer.Typer(no_args_is_help=True, help="Add, list, show and remove LoRA adapters, grant and revoke their use.")

Lora = Annotated[str, typer.Argument(metavar="LORA", help="The adapter's id or name.", show_default=False)]


@command(app, "add")
async def add(
    settings: Settings,
    accounts: AccountParts,
    loras: LoraParts,
    jobs: JobParts,
    operations: OperationParts,
    file: Annotated[
        str,
        typer.Argument(help="A safetensors file, a folder of PEFT, or the address of one below ATELIER_LORA_SOURCES."),
    ],
    base: Annotated[str, typer.Option(help="The base model it was trained for, as the catalog file calls it.")],
    name: Annotated[str | None, typer.Option(help="Defaults to the name of the file.")] = None,
    description: Annotated[str, typer.Option(help="A short description of its style.")] = "",
    trigger_words: Annotated[str, typer.Option(help="Comma-separated words that activate it in a prompt.")] = "",
    account: Annotated[str | None, typer.Option(help="The account that owns it.")] = None,
    everyone: Annotated[bool, typer.Option("--everyone", help="Offer it to all accounts.")] = False,
    max_rank: Annotated[
        int, typer.Option(min=1, max=MAX_RANK, help="The highest rank allowed, as in the generators' Serve YAML.")
    ] = DEFAULT_MAX_RANK,
) -> Result:
    """Check an adapter, store it and make it available at once.

    Without --account or --everyone, grant access separately.
    """
    if account is not None and everyone:
        raise BadUsage("loras add: give --account or --everyone, not both")
    owner = "" if account is None else (await find_account(accounts.store, account, plans=settings.plan_table)).id
    words = tuple(word.strip() for word in trigger_words.split(",") if word.strip())
    offer = Offer(name=name or Path(file).stem, description=description, base_model=base, trigger_words=words)
    registration = replace(loras.registration, max_rank=max_rank)
    offered_to = None if everyone else frozenset[str]()
    try:
        async with _local(settings, jobs.space.disk, file) as path:
            with _doing(f"Checking {offer.name}"):
                adapter = (await registration.register(path, offer, owner=owner, accounts=offered_to)).adapter
    except (InvalidParameter, PayloadTooLarge) as error:
        raise Failed(error.message) from None
    if owner:
        await accounts.audit.record(owner, Act.LORA_GRANTED, this_operator(), adapter.id)
    lines = [f"{adapter.name} ({adapter.id}): {adapter.found['summary']}"]
    if suggested := adapter.found.get("suggested_trigger_words"):
        lines.append(f"Trigger words by its file: {', '.join(suggested)}")
    if warning := await operations.state.base_warning(adapter.base_model):
        lines.append(warning)
    lines.append(f"Try it: atelier loras try {adapter.id}")
    return Result(facts={**_facts(adapter), "warning": warning or None}, shown="\n".join(lines))


@asynccontextmanager
async def _local(settings: Settings, disk: DiskReserve, file: str) -> AsyncGenerator[Path]:
    """The file or folder on this machine, fetched meanwhile where it is an address."""
    if "://" not in file:
        if not await asyncio.to_thread(Path(file).exists):
            raise BadUsage(f"FILE: {file} does not exist")
        yield Path(file)
        return
    with TemporaryDirectory(prefix="atelier-lora-") as folder:
        sources = LoraSources(settings)
        with _doing(f"Fetching {file}"):
            path = await sources.fetch(file, Path(folder), before_block=disk.check)
        yield path


def _doing(words: str) -> Status:
    """Show what goes on, on stderr and only in a terminal, until the block ends."""
    return Console(stderr=True).status(escape(words))


@command(app, "remove")
async def remove(settings: Settings, accounts: AccountParts, loras: LoraParts, lora: Lora) -> Result:
    """Remove an added adapter: jobs that wait for it or run with it end as lora_unavailable."""
    adapter = await find_adapter(loras.catalog, lora)
    if await remove_lora(loras.registry, loras.stored_weights, adapter.id) == "file":
        raise Failed(f"{adapter.name} is a row of {settings.catalog}: remove it there")
    if adapter.owner:
        await accounts.audit.record(adapter.owner, Act.LORA_REVOKED, this_operator(), adapter.id)
    return Result(facts={"lora": adapter.id, "removed": True}, shown=f"{adapter.name} ({adapter.id}) is removed")


@command(app, "list")
async def list_loras(
    accounts: AccountParts,
    loras: LoraParts,
    operations: OperationParts,
    account: Annotated[str | None, typer.Option(help="Only adapters that this account may use.")] = None,
) -> Result:
    """List all adapters, and the rows of the catalog file that are set aside; with --url or --key yours there."""
    if account is None:
        adapters = await loras.catalog.all()
    else:
        adapters = await loras.catalog.adapters((await find_account(accounts.store, account)).id)
    names = await _account_names(operations.reader, adapters)
    set_aside = await loras.applied_catalog.set_aside()

    def row(adapter: Adapter) -> tuple[str, ...]:
        return adapter.name, adapter.id, adapter.base_model, _offered_to(adapter, names)

    columns, empty = ("NAME", "ID", "BASE MODEL", "OFFERED TO"), "No adapters in the catalog."
    listed = listing(
        "loras", adapters, _facts, columns, row, empty=empty, set_aside=[each._asdict() for each in set_aside]
    )
    reported = "\n".join(f"Set aside: {each.reason}" for each in set_aside)
    return replace(listed, shown=Group(listed.shown, reported)) if reported else listed


@command(app, "show")
async def show(loras: LoraParts, operations: OperationParts, lora: Lora) -> Result:
    """Show an adapter: what it is called, what its check found, and what its file says of its training."""
    adapter = await find_adapter(loras.catalog, lora)
    found = dict(adapter.found)
    drawn_on = bases_of_loras(await loras.applied_catalog.applied_base_models()).get(adapter.base_model, ())
    rows = [
        ("name", adapter.name),
        ("id", adapter.id),
        ("description", adapter.description),
        ("base model", adapter.base_model),
        ("also drawn on", ", ".join(drawn_on[1:])),
        ("offered to", _offered_to(adapter, await _account_names(operations.reader, [adapter]))),
        ("trigger words", ", ".join(adapter.trigger_words)),
        ("suggested by its file", ", ".join(found.get("suggested_trigger_words", ()))),
        ("found", found.get("summary", "")),
        ("created", adapter.created_at.isoformat(timespec="seconds")),
        ("sha256", adapter.sha256),
        *sorted(found.get("metadata", {}).items()),
    ]
    shown = table(("FIELD", "VALUE"), [row for row in rows if row[1]], empty="")
    return Result(facts={**_facts(adapter), "base_models": list(drawn_on)}, shown=shown)


@command(app, "grant")
async def grant(accounts: AccountParts, loras: LoraParts, lora: Lora, account: AccountName) -> Result:
    """Allow an account to use an adapter, overriding whom it is offered to."""
    return await _set_grant(accounts, loras, lora, account, allowed=True)


@command(app, "revoke")
async def revoke(accounts: AccountParts, loras: LoraParts, lora: Lora, account: AccountName) -> Result:
    """Forbid an account from using an adapter, overriding whom it is offered to."""
    return await _set_grant(accounts, loras, lora, account, allowed=False)


async def _set_grant(accounts: AccountParts, loras: LoraParts, lora: str, account: str, *, allowed: bool) -> Result:
    adapter, found = await find_adapter(loras.catalog, lora), await find_account(accounts.store, account)
    change, act = (loras.grants.grant, Act.LORA_GRANTED) if allowed else (loras.grants.revoke, Act.LORA_REVOKED)
    await change(adapter.id, found.id)
    await accounts.audit.record(found.id, act, this_operator(), adapter.id)
    shown = f"{found.name} {'may' if allowed else 'may not'} use {adapter.name} ({adapter.id})"
    return Result(facts={"lora": adapter.id, "account": found.name, "allowed": allowed}, shown=shown)


async def find_adapter(catalog: CatalogReader, id_or_name: str) -> Adapter:
    """Find an adapter. Raises `Failed` when there is none, or more than one of the name."""
    if (adapter := await catalog.adapter(id_or_name)) is not None:
        return adapter
    named = [adapter for adapter in await catalog.all() if adapter.name.casefold() == id_or_name.casefold()]
    if not named:
        raise Failed(f"no adapter {id_or_name!r} (see: atelier loras list)")
    if len(named) > 1:
        raise Failed(f"{len(named)} adapters are named {id_or_name!r}: give the id")
    return named[0]


def _facts(adapter: Adapter) -> dict[str, object]:
    return {
        "id": adapter.id,
        "name": adapter.name,
        "description": adapter.description,
        "trigger_words": list(adapter.trigger_words),
        "base_model": adapter.base_model,
        "sha256": adapter.sha256,
        "created_at": adapter.created_at,
        "owner": adapter.owner or None,
        "accounts": adapter.accounts,
        "found": dict(adapter.found),
    }


async def _account_names(reader: OperatorReader, adapters: Sequence[Adapter]) -> Mapping[str, str]:
    """Name the accounts that own these adapters, and those to which they are offered, by id."""
    ids = [account for adapter in adapters for account in (adapter.owner, *(adapter.accounts or ()))]
    return await reader.account_names(ids)


def _offered_to(adapter: Adapter, names: Mapping[str, str]) -> str:
    """Name the owner first; an account that no longer exists by its id."""
    if adapter.accounts is None:
        return "everyone"
    others = sorted(names.get(account, account) for account in adapter.accounts - {adapter.owner})
    return ", ".join(filter(None, [names.get(adapter.owner, adapter.owner), *others])) or "nobody"
