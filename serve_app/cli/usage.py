"""`atelier usage`: what accounts used, by day, key and LoRA."""

from typing import Annotated

import typer

from serve_app.cli.accounts import find_account
from serve_app.cli.command import Result, store_command, table
from serve_app.service.resources import Resources
from serve_app.service.usage_report import UsageRow, usage_csv, usage_report

MOST_DAYS = 400
"""As long as a day's counters are kept."""


def add_usage(app: typer.Typer) -> None:
    store_command(app, "usage")(_usage)


async def _usage(
    resources: Resources,
    account: Annotated[str | None, typer.Option(help="Only this account.")] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="How many days (UTC), today's included.")] = 30,
    as_csv: Annotated[bool, typer.Option("--csv", help="Result in CSV.")] = False,
) -> Result:
    """List what completed jobs used, by account, day, key and LoRA.

    Images, megapixel-steps and worker seconds are listed.
    """
    accounts = await resources.accounts.list() if account is None else [await find_account(resources, account)]
    rows = await usage_report(resources, accounts, days)
    shown = usage_csv(rows).rstrip() if as_csv else table(_COLUMNS, [_cells(row) for row in rows], empty="No usage.")
    return Result(facts={"usage": [row.facts for row in rows]}, shown=shown)


_COLUMNS = ("DAY", "ACCOUNT", "KEY", "LORA", "IMAGES", "MEGAPIXEL-STEPS", "SECONDS")


def _cells(row: UsageRow) -> tuple[str, ...]:
    names = (row.day, row.account, row.key or row.key_id, row.lora or row.lora_id)
    return *names, str(row.images), f"{row.megapixel_steps:.3f}", f"{row.worker_seconds:.1f}"
