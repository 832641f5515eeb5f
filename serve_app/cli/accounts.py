"""`atelier accounts` creates, changes and deletes accounts; `atelier usage` and `audit` list what they used and did."""

import asyncio
import getpass
import os
import shlex
import sys
from collections.abc import Container
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated

import typer

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.sign_in import LinkPurpose
from serve_app.api.parts import AccountParts, OperationParts
from serve_app.cli.command import BadUsage, Failed, Result, command, listing
from serve_app.cli.local import local_base_url
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor, AuditRow, operator
from serve_app.domain.durations import parse_duration
from serve_app.domain.requests import Variant
from serve_app.operations.reports import UsageRow, log_names, usage_csv, usage_report
from serve_app.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Create accounts, change their plans and console passwords.")

AccountName = Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account's name or id.", show_default=False)]
PlanA = Annotated[str | None, typer.Option(help="Bearer interface: basic, professional, enterprise or your own.")]
PlanB = Annotated[str | None, typer.Option(help="X-API-Key interface: free, basic, premium or your own.")]
PasswordStdin = Annotated[bool, typer.Option("--password-stdin", help="Read the console password from standard input.")]


def this_operator() -> Actor:
    """Return who runs this command: the system's user, or its number where a container has no name for it."""
    try:
        return Actor(operator(getpass.getuser()))
    except (KeyError, OSError):
        return Actor(operator(str(os.getuid())))


@command(app, "create")
async def create(
    accounts: AccountParts,
    name: Annotated[str, typer.Argument(help="1 to 100 printable characters.", show_default=False)],
    plan_a: PlanA = "basic",
    plan_b: PlanB = "free",
    password_stdin: PasswordStdin = False,
    with_key: Annotated[bool, typer.Option("--key/--no-key", help="Create a key for both interfaces.")] = True,
) -> Result:
    """Create an account with an API key, printed once. With a password it can also sign in to the console."""
    password = password_from_stdin() if password_stdin else None
    account = await accounts.store.create(name, plan_a=plan_a or "basic", plan_b=plan_b or "free", password=password)
    await accounts.audit.record(account.id, Act.ACCOUNT_CREATED, this_operator())
    shown = f"{account.name} ({account.id}): bearer plan {account.plan_a}, X-API-Key plan {account.plan_b}"
    if not with_key:
        next_command = f"atelier keys create {shlex.quote(account.name)}"
        return Result(facts=account_facts(account), shown=f"{shown}\nNext: {next_command}")
    key, secret = await accounts.api_keys.create(account.id, interfaces=frozenset(Variant))
    await accounts.audit.record(account.id, Act.KEY_CREATED, this_operator(), key.id)
    facts = {**account_facts(account), "key": secret, "key_id": key.id}
    return Result(facts=facts, shown=f"{shown}\n{_key_lines(secret)}")


def _key_lines(secret: str) -> str:
    """The key as each interface takes it. Only its hash is stored."""
    return f"""
  Key for A      Authorization: Bearer {secret}
  Key for B      X-API-Key: {secret}

The key is shown this once. Further keys, with limits or an expiry: atelier keys create"""


@command(app, "list")
async def list_accounts(accounts: AccountParts) -> Result:
    """List all accounts, oldest first."""
    found, empty = await accounts.store.list(), "No accounts yet: atelier accounts create NAME"
    columns = ("NAME", "ID", "PLAN A", "PLAN B", "STATE", "CREATED")
    return listing("accounts", found, account_facts, columns, _row, empty=empty)


@command(app, "set-plan")
async def set_plan(
    accounts: AccountParts, operations: OperationParts, account: AccountName, plan_a: PlanA = None, plan_b: PlanB = None
) -> Result:
    """Change an account's plans, effective from its next request."""
    if plan_a is None and plan_b is None:
        raise BadUsage("set-plan: give --plan-a, --plan-b or both")
    found = await find_account(accounts.store, account)
    changed = await operations.acts.set_plans(found, this_operator(), plan_a=plan_a, plan_b=plan_b)
    return _account_result(changed)


