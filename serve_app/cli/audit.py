"""`atelier audit` lists what was done to accounts; the other commands record here what they do."""

import getpass
import os
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from serve_app.api.parts import AccountParts, OperationParts
from serve_app.cli.command import BadUsage, Failed, Result, listing
from serve_app.domain.audit import Actor, AuditRow, operator
from serve_app.domain.durations import parse_duration
from serve_app.operations.reports import log_names


def this_operator() -> Actor:
    """Return who runs this command: the system's user, or its number where a container has no name for it."""
    try:
        return Actor(operator(getpass.getuser()))
    except (KeyError, OSError):
        return Actor(operator(str(os.getuid())))


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
