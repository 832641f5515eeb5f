"""Reads a job for the holder of an API key in one round trip."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from serve_app.accounts.api_keys import KeySent
from serve_app.accounts.auth import anonymous, auth_query
from serve_app.domain.accounts import AuthResult, Scope
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.jobs.records import read_snapshot
from serve_app.settings import Settings
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Script


class Poll(NamedTuple):
    """The caller, and the job; None if the caller may not see it."""

    auth: AuthResult
    job: Job | None


class Poller:
    """Reads a job for the holder of a key; refuses a key that polls too fast without asking Redis.

    The bound is of this process, so that polls stay reads: a count in Redis would be a write, synced to disk.
    """

    def __init__(self, redis: RedisClient, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._poll = Script(redis, "jobs/poll", writes=False)
        self._clock = clock
        self._second = 0
        self._counts: dict[tuple[str, str, Variant], int] = {}
        self._known: dict[tuple[str, str, Variant], AuthResult] = {}

    async def poll(self, secret: KeySent, variant: Variant, job_id: str, *, of: Variant | None) -> Poll:
        """Authenticate without counting, and read the account's job, in one script.

        With `of`, only a job that was made on that interface is read, without its request, which the interface does not
        show. A valid key that polls more than `polls_per_second` times in a second gets a limited poll, without a job.
        Raises `UnreadableRecord`, `StoreUnavailable`.
        """
        query = auth_query(secret, variant, self._settings)
        if query is None:
            return Poll(anonymous(variant, self._settings), None)
        key = (query.key.id, query.key.digest, variant)
        if self._count(key) > self._settings.polls_per_second and key in self._known:
            return Poll(replace(self._known[key], limited=True), None)
        caller, snapshot = await self._poll(**query.args, job_id=job_id, job_interface=of)
        auth = query.read(caller)
        if auth.caller is not None:
            self._known[key] = auth
        return Poll(auth, read_snapshot(snapshot, with_request=of is None))

    async def still_reads(self, secret: KeySent, variant: Variant) -> bool:
        """Whether a key that once passed may still read, which counts as no poll of it. It may while Redis is away."""
        query = auth_query(secret, variant, self._settings)
        if query is None:
            return False
        try:
            answer, _ = await self._poll(**query.args, job_id="", job_interface=None)
        except StoreUnavailable:
            return True
        caller = query.read(answer).caller
        return caller is not None and Scope.READ in caller.scopes

    def _count(self, key: tuple[str, str, Variant]) -> int:
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._counts.clear()
            self._known.clear()
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]
