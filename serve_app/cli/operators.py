"""`atelier operators`: who may open the operators' pages, with a name and password of their own."""

import asyncio
from typing import Annotated

import typer

from serve_app.accounts.accounts import OperatorStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.sign_in import LinkPurpose, SignInLinks
from serve_app.api.parts import AccountParts, OperationParts
from serve_app.cli.accounts import PasswordStdin, new_password, password_from_stdin, this_operator
from serve_app.cli.command import Failed, Result, command, listing
from serve_app.cli.local import local_base_url
from serve_app.domain.accounts import Operator
from serve_app.domain.audit import Act, operator
from serve_app.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Create operators of the web pages, and change their passwords.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.", show_default=False)]


@command(app, "create")
async def create(
    settings: Settings,
    accounts: AccountParts,
    operations: OperationParts,
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z 0-9 . _ -", show_default=False)],
    password_stdin: PasswordStdin = False,
) -> Result:
    """Create an operator of /operators.

    Without a password, print a link with which they set one, once, within 24 hours.
    """
    made = await operations.operators.create(name, password=password_from_stdin() if password_stdin else None)
    await accounts.audit.record(operator(name), Act.OPERATOR_CREATED, this_operator())
    if password_stdin:
        return Result(facts=_facts(made), shown=f"{name}: may sign in at /operators")
    return await _link(settings, accounts.audit, operations.links, made, LinkPurpose.NEW_PASSWORD)


@command(app, "list")
async def list_operators(operations: OperationParts) -> Result:
    """List all operators, oldest first."""
    found, empty = await operations.operators.list(), "No operators yet: atelier operators create NAME"
    return listing("operators", found, _facts, ("NAME", "PASSWORD", "CREATED"), _row, empty=empty)


@command(app, "password")
async def password(
    accounts: AccountParts, operations: OperationParts, name: Name, password_stdin: PasswordStdin = False
) -> Result:
    """Set an operator's password and end their sessions."""
    await _find(operations.operators, name)
    ended = len(await operations.sessions.list(name))
    await operations.operators.set_password(name, new_password(from_stdin=password_stdin))
    await accounts.audit.record(operator(name), Act.PASSWORD_SET, this_operator())
    return Result(facts={"name": name, "sessions_ended": ended}, shown=f"{name}: password set")


@command(app, "sign-in-link")
async def sign_in_link(
    settings: Settings,
    accounts: AccountParts,
    operations: OperationParts,
    name: Name,
    sets_password: Annotated[bool, typer.Option("--new-password", help="The link lets them set a password.")] = False,
) -> Result:
    """Print a link that signs an operator in once, within 24 hours.

    Use --new-password for a lost password.
    """
    found = await _find(operations.operators, name)
    purpose = LinkPurpose.NEW_PASSWORD if sets_password else LinkPurpose.SIGN_IN
    return await _link(settings, accounts.audit, operations.links, found, purpose)


@command(app, "delete")
async def delete(accounts: AccountParts, operations: OperationParts, name: Name) -> Result:
    """Delete an operator and end their sessions; what they did stays in the audit log."""
    await _find(operations.operators, name)
    await operations.operators.delete(name)
    await accounts.audit.record(operator(name), Act.OPERATOR_DELETED, this_operator())
    return Result(facts={"name": name, "deleted": True}, shown=f"{name}: deleted")


async def _find(operators: OperatorStore, name: str) -> Operator:
    found = await operators.get(name)
    if found is None:
        raise Failed(f"no operator {name!r} (see: atelier operators list)")
    return found


async def _link(
    settings: Settings, audit: AuditLog, links: SignInLinks, found: Operator, purpose: LinkPurpose
) -> Result:
    token = await links.create(found.name, purpose)
    await audit.record(operator(found.name), Act.SIGN_IN_LINK_MADE, this_operator())
    base_url = await asyncio.to_thread(local_base_url, settings)
    url = f"{base_url}/operators/links/{token}"
    return Result(facts={**_facts(found), "url": url}, shown=url)


def _facts(found: Operator) -> dict[str, object]:
    return {"name": found.name, "has_password": found.has_password, "created_at": found.created_at}


def _row(found: Operator) -> tuple[str, ...]:
    return found.name, "set" if found.has_password else "none", f"{found.created_at:%Y-%m-%d %H:%M}"