@command(app, "disable")
async def disable(accounts: AccountParts, operations: OperationParts, account: AccountName) -> Result:
    """Reject the account's keys and end its console sessions and links at once; its jobs and images stay."""
    found = await find_account(accounts.store, account)
    return _account_result(await operations.acts.disable(found, this_operator()))


@command(app, "enable")
async def enable(accounts: AccountParts, operations: OperationParts, account: AccountName) -> Result:
    """Enable a disabled account."""
    found = await find_account(accounts.store, account)
    return _account_result(await operations.acts.enable(found, this_operator()))


@command(app, "delete")
async def delete(
    accounts: AccountParts,
    operations: OperationParts,
    account: AccountName,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm: this cannot be undone.")] = False,
) -> Result:
    """Delete an account with its jobs, prompts, images, keys, sessions and grants.

    Its audit log stays, without its name.
    """
    found = await find_account(accounts.store, account)
    if not yes:
        raise BadUsage(f"delete: removes {found.name} with everything it made, for good; add --yes")
    deleted = await operations.deletion.delete(found, this_operator())
    facts = {"id": found.id, "name": found.name, "jobs": deleted.jobs, "keys": deleted.keys, "left": list(deleted.left)}
    shown = f"{found.name}: deleted, with {deleted.jobs} jobs and {deleted.keys} keys"
    if deleted.left:
        shown += f"\nStill there: {', '.join(deleted.left)}"
    return Result(facts=facts, shown=shown, failed=bool(deleted.left))


@command(app, "set-password")
async def set_password(accounts: AccountParts, account: AccountName, password_stdin: PasswordStdin = False) -> Result:
    """Set an account's console password; ends its console sessions and the links made for it."""
    found = await find_account(accounts.store, account)
    password = new_password(from_stdin=password_stdin)
    ended = len(await accounts.sessions.list(found.id))
    await accounts.store.set_password(found.id, password)
    await accounts.audit.record(found.id, Act.PASSWORD_SET, this_operator())
    return Result(
        facts={**account_facts(found), "sessions_ended": ended},
        shown=f"{found.name}: password set, {ended} console session{'' if ended == 1 else 's'} ended",
    )


@command(app, "sign-in-link")
async def sign_in_link(
    settings: Settings,
    accounts: AccountParts,
    operations: OperationParts,
    account: AccountName,
    sets_password: Annotated[
        bool, typer.Option("--new-password", help="The link lets its user set a password.")
    ] = False,
) -> Result:
    """Print a link that signs in to the console once, within 24 hours.

    Use --new-password for a lost password.
    """
    found = await find_account(accounts.store, account)
    purpose = LinkPurpose.NEW_PASSWORD if sets_password else LinkPurpose.SIGN_IN
    path = await operations.acts.make_sign_in_link(found, this_operator(), purpose)
    url = await asyncio.to_thread(local_base_url, settings) + path
    return Result(facts={**account_facts(found), "url": url}, shown=url)


async def find_account(
    accounts: AccountStore, id_or_name: str, *, plans: Container[tuple[Variant, str]] | None = None
) -> Account:
    """Find an account. Raises `Failed` when there is none.

    With `plans`, raises `BadUsage` for a plan that is not among those known here: its limits would be misread.
    """
    account = await accounts.get(id_or_name)
    if account is None:
        raise Failed(f"no account {id_or_name!r} (see: atelier accounts list)")
    for plan in ((Variant.A, account.plan_a), (Variant.B, account.plan_b)):
        if plans is not None and plan not in plans:
            raise BadUsage(f"{account.name} has the plan {plan[1]!r}: set ATELIER_PLANS here as for the service")
    return account


def account_facts(account: Account) -> dict[str, object]:
    return {
        "id": account.id,
        "name": account.name,
        "plans": {Variant.A: account.plan_a, Variant.B: account.plan_b},
        "disabled": account.disabled,
        "created_at": account.created_at,
    }


