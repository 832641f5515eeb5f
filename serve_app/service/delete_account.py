"""Deletes an account and all that is its own, except its audit log under a pseudonym."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act
from serve_app.service.delete import remove_objects
from serve_app.service.register import remove as remove_lora
from serve_app.service.resources import Resources

PASSES = 3
"""What a request that was under way left behind is found by the next pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedAccount:
    """What was removed, and what still names the account: at most the catalog does."""

    jobs: int
    keys: int
    left: Sequence[str]


async def delete_account(resources: Resources, account: Account, *, actor: str) -> DeletedAccount:
    """Disable the account, remove everything that is its own, and look for its name in every key.

    Removed are its jobs, images, LoRAs, keys, sessions, grants and name. Running jobs end at once: their workers' later
    writes are fenced off. Safe to repeat after a crash at any point.
    """
    await resources.accounts.set_disabled(account.id, True)
    await resources.sessions.revoke_all(account.id)
    keys = len(await resources.api_keys.list(account.id))
    jobs = await _remove(resources, account)
    await resources.audit.record(account.id, Act.ACCOUNT_DELETED, actor=actor, entry="deleted")
    await resources.account_records.remove_account(account.id, account.name)
    left = await resources.account_records.still_naming(account.id, account.name)
    for _ in range(PASSES):
        if not left:
            break
        jobs += await _remove(resources, account)
        left = await resources.account_records.still_naming(account.id, account.name)
    images = await resources.images.names(resources.images.account_folder(account.id))
    return DeletedAccount(jobs=jobs, keys=keys, left=[*left, *images])


async def _remove(resources: Resources, account: Account) -> int:
    """Remove all that is the account's own; return how many jobs there were."""
    job_ids = await resources.account_records.job_ids(account.id)
    for job_id in job_ids:
        await resources.deletions.delete_job(job_id, account_id=account.id, force=True)
        if (objects := await resources.deletions.objects(job_id)) is not None:
            await remove_objects(resources, objects)
    for lora_id in await resources.catalog.owned_ids(account.id):
        await remove_lora(resources, lora_id)
    await resources.account_records.remove(account.id)
    await resources.images.delete_folder(resources.images.account_folder(account.id))
    return len(job_ids)
