"""Copies what a Redis server holds, key by key with times to live.

It uses commands alone, so that it reaches any server.
"""

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from redis.exceptions import NoPermissionError, ResponseError

from serve_app.domain.errors import StoreUnavailable
from serve_app.stores.redis import connect_sync, redis_errors
from serve_app.stores.redis_keys import PREFIX, redis_key

AT_ONCE = 500
PAUSE_MS, RENEW_S = 30_000, 5.0
"""Of writes while a copy is made: renewed, so that the writes of a service go on soon after a copy that was killed."""
REPLY_TIMEOUT_S = 60.0
_DATA = ("account", "key", "job")
"""Families that only a service that was used has; the rest is made by any start."""


class CopiedKey(NamedTuple):
    """A copied key: its name, its value as `DUMP` gives it, its expiry, and a job's or LoRA's fields.

    The expiry is in epoch milliseconds, 0 for never.
    """

    name: str
    value: bytes
    ends_ms: int
    fields: dict[str, str]


class RedisCopy:
    """Reads all keys of the service at one moment, and writes them again.

    Every method may raise `StoreUnavailable`.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def open(self) -> Generator["OpenedCopy"]:
        with connect_sync(self._url, decode=False, reply_timeout_s=REPLY_TIMEOUT_S) as client, redis_errors():
            yield OpenedCopy(cast(Any, client))


class OpenedCopy:
    def __init__(self, client: Any) -> None:
        self._client = client

    def facts(self) -> tuple[str, int]:
        """Return the server's version, and its clock in ms."""
        version = self._client.info("server")["redis_version"]
        return version.decode() if isinstance(version, bytes) else version, self._now()

    def read(self, *, pause: bool) -> Iterator[Sequence[CopiedKey]]:
        """Yield all keys, in parts.

        With `pause`, no client writes meanwhile: calls of the service wait, or are answered 503 after 3 seconds.
        """
        if not pause:
            yield from self._batches()
            return
        self._pause_writes()
        try:
            paused_at = time.monotonic()
            for batch in self._batches():
                yield batch
                if time.monotonic() - paused_at > PAUSE_MS / 1000:
                    raise StoreUnavailable("the copy took longer than writes were paused: try again on a faster disk")
                if time.monotonic() - paused_at > RENEW_S:
                    self._pause_writes()
                    paused_at = time.monotonic()
        finally:
            self._client.execute_command("CLIENT UNPAUSE")

    def is_used(self) -> bool:
        """Return whether there is an account, a key or a job."""
        return any(True for family in _DATA for _ in self._names(redis_key(family, "*")))

    def begin(self, digest: str) -> None:
        """Empty the server of the service's keys, and mark it as being restored.

        Raises `StoreUnavailable` for a server in use.
        """
        marked = self._client.get(redis_key("restoring"))
        if marked is None and self.is_used():
            raise StoreUnavailable("this Redis holds accounts or jobs: a backup is restored into an empty one")
        self._client.set(redis_key("restoring"), digest)
        others = (name for name in self._names(f"{PREFIX}*") if name.decode() != redis_key("restoring"))
        for names in _batched(others):
            self._client.delete(*names)

    def write(self, keys: Iterable[CopiedKey]) -> None:
        """Write keys, except expired ones. Safe to repeat."""
        now = self._now()
        for batch in _batched(key for key in keys if not 0 < key.ends_ms <= now):
            pipeline = self._client.pipeline(transaction=False)
            for key in batch:
                pipeline.restore(key.name, key.ends_ms, key.value, replace=True, absttl=bool(key.ends_ms))
            pipeline.execute()

    def end(self) -> int:
        """End the restoring; return how many keys there are."""
        self._client.delete(redis_key("restoring"))
        return sum(1 for _ in self._names(f"{PREFIX}*"))

    def _pause_writes(self) -> None:
        try:
            self._client.execute_command("CLIENT PAUSE", PAUSE_MS, "WRITE")
        except (NoPermissionError, ResponseError) as refused:
            raise StoreUnavailable(
                f"this Redis does not pause writes ({refused}): stop the service, --stopped"
            ) from None

    def _batches(self) -> Iterator[Sequence[CopiedKey]]:
        for names in _batched(self._names(f"{PREFIX}*")):
            pipeline = self._client.pipeline(transaction=True)
            for name in names:
                pipeline.dump(name)
                pipeline.pttl(name)
            now, has_fields = self._now(), [name for name in names if _has_fields(name)]
            for name in has_fields:
                pipeline.hgetall(name)
            answers: list[Any] = pipeline.execute()
            fields = dict(zip(has_fields, answers[2 * len(names) :], strict=True))
            yield [
                CopiedKey(name.decode(), value, now + life if life >= 0 else 0, _text(fields.get(name, {})))
                for name, value, life in zip(
                    names, answers[: 2 * len(names) : 2], answers[1 : 2 * len(names) : 2], strict=True
                )
                if value is not None
            ]

    def _names(self, pattern: str) -> Iterator[bytes]:
        seen: set[bytes] = set()
        for name in self._client.scan_iter(match=pattern, count=AT_ONCE):  # may name a key twice
            if name not in seen:
                seen.add(name)
                yield name

    def _now(self) -> int:
        seconds, micros = self._client.time()
        return seconds * 1000 + micros // 1000


def _has_fields(name: bytes) -> bool:
    return name.startswith((redis_key("job", "").encode(), redis_key("lora", "").encode()))


def _text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


def _batched(items: Iterable[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for item in items:
        batch.append(item)
        if len(batch) >= AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
