"""Reads and reports accounts, queues, LoRAs and usage for operators, by the names that they know.

Each read of `OperatorReader` is bounded.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass, fields
from io import StringIO
from typing import NamedTuple

from serve_app.accounts.accounts import AccountStore, OperatorStore, read_account
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.usage import UPSCALES, Usage, UsageReader
from serve_app.domain.accounts import Account
from serve_app.domain.audit import operator
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import Job
from serve_app.jobs.history import find_jobs
from serve_app.loras.record import REGISTERED, read_record
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient

MOST_QUEUES = 200
"""At most this many accounts' queues of one pool are compared: those whose turn is next."""
MOST_APART = 1_000
"""At most this many jobs of one pool that back off are counted for their accounts, and as many that must run alone."""
USE_DAYS = 30
DAY_S = 86_400
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would run a cell that begins with one of these."""


class AccountRow(NamedTuple):
    account: Account
    unfinished: int
    keys: int
    """This many keys were ever made for the account."""


class AccountQueue(NamedTuple):
    """Jobs of one pool that wait for one account."""

    pool: str
    account_id: str
    waiting: int
    oldest_age_s: float


class LoraRow(NamedTuple):
    adapter: Adapter
    is_registered: bool
    images: int
    """This many images were made with the LoRA in the last `USE_DAYS` days."""
    granted: int
    """This many accounts may use it by a grant, as those it is shared with."""


class OperatorReader:
    """Reads for operators' pages. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def accounts(self, start: int, limit: int) -> tuple[list[AccountRow], int]:
        """List accounts, the newest first, from a place on; and return how many there are."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zcard(redis_key("accounts"))
        pipeline.zrevrange(redis_key("accounts"), start, start + limit - 1)
        total, ids = await pipeline.execute()
        return await self.account_rows(ids), total

    async def account_rows(self, ids: Sequence[str]) -> list[AccountRow]:
        pipeline = self._redis.pipeline(transaction=False)
        for account_id in ids:
            pipeline.hgetall(redis_key("account", account_id))
            pipeline.hget(redis_key("unfinished"), account_id)
            pipeline.zcard(redis_key("keys", account_id))
        answers = await pipeline.execute()
        rows = zip(ids, answers[::3], answers[1::3], answers[2::3], strict=True)
        return [
            AccountRow(read_account(account_id, row), int(unfinished or 0), keys)
            for account_id, row, unfinished, keys in rows
            if row
        ]

    async def account_names(self, ids: Iterable[str]) -> Mapping[str, str]:
        return await self._names("account", ids)

    async def lora_names(self, ids: Iterable[str]) -> Mapping[str, str]:
        return await self._names("lora", ids)

    async def queues(self, pool: str, limit: int) -> list[AccountQueue]:
        """The accounts with waiting jobs, the longest wait first."""
        apart = await self._jobs_without_turn(pool)
        next_in_turn = await self._redis.zrange(redis_key("vtime", pool), 0, MOST_QUEUES - 1)
        ready = {queue.account_id: queue for queue in await self._queues(pool, next_in_turn)}
        rows = [[row for row in (ready.get(each), apart.get(each)) if row] for each in {**ready, **apart}]
        return sorted(map(_sum, rows), key=lambda queue: -queue.oldest_age_s)[:limit]

    async def _jobs_without_turn(self, pool: str) -> dict[str, AccountQueue]:
        """Return by account the waiting jobs that back off or must run alone; of each at most `MOST_APART`."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for index in ("delay", "quarantine"):
            pipeline.zrange(redis_key(index, pool), 0, MOST_APART - 1)
        (seconds, _), delayed, alone = await pipeline.execute()
        pipeline = self._redis.pipeline(transaction=False)
        for job_id in (*delayed, *alone):
            pipeline.hmget(redis_key("job", job_id), "account", "waiting_since")
        found: defaultdict[str, list[AccountQueue]] = defaultdict(list)
        for account_id, since in await pipeline.execute():
            if since:  # it has not ended in between
                found[account_id].append(AccountQueue(pool, account_id, 1, max(0.0, seconds - int(since) / 1000)))
        return {account_id: _sum(jobs) for account_id, jobs in found.items()}

    async def _queues(self, pool: str, ids: Sequence[str]) -> list[AccountQueue]:
        if not ids:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for account_id in ids:
            pipeline.zcard(redis_key("queue", pool, account_id))
            pipeline.zrange(redis_key("queue", pool, account_id), 0, 0)
        answers = await pipeline.execute()
        first = [jobs[0] if jobs else "" for jobs in answers[1::2]]
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        for job_id in first:
            pipeline.zscore(redis_key("age", pool), job_id)
        (seconds, micros), *since = await pipeline.execute()
        now_ms = seconds * 1000 + micros // 1000
        return [
            AccountQueue(pool, account_id, waiting, max(0.0, (now_ms - ms) / 1000))
            for account_id, waiting, ms in zip(ids, answers[::2], since, strict=True)
            if waiting and ms is not None
        ]

    async def running(self, pool: str, limit: int) -> list[Job]:
        """Jobs that are being worked on, by the end of their lease."""
        return await find_jobs(self._redis, await self._redis.zrange(redis_key("lease", pool), 0, limit - 1))

    async def loras(self, start: int, limit: int, *, owner: str = "") -> tuple[list[LoraRow], int]:
        """List all LoRAs or those of one owner from a place on, newest first, and return how many there are."""
        index = redis_key("loras_owned", owner) if owner else redis_key("loras")
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.zcard(index)
        pipeline.zrevrange(index, start, start + limit - 1)
        (seconds, _), total, ids = await pipeline.execute()
        if not ids:
            return [], total
        pipeline = self._redis.pipeline(transaction=False)
        for lora_id in ids:
            pipeline.hgetall(redis_key("lora", lora_id))
        today = seconds // DAY_S
        for day in range(today - USE_DAYS + 1, today + 1):
            pipeline.hmget(redis_key("lora_use", str(day)), ids)
        for lora_id in ids:
            pipeline.smembers(redis_key("granted", lora_id))
        answers = await pipeline.execute()
        records, days, decided = answers[: len(ids)], answers[len(ids) : -len(ids)], answers[-len(ids) :]
        granted = [await self._granted(lora_id, accounts) for lora_id, accounts in zip(ids, decided, strict=True)]
        used = [sum(int(number or 0) for number in numbers) for numbers in zip(*days, strict=True)]
        rows = zip(ids, records, used, granted, strict=True)
        return [
            LoraRow(read_record(lora_id, record), record["source"] == REGISTERED, images, accounts)
            for lora_id, record, images, accounts in rows
            if record
        ], total

    async def _granted(self, lora_id: str, accounts: Iterable[str]) -> int:
        """Return how many of these accounts are allowed the LoRA: the others are denied it."""
        pipeline = self._redis.pipeline(transaction=False)
        for account_id in accounts:
            pipeline.hget(redis_key("grants", account_id), lora_id)
        return (await pipeline.execute()).count("allow")

    async def _names(self, family: str, ids: Iterable[str]) -> Mapping[str, str]:
        wanted = sorted({each for each in ids if each})
        pipeline = self._redis.pipeline(transaction=False)
        for each in wanted:
            pipeline.hget(redis_key(family, each), "name")
        names = await pipeline.execute()
        return {each: name for each, name in zip(wanted, names, strict=True) if name}