def _account_result(account: Account) -> Result:
    shown = f"{account.name}: bearer plan {account.plan_a}, X-API-Key plan {account.plan_b}, {_state(account)}"
    return Result(facts=account_facts(account), shown=shown)


def _row(account: Account) -> tuple[str, ...]:
    plans, created = (account.plan_a, account.plan_b), f"{account.created_at:%Y-%m-%d %H:%M}"
    return account.name, account.id, *plans, _state(account), created


def _state(account: Account) -> str:
    return "disabled" if account.disabled else "active"


def password_from_stdin() -> str:
    return sys.stdin.readline().rstrip("\r\n")


def new_password(*, from_stdin: bool) -> str:
    """Read a password, which is asked for on the terminal unless it comes `from_stdin`. Raises `BadUsage`."""
    if from_stdin:
        return password_from_stdin()
    if not sys.stdin.isatty():
        raise BadUsage("standard input is not a terminal; use --password-stdin")
    return typer.prompt("New password (12 to 128 characters)", hide_input=True, confirmation_prompt=True)


MOST_DAYS = 400
"""A day's counters are kept for this many days."""


async def usage(
    accounts: AccountParts,
    operations: OperationParts,
    account: Annotated[str | None, typer.Option(help="Only this account.")] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How many days (UTC), today's included.")] = 30,
    as_csv: Annotated[bool, typer.Option("--csv", help="Result in CSV.")] = False,
) -> Result:
    """List the images, megapixel-steps and worker seconds of completed jobs, by account, day, key and LoRA."""
    found = await accounts.store.list() if account is None else [await find_account(accounts.store, account)]
    rows = await usage_report(accounts.usage, accounts.api_keys, operations.reader, found, days)
    listed = listing("usage", rows, asdict, _COLUMNS, _cells, empty="No usage.")
    return replace(listed, shown=usage_csv(rows).rstrip()) if as_csv else listed


_COLUMNS = ("DAY", "ACCOUNT", "KEY", "LORA", "IMAGES", "MEGAPIXEL-STEPS", "SECONDS")


def _cells(row: UsageRow) -> tuple[str, ...]:
    names = (row.day, row.account, row.key or row.key_id, row.lora or row.lora_id)
    return *names, str(row.images), f"{row.megapixel_steps:.3f}", f"{row.worker_seconds:.1f}"


async def audit(
    accounts: AccountParts,
    operations: OperationParts,
    account: Annotated[
        str | None, typer.Option(help="Only this account: its name or id, or a deleted one's id.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only after a time: 7d, 12h, 2026-11-23, 2026-11-23T18:00Z.")
    ] = None,
) -> Result:
    """List sign-ins, keys, grants, plans, deletions and operators' acts of accounts, oldest first."""
    names = await log_names(accounts.store, operations.operators, operations.reader, accounts.audit)
    found = None if account is None else await accounts.store.get(account)
    if account is not None and found is None and not account.startswith(("acct_", operator(""))):
        raise Failed(f"no account {account!r}; a deleted one is found by its id")
    account_id = account if found is None else found.id
    rows = await accounts.audit.rows(account_id, since=None if since is None else _time(since))

    def facts(row: AuditRow) -> dict[str, object]:
        return {"time": row.time, "account": names.get(row.log), **asdict(row)}

    def cells(row: AuditRow) -> tuple[str, ...]:
        account = names.get(row.log, f"deleted {row.log[:8]}")
        return f"{row.time:%Y-%m-%d %H:%M:%S}", account, row.actor, row.act, row.subject, row.address

    columns = ("TIME", "ACCOUNT", "ACTOR", "ACT", "SUBJECT", "ADDRESS")
    return listing("rows", rows, facts, columns, cells, empty="Nothing is recorded.")


def _time(text: str) -> datetime:
    """Read how long ago, or a date with or without a time of day; without a zone it is UTC."""
    with suppress(ValueError):
        return datetime.now(UTC) - parse_duration(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise BadUsage(f"--since: must be like 7d, 12h, 2026-11-23 or 2026-11-23T18:00Z, not {text!r}") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
