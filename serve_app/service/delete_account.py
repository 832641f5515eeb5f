"""Deletes an account and all that is its own, except its audit log under a pseudonym."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act
from serve_app.domain.errors import StoreUnavailable
from serve_app.service.delete import remove_objects
from serve_app.service.operate import Actor
from serve_app.service.register import remove as remove_lora
from serve_app.service.resources import Resources
from serve_app.stores.account_records import AccountRemoval

_log = logging.getLogger(__name__)

PASSES = 3
"""What a request that was under way left behind is found by the next pass."""
CUT_SHORT_AFTER = timedelta(minutes=5)
"""A deletion that is still on the list by then is taken up by the housekeeper; two at once do no harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletedAccount:
    """What was removed, and what still names the account: at most the catalog does."""

    jobs: int
    keys: int
    left: Sequence[str]


async def delete_account(resources: Resources, account: Account, by: Actor) -> DeletedAccount:
    """Disable the account, remove everything that is its own, and look for its id in every key.

    Removed are its jobs, images, LoRAs, keys, sessions, grants and name. Running jobs end at once: their workers' later
    writes are fenced off. Safe to repeat after a crash at any point, which the housekeeper does. Raises `StoreUnavailable`.
    """
    return await resources.run_to_end(_finish(resources, await _begin(resources, account, by)))


async def delete_own_account(resources: Resources, account: Account, by: Actor) -> DeletedAccount | None:
    """Delete the account of whoever asks; return None when the housekeeper has to finish it.

    Nobody can ask a second time. Raises `StoreUnavailable` only while the account is as it was.
    """
    removal = await _begin(resources, account, by)
    try:
        deleted = await resources.run_to_end(_finish(resources, removal))
    except StoreUnavailable as error:
        _log.warning("the deletion of %s is left to the housekeeper: %s", account.id, error)
        return None
    if deleted.left:
        _log.warning("%s is deleted and still named by %s", account.id, ", ".join(deleted.left))
    return deleted


async def finish_removals(resources: Resources) -> int:
    """Finish the deletions of accounts that were cut short; return how many."""
    cut_short = datetime.now(UTC) - CUT_SHORT_AFTER
    removals = [removal for removal in await resources.account_records.removals() if removal.began_at < cut_short]
    for removal in removals:
        await _finish(resources, removal)
    return len(removals)


async def _begin(resources: Resources, account: Account, by: Actor) -> AccountRemoval:
    """From here on nobody can act as the account, and the deletion ends through any crash."""
    records = resources.account_records
    return await records.begin_removal(account.id, account.name, actor=by.name, address=by.address)


async def _finish(resources: Resources, removal: AccountRemoval) -> DeletedAccount:
    account_id = removal.account_id
    await resources.sessions.revoke_all(account_id)
    keys = len(await resources.api_keys.list(account_id))
    jobs = await _remove(resources, account_id)
    await resources.audit.record(
        account_id, Act.ACCOUNT_DELETED, actor=removal.actor, address=removal.address, entry="deleted"
    )
    await resources.account_records.remove_account(account_id, removal.name)
    left = await resources.account_records.still_naming(account_id)
    for _ in range(PASSES):
        if not left:
            break
        jobs += await _remove(resources, account_id)
        await resources.account_records.remove_account(account_id, removal.name)
        left = await resources.account_records.still_naming(account_id)
    images = await resources.images.names(resources.images.account_folder(account_id))
    await resources.account_records.end_removal(account_id)
    return DeletedAccount(jobs=jobs, keys=keys, left=[*left, *images])


async def _remove(resources: Resources, account_id: str) -> int:
    """Return how many jobs there were."""
    job_ids = await resources.account_records.job_ids(account_id)
    for job_id in job_ids:
        await resources.deletions.delete_job(job_id, account_id=account_id, force=True)
        if (objects := await resources.deletions.objects(job_id)) is not None:
            await remove_objects(resources, objects)
    for lora_id in await resources.catalog.owned_ids(account_id):
        await remove_lora(resources, lora_id)
    await resources.account_records.remove(account_id)
    await resources.images.delete_folder(resources.images.account_folder(account_id))
    return len(job_ids)
