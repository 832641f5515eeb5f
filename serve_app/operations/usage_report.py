"""Reports usage with the names of accounts, keys and LoRAs, as rows for a table, JSON or CSV.

Finds the names behind the pseudonyms of the audit log.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from io import StringIO
from typing import TYPE_CHECKING, Any

from serve_app.accounts.usage import UPSCALES, Usage
from serve_app.domain.accounts import Account
from serve_app.domain.audit import operator

if TYPE_CHECKING:
    from serve_app.resources import Resources


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet would run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRow:
    """An account's usage of one day (UTC) with one key and one LoRA; a deleted name is empty."""

    day: str
    account: str
    account_id: str
    key: str
    key_id: str
    lora: str
    lora_id: str
    images: int
    megapixel_steps: float
    worker_seconds: float

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self)


async def usage_report(resources: "Resources", accounts: Iterable[Account], days: int) -> list[UsageRow]:
    """Read the usage of the last `days` days, today's included, by account and day.

    Raises `StoreUnavailable`.
    """
    last = await resources.usage.today()
    return [
        row
        for account in accounts
        for row in await _of_account(resources, account, await resources.usage.days(account.id, last, days))
    ]


async def _of_account(resources: "Resources", account: Account, used: Sequence[Usage]) -> list[UsageRow]:
    if not used:
        return []
    keys = {key.id: key.name or key.hint for key in await resources.api_keys.list(account.id)}
    loras = await resources.operator_reader.lora_names(row.lora_id for row in used if row.lora_id != UPSCALES)
    return [
        UsageRow(
            day=row.day.isoformat(),
            account=account.name,
            account_id=account.id,
            key=keys.get(row.key_id, "") if row.key_id else "console",
            key_id=row.key_id,
            lora=loras.get(row.lora_id, "") if row.lora_id != UPSCALES else UPSCALES,
            lora_id=row.lora_id,
            images=row.images,
            megapixel_steps=round(row.megapixel_steps, 3),
            worker_seconds=round(row.seconds, 3),
        )
        for row in used
    ]


def usage_csv(rows: Iterable[UsageRow]) -> str:
    columns = [each.name for each in fields(UsageRow)]
    return csv_text(columns, ([row.facts[name] for name in columns] for row in rows))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write CSV; no spreadsheet takes a cell's text for a formula."""
    out = StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    writer.writerows([_as_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return out.getvalue()


def _as_text(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name


async def log_names(resources: "Resources", logs: Set[str] | None = None) -> Mapping[str, str]:
    """Return the names of accounts and operators by their logs' pseudonyms; deleted ones have none.

    They are those of `logs`, or all.
    """
    operators = [operator(each.name) for each in await resources.operators.list()]
    accounts = _wanted(resources, await resources.accounts.ids(), logs)
    names = await resources.operator_reader.account_names(accounts.values())
    found = {log: names[account_id] for log, account_id in accounts.items() if account_id in names}
    return {**_wanted(resources, operators, logs), **found}


def _wanted(resources: "Resources", ids: Iterable[str], logs: Set[str] | None) -> Mapping[str, str]:
    by_log = {resources.audit.pseudonym(each): each for each in ids}
    return by_log if logs is None else {log: each for log, each in by_log.items() if log in logs}
