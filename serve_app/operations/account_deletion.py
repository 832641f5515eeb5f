"""Deletes an account and all that is its own, found by reading every key; its audit log stays under a pseudonym."""

import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.sessions import CUSTOMERS, SessionStore
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor
from serve_app.domain.durations import epoch_ms, from_epoch_ms
from serve_app.domain.errors import StoreUnavailable
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.deletion import Deletions, remove_objects
from serve_app.jobs.images import ImageStore
from serve_app.loras.catalog import AdapterRegistry, CatalogReader
from serve_app.loras.registration import remove_lora
from serve_app.loras.stored_weights import LoraFiles, LoraWeights
from serve_app.store.keys import PREFIX, redis_key
from serve_app.store.process import Process
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script

AT_ONCE = 500
CATALOG = ("lora", "loras_offered", "loras_owned", "loras_stored", "catalog", "catalog_rows")
"""Families of keys that the catalog's own operations change."""
KEPT = ("audit", "audit_logs")
LISTED = "accounts_removing"
PASSES = 3
"""How often everything is removed again at most: a request that was under way may have left something behind."""
CUT_SHORT_AFTER = timedelta(minutes=5)
"""A deletion that is still on the list by then is taken up by the housekeeper; two at once do no harm."""

_log = logging.getLogger(__name__)


class AccountRemoval(NamedTuple):
    """A deletion that has begun, and may have been cut short."""

    account_id: str
    name: str
    actor: str
    """Whoever deletes the account, as the audit log names them."""
    address: str
    """The actor's address."""
    began_at: datetime


class DeletedAccount(NamedTuple):
    """What was removed, and what still names the account: at most the catalog does."""

    jobs: int
    keys: int
    left: Sequence[str]


class AccountRecords:
    """Reads the whole server to delete an account, which takes seconds for each 100,000 jobs."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._begin_removal = Script(redis, "operations/begin_removal")
        self._remove_account = Script(redis, "operations/remove_account")

    async def begin_removal(self, account_id: str, name: str, *, actor: str, address: str) -> AccountRemoval:
        """Put the account on the list of those to be removed, and disable it, in one move.

        One that is on the list stays there as it is. Raises `StoreUnavailable`.
        """
        row = json.dumps([name, actor, address, epoch_ms(datetime.now(UTC))])
        return _removal(account_id, await self._begin_removal(account=account_id, removal=row))

    async def removals(self) -> list[AccountRemoval]:
        rows: dict[str, str] = await self._redis.hgetall(redis_key(LISTED))
        return [_removal(account_id, row) for account_id, row in rows.items()]

    async def end_removal(self, account_id: str) -> None:
        """Take an account off the list: nothing of it is left that could be removed."""
        await self._redis.hdel(redis_key(LISTED), account_id)

    async def job_ids(self, account_id: str) -> list[str]:
        """List the account's jobs, also those that are missing in its list."""
        found: list[str] = []
        async for names in self._names("job:*"):
            found += [_parts(name)[1] for name in await self._naming(account_id, names, "job", "account")]
        return found

    async def remove(self, account_id: str) -> None:
        """Remove all but the account's own record and name. Its jobs must be gone. Safe to repeat."""
        await self._remove_names(account_id)
        key_ids: list[str] = await self._redis.zrange(redis_key("keys", account_id), 0, -1)
        ids = {account_id, *key_ids}
        async for names in self._names("*"):
            mine = [name for name in names if _is_removed(name, ids)]
            mine += await self._naming(account_id, names, "session", "holder")
            mine += await self._naming(account_id, names, "sign_in_link")
            uploads = await self._naming(account_id, names, "upload", "account")
            if uploads:
                await self._redis.zrem(redis_key("uploads_due"), *(_parts(name)[1] for name in uploads))
            mine += uploads
            if mine:
                await self._redis.delete(*mine)
        pools = await QueueStats(self._redis).pools()
        pipeline = self._redis.pipeline()
        pipeline.hdel(redis_key("unfinished"), account_id)
        pipeline.zrem(redis_key("webhooks_due"), account_id)
        for pool in pools:
            pipeline.zrem(redis_key("vtime", pool), account_id)
            pipeline.zrem(redis_key("idle_vtime", pool), account_id)
        async for names in self._names("granted:*"):
            for name in names:
                pipeline.srem(name, account_id)
        await pipeline.execute()

    async def remove_account(self, account_id: str, name: str) -> None:
        """Remove the account's record and free its name, as the last step. Safe to repeat."""
        await self._remove_account(account=account_id, name=name)

    async def still_naming(self, account_id: str) -> list[str]:
        """List the keys that still hold the account's id in name or value, apart from those of the audit log."""
        found: list[str] = []
        async for names in self._names("*"):
            looked_at = [each for each in names if _parts(each)[0] not in (*KEPT, LISTED)]
            for each, text in zip(looked_at, await self._texts(looked_at), strict=True):
                if account_id in each or account_id in text:
                    found.append(each.removeprefix(PREFIX))
        return sorted(found)

    async def _names(self, pattern: str) -> AsyncIterator[Sequence[str]]:
        batch: list[str] = []
        async for name in self._redis.scan_iter(match=PREFIX + pattern, count=AT_ONCE):
            batch.append(name)
            if len(batch) >= AT_ONCE:
                yield batch
                batch = []
        yield batch

    async def _naming(self, account_id: str, names: Iterable[str], family: str, *field: str) -> list[str]:
        """Return the keys of a family that name the account, in a field of a hash or as a text, on whatever list."""
        keys = [name for name in names if _parts(name)[0] == family]
        values = await self._ask(keys, lambda pipeline, key: (pipeline.hget if field else pipeline.get)(key, *field))
        return [key for key, value in zip(keys, values, strict=True) if account_id in (value or "").split(":")]

    async def _remove_names(self, account_id: str) -> None:
        """Free the names of the account's invited users."""
        ids: list[str] = await self._redis.zrange(redis_key("users", account_id), 0, -1)
        records = [redis_key("user", account_id, user_id) for user_id in ids]
        taken = await self._ask(records, lambda pipeline, name: pipeline.hget(name, "name"))
        if names := [redis_key("name", name) for name in taken if name]:
            await self._redis.delete(*names)

    async def _texts(self, names: Sequence[str]) -> list[str]:
        types = await self._ask(names, lambda pipeline, name: pipeline.type(name))
        kinds = dict(zip(names, types, strict=True))
        values = await self._ask(names, lambda pipeline, name: _READ[kinds[name]](pipeline, name))
        return [str(value) for value in values]

    async def _ask(self, names: Sequence[str], ask: Any) -> list[Any]:
        if not names:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            ask(pipeline, name)
        return await pipeline.execute()


