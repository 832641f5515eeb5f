"""Deletes an account and all that is its own, found by its own lists; its audit log stays under a pseudonym.

What is on no list is gone within a day by itself: links, answered calls, counts of tries, sessions that lost theirs.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.sessions import CUSTOMERS, SessionStore
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor
from serve_app.domain.durations import epoch_ms, from_epoch_ms
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.requests import Variant
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
from serve_app.webhooks.endpoints import OF_JOBS

AT_ONCE = 500
LISTED = "accounts_removing"
PASSES = 3
"""How often everything is removed at most: a request that was under way may have left something behind."""
CUT_SHORT_AFTER = timedelta(minutes=1)
"""A deletion that is still on the list by then is taken up by the housekeeper; two at once do no harm."""
OF_A_REQUEST, OF_A_TURN = timedelta(seconds=10), timedelta(seconds=30)
"""So long a request removes jobs before it leaves them to the housekeeper, and that one before it sees to others."""

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
    """What was removed, and what is still there: keys that were written meanwhile, or LoRAs offered to the account."""

    jobs: int
    keys: int
    left: Sequence[str]


class AccountRecords:
    """Reads what an account's own lists name, whatever others have."""

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
        """List some of the account's jobs, none in the end."""
        return await self._redis.zrange(redis_key("jobs", account_id), 0, AT_ONCE - 1)

    async def forget_job(self, account_id: str, job_id: str) -> None:
        """Take a job off the account's list: its record is gone."""
        await self._redis.zrem(redis_key("jobs", account_id), job_id)

    async def remove(self, account_id: str) -> None:
        """Remove all but the account's own record and name. Its jobs must be gone. Safe to repeat."""
        await self._remove_uploads(account_id)
        lists = await self._lists(account_id)
        records = [redis_key("user", account_id, user_id) for user_id in lists["users"]]
        taken = await self._ask(records, lambda pipeline, name: pipeline.hget(name, "name"))
        granted = list(await self._redis.hgetall(redis_key("grants", account_id)))
        pools = await QueueStats(self._redis).pools()
        pipeline = self._redis.pipeline()
        for lora_id in granted:
            pipeline.srem(redis_key("granted", lora_id), account_id)
        pipeline.zrem(redis_key("webhooks_due"), account_id)
        for pool in pools:
            pipeline.zrem(redis_key("vtime", pool), account_id)
            pipeline.zrem(redis_key("idle_vtime", pool), account_id)
        pipeline.delete(*(redis_key("name", name) for name in taken if name), *self._names(account_id, lists))
        await pipeline.execute()

    async def remove_account(self, account_id: str, name: str) -> None:
        """Remove the account's record and free its name, as the last step. Safe to repeat."""
        await self._remove_account(account=account_id, name=name)

    async def left(self, account_id: str) -> list[str]:
        """List the keys of the account that are still there, and that of LoRAs of others that are offered to its id."""
        names = [*self._names(account_id, await self._lists(account_id)), redis_key("loras_offered", account_id)]
        found = await self._ask(names, lambda pipeline, name: pipeline.exists(name))
        return [name.removeprefix(PREFIX) for name, is_there in zip(names, found, strict=True) if is_there]

    async def _lists(self, account_id: str) -> dict[str, list[str]]:
        """Return the ids of the account's keys, users and endpoints, and `endpoint:message` of deliveries."""
        indexes = ("keys", "users", "webhooks", "webhook_due")
        names = [redis_key(index, account_id) for index in indexes]
        found = dict(zip(indexes, await self._ask(names, _whole), strict=True))
        endpoints = [*found["webhooks"], OF_JOBS]
        logs = await self._ask([redis_key("webhook_log", account_id, each) for each in endpoints], _whole)
        ended = [f"{endpoint}:{message}" for endpoint, log in zip(endpoints, logs, strict=True) for message in log]
        return {**found, "deliveries": [*found["webhook_due"], *ended]}

    def _names(self, account_id: str, lists: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the name of every key that is the account's alone, but for its jobs, uploads, record and name."""
        windows = [redis_key("rate", account_id, variant) for variant in Variant]
        last_day = datetime.now(UTC).toordinal() - date(1970, 1, 1).toordinal() + 1
        return [
            *(redis_key(family, account_id) for family in _OF_ACCOUNT),
            *(redis_key("stored", account_id, variant) for variant in Variant),
            *windows,
            *(f"{window}:{key_id}" for window in windows for key_id in lists["keys"]),
            *(redis_key("key", key_id) for key_id in lists["keys"]),
            *(redis_key("user", account_id, user_id) for user_id in lists["users"]),
            *(redis_key("webhook", account_id, endpoint) for endpoint in lists["webhooks"]),
            *(redis_key("webhook_log", account_id, endpoint) for endpoint in (*lists["webhooks"], OF_JOBS)),
            *(redis_key("webhook_delivery", account_id, each) for each in lists["deliveries"]),
            *(redis_key("usage", account_id, str(last_day - ago)) for ago in range(USAGE_DAYS)),
        ]

    async def _remove_uploads(self, account_id: str) -> None:
        while ids := await self._redis.zrange(redis_key("uploads", account_id), 0, AT_ONCE - 1):
            records = [redis_key("upload", image_id) for image_id in ids]
            digests = await self._ask(records, lambda pipeline, name: pipeline.hget(name, "sha256"))
            pipeline = self._redis.pipeline()
            pipeline.delete(*records, *(redis_key("image_uses", image_id) for image_id in ids))
            pipeline.delete(*(redis_key("upload_of", account_id, digest or "") for digest in digests))
            pipeline.zrem(redis_key("uploads_due"), *ids)
            pipeline.zrem(redis_key("uploads", account_id), *ids)
            await pipeline.execute()

    async def _ask(self, names: Sequence[str], ask: Any) -> list[Any]:
        if not names:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            ask(pipeline, name)
        return await pipeline.execute()


_OF_ACCOUNT = (
    "keys", "users", "sessions", "grants", "jobs", "uploads", "uploaded", "webhooks", "webhook_due", "sign_in_tries",
)  # fmt: skip
"""Families with one key for each account."""
USAGE_DAYS = 402
"""A day's usage lives 400 days (`finish.lua`)."""


def _whole(pipeline: Any, name: str) -> None:
    pipeline.zrange(name, 0, -1)


def _removal(account_id: str, row: str) -> AccountRemoval:
    name, actor, address, began_ms = json.loads(row)
    return AccountRemoval(account_id, name, actor, address, from_epoch_ms(began_ms))


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
        """Disable the account, and remove everything that is its own.

        Its jobs, images, uploads, LoRAs, keys, sessions, grants and name go. Running jobs end at once: later writes of
        their workers are fenced off. The housekeeper repeats this after a crash, which is safe at any point. Raises
        `StoreUnavailable`.
        """
        deleted = await self.background.run_to_end(self._finish(await self._begin(account, by)))
        assert deleted is not None, "it has as long as it takes"
        return deleted

    async def delete_own(self, account: Account, by: Actor) -> DeletedAccount | None:
        """Delete the account of whoever asks; return None when the housekeeper has to finish it.

        Nobody can ask a second time. Raises `StoreUnavailable` only while the account is as it was.
        """
        removal = await self._begin(account, by)
        try:
            return await self.background.run_to_end(self._finish(removal, within=OF_A_REQUEST))
        except StoreUnavailable as error:
            _log.warning("the deletion of %s is left to the housekeeper: %s", account.id, error)
            return None

    async def finish_removals(self) -> int:
        """Go on for a while with the deletions of accounts that were cut short; return how many have ended."""
        cut_short = datetime.now(UTC) - CUT_SHORT_AFTER
        removals = [removal for removal in await self.records.removals() if removal.began_at < cut_short]
        return sum([await self._finish(removal, within=OF_A_TURN) is not None for removal in removals])

    async def _begin(self, account: Account, by: Actor) -> AccountRemoval:
        """Begin the deletion: from here on nobody can act as the account, and the deletion ends through any crash."""
        return await self.records.begin_removal(account.id, account.name, actor=by.name, address=by.address)

    async def _finish(self, removal: AccountRemoval, within: timedelta = timedelta.max) -> DeletedAccount | None:
        """Remove all that is left; None where that takes longer, and another call goes on."""
        account_id, ends = removal.account_id, time.monotonic() + within.total_seconds()
        await self.sessions.revoke_all(account_id)
        keys = len(await self.api_keys.list(account_id))
        jobs, left = 0, list[str]()
        for _ in range(PASSES):
            while job_ids := await self.records.job_ids(account_id):
                for job_id in job_ids:
                    await self._delete_job(account_id, job_id)
                jobs += len(job_ids)
                if time.monotonic() > ends:
                    _log.info("account %s: %d more jobs deleted, further ones are left", account_id, jobs)
                    return None
            await self._remove(account_id)
            if not (left := await self.records.left(account_id)):
                break
        by = Actor(removal.actor, removal.address)
        await self.audit.record(account_id, Act.ACCOUNT_DELETED, by, entry="deleted")
        await self.records.remove_account(account_id, removal.name)
        left += await self.images.names(self.images.account_folder(account_id))
        await self.records.end_removal(account_id)
        if left:
            _log.warning("%s is deleted, and %s is left", account_id, ", ".join(left))
        return DeletedAccount(jobs, keys, left)

    async def _delete_job(self, account_id: str, job_id: str) -> None:
        if await self.deletions.delete_job(job_id, account_id=account_id, force=True) is None:
            await self.records.forget_job(account_id, job_id)
        if (objects := await self.deletions.objects(job_id)) is not None:
            await remove_objects(self.images, objects)

    async def _remove(self, account_id: str) -> None:
        for lora_id in await self.catalog.owned_ids(account_id):
            await remove_lora(self.registry, self.weights, lora_id)
        await self.records.remove(account_id)
        await self.images.delete_folder(self.images.account_folder(account_id))
