"""Reports usage with the names of accounts, keys and LoRAs, as rows for a table, JSON or CSV.

Finds the names behind the pseudonyms of the audit log.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from io import StringIO
from typing import Any

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.operators import OperatorStore
from serve_app.accounts.usage import UPSCALES, Usage, UsageReader
from serve_app.domain.accounts import Account
from serve_app.domain.audit import operator
from serve_app.operations.reports import OperatorReader

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


async def usage_report(
    usage: UsageReader, api_keys: ApiKeyStore, reader: OperatorReader, accounts: Iterable[Account], days: int
) -> list[UsageRow]:
    """Read the usage of the last `days` days, today's included, by account and day.

    Raises `StoreUnavailable`.
    """
    last = await usage.today()
    return [
        row
        for account in accounts
        for row in await _of_account(api_keys, reader, account, await usage.days(account.id, last, days))
    ]


async def _of_account(
    api_keys: ApiKeyStore, reader: OperatorReader, account: Account, used: Sequence[Usage]
) -> list[UsageRow]:
    if not used:
        return []
    keys = {key.id: key.name or key.hint for key in await api_keys.list(account.id)}
    loras = await reader.lora_names(row.lora_id for row in used if row.lora_id != UPSCALES)
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


async def log_names(
    accounts: AccountStore,
    operators: OperatorStore,
    reader: OperatorReader,
    audit: AuditLog,
    logs: Set[str] | None = None,
) -> Mapping[str, str]:
    """Return the names of accounts and operators by their logs' pseudonyms; deleted ones have none.

    They are those of `logs`, or all.
    """
    operator_names = [operator(each.name) for each in await operators.list()]
    account_ids = _wanted(audit, await accounts.ids(), logs)
    names = await reader.account_names(account_ids.values())
    found = {log: names[account_id] for log, account_id in account_ids.items() if account_id in names}
    return {**_wanted(audit, operator_names, logs), **found}


def _wanted(audit: AuditLog, ids: Iterable[str], logs: Set[str] | None) -> Mapping[str, str]:
    by_log = {audit.pseudonym(each): each for each in ids}
    return by_log if logs is None else {log: each for log, each in by_log.items() if log in logs}