def _sum(queues: Sequence[AccountQueue]) -> AccountQueue:
    """Return an account's queues of one pool as one."""
    waiting, oldest_age_s = sum(each.waiting for each in queues), max(each.oldest_age_s for each in queues)
    return queues[0]._replace(waiting=waiting, oldest_age_s=oldest_age_s)


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


async def usage_report(
    usage: UsageReader, api_keys: ApiKeyStore, reader: OperatorReader, accounts: Iterable[Account], days: int
) -> list[UsageRow]:
    """Read the usage of the last `days` days with today, by account and day. Raises `StoreUnavailable`."""
    last = await usage.today()
    return [
        row
        for account in accounts
        for row in await _usage_rows(api_keys, reader, account, await usage.days(account.id, last, days))
    ]


async def _usage_rows(
    api_keys: ApiKeyStore, reader: OperatorReader, account: Account, used: Sequence[Usage]
) -> list[UsageRow]:
    if not used:
        return []
    keys = {key.id: key.name or key.hint for key in await api_keys.list(account.id)}
    names = await reader.lora_names(lora_id for row in used for lora_id in row.lora_ids)
    loras = {UPSCALES: UPSCALES, **names}
    return [
        UsageRow(
            day=row.day.isoformat(),
            account=account.name,
            account_id=account.id,
            key=keys.get(row.key_id, "") if row.key_id else "console",
            key_id=row.key_id,
            lora=" + ".join(loras.get(lora_id, "") for lora_id in row.lora_ids),
            lora_id=row.lora_id,
            images=row.images,
            megapixel_steps=round(row.megapixel_steps, 3),
            worker_seconds=round(row.seconds, 3),
        )
        for row in used
    ]


def usage_csv(rows: Iterable[UsageRow]) -> str:
    return csv_text([each.name for each in fields(UsageRow)], (astuple(row) for row in rows))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write CSV; no spreadsheet takes a cell's text for a formula."""
    out = StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row])
    return out.getvalue()


async def log_names(
    accounts: AccountStore,
    operators: OperatorStore,
    reader: OperatorReader,
    audit: AuditLog,
    logs: Set[str] | None = None,
) -> Mapping[str, str]:
    """Return the names of accounts and operators by their pseudonyms in the audit log: of `logs`, or of all."""
    operator_names = [operator(each.name) for each in await operators.list()]
    account_ids = _by_pseudonym(audit, await accounts.ids(), logs)
    names = await reader.account_names(account_ids.values())
    found = {log: names[account_id] for log, account_id in account_ids.items() if account_id in names}
    return {**_by_pseudonym(audit, operator_names, logs), **found}


def _by_pseudonym(audit: AuditLog, ids: Iterable[str], logs: Set[str] | None) -> Mapping[str, str]:
    by_log = {audit.pseudonym(each): each for each in ids}
    return by_log if logs is None else {log: each for log, each in by_log.items() if log in logs}