_READ: Mapping[str, Any] = {
    "string": lambda pipeline, name: pipeline.get(name),
    "hash": lambda pipeline, name: pipeline.hgetall(name),
    "zset": lambda pipeline, name: pipeline.zrange(name, 0, -1),
    "set": lambda pipeline, name: pipeline.smembers(name),
    "list": lambda pipeline, name: pipeline.lrange(name, 0, -1),
    "none": lambda pipeline, name: pipeline.exists(name),
}
"""The way to read a value, by its type; a key may have gone since its name was read."""


def _removal(account_id: str, row: str) -> AccountRemoval:
    name, actor, address, began_ms = json.loads(row)
    return AccountRemoval(account_id, name, actor, address, from_epoch_ms(began_ms))


def _parts(name: str) -> list[str]:
    return name.removeprefix(PREFIX).split(":")


def _is_removed(name: str, ids: set[str]) -> bool:
    family, *parts = _parts(name)
    return bool(ids.intersection(parts)) and family not in ("account", "job", *CATALOG, *KEPT)


class AccountDeletion:
    """Deletes accounts of this process's service."""

    def __init__(self, process: Process, images: ImageStore) -> None:
        redis, settings = process.redis, process.settings
        self.records = AccountRecords(redis)
        self.sessions = SessionStore(redis, CUSTOMERS)
        self.api_keys = ApiKeyStore(redis, settings)
        self.audit = AuditLog(redis, settings)
        self.catalog = CatalogReader(redis)
        self.registry = AdapterRegistry(redis, settings)
        self.weights = LoraWeights(redis, LoraFiles(settings))
        self.deletions = Deletions(redis, images)
        self.images = images
        self.background = process.background

    async def delete(self, account: Account, by: Actor) -> DeletedAccount:
        """Disable the account, remove everything that is its own, and look for its id in every key.

        Its jobs, images, uploads, LoRAs, keys, sessions, grants and name go. Running jobs end at once: later writes of
        their workers are fenced off. The housekeeper repeats this after a crash, which is safe at any point. Raises
        `StoreUnavailable`.
        """
        return await self.background.run_to_end(self._finish(await self._begin(account, by)))

    async def delete_own(self, account: Account, by: Actor) -> DeletedAccount | None:
        """Delete the account of whoever asks; return None when the housekeeper has to finish it.

        Nobody can ask a second time. Raises `StoreUnavailable` only while the account is as it was.
        """
        removal = await self._begin(account, by)
        try:
            deleted = await self.background.run_to_end(self._finish(removal))
        except StoreUnavailable as error:
            _log.warning("the deletion of %s is left to the housekeeper: %s", account.id, error)
            return None
        if deleted.left:
            _log.warning("%s is deleted and still named by %s", account.id, ", ".join(deleted.left))
        return deleted

    async def finish_removals(self) -> int:
        """Finish the deletions of accounts that were cut short; return how many."""
        cut_short = datetime.now(UTC) - CUT_SHORT_AFTER
        removals = [removal for removal in await self.records.removals() if removal.began_at < cut_short]
        for removal in removals:
            await self._finish(removal)
        return len(removals)

    async def _begin(self, account: Account, by: Actor) -> AccountRemoval:
        """Begin the deletion: from here on nobody can act as the account, and the deletion ends through any crash."""
        return await self.records.begin_removal(account.id, account.name, actor=by.name, address=by.address)

    async def _finish(self, removal: AccountRemoval) -> DeletedAccount:
        account_id = removal.account_id
        await self.sessions.revoke_all(account_id)
        keys = len(await self.api_keys.list(account_id))
        jobs = await self._remove(account_id)
        by = Actor(removal.actor, removal.address)
        await self.audit.record(account_id, Act.ACCOUNT_DELETED, by, entry="deleted")
        await self.records.remove_account(account_id, removal.name)
        left = await self.records.still_naming(account_id)
        for _ in range(PASSES):
            if not left:
                break
            jobs += await self._remove(account_id)
            await self.records.remove_account(account_id, removal.name)
            left = await self.records.still_naming(account_id)
        images = await self.images.names(self.images.account_folder(account_id))
        await self.records.end_removal(account_id)
        return DeletedAccount(jobs, keys, [*left, *images])

    async def _remove(self, account_id: str) -> int:
        """Return how many jobs there were."""
        job_ids = await self.records.job_ids(account_id)
        for job_id in job_ids:
            await self.deletions.delete_job(job_id, account_id=account_id, force=True)
            if (objects := await self.deletions.objects(job_id)) is not None:
                await remove_objects(self.images, objects)
        for lora_id in await self.catalog.owned_ids(account_id):
            await remove_lora(self.registry, self.weights, lora_id)
        await self.records.remove(account_id)
        await self.images.delete_folder(self.images.account_folder(account_id))
        return len(job_ids)
