"""Polls: an API key and a job's record in one round trip."""

from typing import NamedTuple

from redis.asyncio import Redis

from serve_app.domain.accounts import AuthResult
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.stores.auth import anonymous, auth_query
from serve_app.stores.records import read_snapshot
from serve_app.stores.script import Rewrite, Script


class Poll(NamedTuple):
    """Who is calling, and the job asked for: None for who may not see it."""

    auth: AuthResult
    job: Job | None


class Poller:
    """Reads a job for the holder of a key."""

    def __init__(self, redis: Redis, settings: Settings, *, rewrite: Rewrite | None = None) -> None:
        self._settings = settings
        self._poll = Script(redis, "poll", rewrite)

    async def poll(self, secret: str, variant: Variant, job_id: str, *, of: Variant | None) -> Poll:
        """Authenticate without counting, and read the job if it is the account's (and was made on `of`): one script.

        Raises `UnreadableRecord`, `StoreUnavailable`.
        """
        query = auth_query(secret, variant, self._settings)
        if query is None:
            return Poll(anonymous(variant, self._settings), None)
        caller, snapshot = await self._poll(**query.args, job_id=job_id, job_interface=of)
        return Poll(query.read(caller), read_snapshot(snapshot))
