"""Reports each account's and each adapter's queue and usage, and where adapters are held."""

from collections import defaultdict
from typing import Any

from serve_app.domain.jobs import JobKind
from serve_app.service.resources import Resources
from serve_app.stores.operator_reader import USE_DAYS, AccountRow


async def account_report(resources: Resources, *, start: int, limit: int, days: int) -> dict[str, Any]:
    """List accounts, newest first, with their waiting jobs and their usage.

    The usage is of the last `days` days, today's included.
    """
    rows, total = await resources.operator_reader.accounts(start, limit)
    queues = await resources.operator_reader.queues_of([row.account.id for row in rows])
    waiting: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for queue in queues:
        facts = {"ready": queue.waiting, "oldest_seconds": round(queue.oldest_age_s, 1)}
        waiting[queue.account_id][str(queue.kind)] = facts
    accounts = [
        {**_account(row), "queue": waiting[row.account.id], "usage": await _usage(resources, row.account.id, days)}
        for row in rows
    ]
    return {"total": total, "start": start, "usage_days": days, "accounts": accounts}


def _account(row: AccountRow) -> dict[str, Any]:
    account = row.account
    return {
        "id": account.id,
        "name": account.name,
        "plans": {"a": account.plan_a, "b": account.plan_b},
        "disabled": account.disabled,
        "unfinished": row.unfinished,
        "keys": row.keys,
    }


async def _usage(resources: Resources, account_id: str, days: int) -> dict[str, Any]:
    rows = await resources.usage.days(account_id, await resources.usage.today(), days)
    loras: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        loras[row.lora_id] += row.images
    return {
        "images": sum(row.images for row in rows),
        "megapixel_steps": round(sum(row.megapixel_steps for row in rows), 3),
        "worker_seconds": round(sum(row.seconds for row in rows), 3),
        "images_by_lora": dict(loras),
    }


async def adapter_report(resources: Resources, *, start: int, limit: int) -> dict[str, Any]:
    """List adapters, newest first, with the jobs that wait for them, their workers and their images."""
    rows, total = await resources.operator_reader.loras(start, limit)
    ready = await resources.operator_reader.ready_by_weights([row.adapter.sha256 for row in rows])
    held: defaultdict[str, list[str]] = defaultdict(list)
    for worker in sorted(await resources.measures.shown(JobKind.GENERATION), key=lambda each: each.name):
        for lora_id in worker.loras:
            held[lora_id].append(worker.name)
    adapters = [
        {
            "id": row.adapter.id,
            "name": row.adapter.name,
            "base_model": row.adapter.base_model,
            "owner": row.adapter.owner,
            "ready": ready[row.adapter.sha256],
            "workers": held[row.adapter.id],
            "images": row.images,
        }
        for row in rows
    ]
    return {"total": total, "start": start, "image_days": USE_DAYS, "adapters": adapters}
