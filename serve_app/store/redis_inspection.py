"""Inspects a Redis server: whether it is reachable, and keeps what it acknowledges."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect_sync, redis_errors

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings under which nothing accepted is lost; `everysec` loses up to a second, eviction loses jobs."""

SAMPLE, LEAST_SAMPLE = 1_000, 100
"""Keys looked at for the span of records, and how many of them must be ended jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisFacts:
    server: str
    version: str
    used_bytes: int
    limit_bytes: int
    """Its `maxmemory`; 0 is none."""
    settings: Mapping[str, str] | None
    """Those of `DURABLE` as they are; None when this user may not ask (managed services, ACLs)."""

    @property
    def wrong(self) -> dict[str, str]:
        """Settings that must change: name → the value required."""
        return {name: value for name, value in DURABLE.items() if (self.settings or DURABLE).get(name) != value}


def inspect_redis(url: str) -> RedisFacts:
    """Read a server's version, memory and durability. Raises `StoreUnavailable`, also for a refused user."""
    with connect_sync(url) as client, redis_errors():
        untyped = cast(Any, client)
        try:
            server: dict[str, str] = untyped.info("server")
            memory: dict[str, str] = untyped.info("memory")
        except (AuthenticationError, NoPermissionError) as refused:
            raise StoreUnavailable(f"Redis refuses this user: {refused}") from refused
        return RedisFacts(
            server="valkey" if "valkey_version" in server else "redis",
            version=server.get("valkey_version", server["redis_version"]),
            used_bytes=int(memory["used_memory"]),
            limit_bytes=int(memory.get("maxmemory", 0)),
            settings=_durability(untyped),
        )


def span_of_records(url: str, retention: timedelta) -> timedelta | None:
    """Estimate for how long ended jobs have been kept, from a sample of their times to live.

    At a steady rate ages are even, so that the oldest is twice as old as the mean. None when there are too few. Raises
    `StoreUnavailable`.
    """
    with connect_sync(url) as client, redis_errors():
        untyped = cast(Any, client)
        with untyped.pipeline(transaction=False) as pipeline:
            for _ in range(SAMPLE):
                pipeline.randomkey()
            names: list[str] = [name for name in pipeline.execute() if name and name.startswith(redis_key("job", ""))]
            for name in names:
                pipeline.pttl(name)
            left = [timedelta(milliseconds=ttl) for ttl in pipeline.execute() if ttl >= 0]
    if len(left) < LEAST_SAMPLE:
        return None
    mean = retention - sum(left, timedelta()) / len(left)
    return min(2 * mean, retention)


def server_identity(url: str) -> str:
    """Name the server that answers and the database in it; a restarted server is another one.

    Raises `StoreUnavailable`.
    """
    with connect_sync(url) as client, redis_errors():
        untyped = cast(Any, client)
        try:
            run_id: str = untyped.info("server")["run_id"]
        except (AuthenticationError, NoPermissionError) as refused:
            raise StoreUnavailable(f"Redis refuses this user: {refused}") from refused
        return f"{run_id}/{untyped.connection_pool.connection_kwargs.get('db', 0)}"


def keys_by_pepper(url: str) -> Mapping[int, int]:
    """Count the API keys that work under each version of the pepper.

    Keys from before versions count for the first. Raises `StoreUnavailable`.
    """
    found: Counter[int] = Counter()
    with connect_sync(url) as client, redis_errors():
        untyped = cast(Any, client)
        seconds, micros = untyped.time()
        now_ms = seconds * 1000 + micros // 1000
        for name in untyped.scan_iter(match=redis_key("key", "*"), count=500):
            revoked, expires, version = untyped.hmget(name, "revoked", "expires", "pepper")
            if not revoked and (expires is None or int(expires) > now_ms):
                found[int(version or 1)] += 1
    return found


def _durability(client: Any) -> dict[str, str] | None:
    try:
        found = [cast(dict[str, str], client.config_get(name)) for name in DURABLE]
    except (NoPermissionError, ResponseError):
        return None
    return {name: value for answer in found for name, value in answer.items()}
