"""`atelier loras`: the adapters on offer and who may use them."""

from typing import Annotated

import typer

from serve_app.cli.accounts import AccountName, find_account
from serve_app.cli.command import Answer, operator, table
from serve_app.cli.ending import Failed
from serve_app.domain.catalog import Adapter
from serve_app.service.resources import Resources

app = typer.Typer(no_args_is_help=True, help="LoRA adapters: what is on offer, and to whom.")

Lora = Annotated[str, typer.Argument(metavar="LORA", help="The adapter's id or name.", show_default=False)]


@operator(app, "list")
async def list_loras(
    resources: Resources,
    account: Annotated[str | None, typer.Option(help="Only what this account may use.")] = None,
) -> Answer:
    """The catalog's adapters."""
    if account is None:
        adapters = resources.catalog.all()
    else:
        adapters = await resources.catalog.adapters((await find_account(resources, account)).id)
    rows = [(adapter.name, adapter.id, adapter.base_model, _offered_to(adapter)) for adapter in adapters]
    return Answer(
        facts={"loras": [_facts(adapter) for adapter in adapters]},
        shown=table(("NAME", "ID", "BASE MODEL", "OFFERED TO"), rows, empty="No adapters in the catalog."),
    )


@operator(app, "grant")
async def grant(resources: Resources, lora: Lora, account: AccountName) -> Answer:
    """Let an account use an adapter, whatever the catalog file says."""
    adapter, found = _find(resources, lora), await find_account(resources, account)
    await resources.catalog.grant(adapter.id, found.id)
    return _decided(adapter, found.name, "may use", allowed=True)


@operator(app, "revoke")
async def revoke(resources: Resources, lora: Lora, account: AccountName) -> Answer:
    """Stop an account from using an adapter, whatever the catalog file says."""
    adapter, found = _find(resources, lora), await find_account(resources, account)
    await resources.catalog.revoke(adapter.id, found.id)
    return _decided(adapter, found.name, "may not use", allowed=False)


def _find(resources: Resources, id_or_name: str) -> Adapter:
    adapter = resources.catalog.adapter(id_or_name)
    if adapter is not None:
        return adapter
    named = [adapter for adapter in resources.catalog.all() if adapter.name.casefold() == id_or_name.casefold()]
    if not named:
        raise Failed(f"no adapter {id_or_name!r} in {resources.settings.catalog} (see: atelier loras list)")
    if len(named) > 1:
        raise Failed(f"{len(named)} adapters are called {id_or_name!r}: give the id")
    return named[0]


def _decided(adapter: Adapter, account: str, words: str, *, allowed: bool) -> Answer:
    facts = {"lora": adapter.id, "account": account, "allowed": allowed}
    return Answer(facts=facts, shown=f"{account} {words} {adapter.name} ({adapter.id})")


def _facts(adapter: Adapter) -> dict[str, object]:
    return {
        "id": adapter.id,
        "name": adapter.name,
        "description": adapter.description,
        "base_model": adapter.base_model,
        "sha256": adapter.sha256,
        "created_at": adapter.created_at.isoformat(),
        "accounts": None if adapter.accounts is None else sorted(adapter.accounts),
    }


def _offered_to(adapter: Adapter) -> str:
    return "everyone" if adapter.accounts is None else ", ".join(sorted(adapter.accounts)) or "nobody"
