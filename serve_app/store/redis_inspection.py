"""Inspects a Redis server: whether it is reachable, and keeps what it acknowledges."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect_sync

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings under which nothing accepted is lost; `everysec` loses up to a second, eviction loses jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RedisFacts:
    release: str
    """The server's name and version, such as `valkey 8.1.7`."""
    identity: str
    """The server that answers and the database in it; a restarted server is another one."""
    used_bytes: int
    limit_bytes: int
    """Redis's `maxmemory` in bytes; 0 when it has no limit."""
    settings: Mapping[str, str] | None
    """The settings of `DURABLE` as they are; None when this user may not ask (managed services, ACLs)."""

    @property
    def wrong(self) -> dict[str, str]:
        """Settings that must change: name → the value required."""
        return {name: value for name, value in DURABLE.items() if (self.settings or DURABLE).get(name) != value}


def inspect_redis(url: str) -> RedisFacts:
    """Read a server's version, memory and durability. Raises `StoreUnavailable`, also for a refused user."""
    with connect_sync(url) as client:
        try:
            server: Mapping[str, Any] = client.info("server")
            memory: Mapping[str, Any] = client.info("memory")
        except (AuthenticationError, NoPermissionError) as refused:
            raise StoreUnavailable(f"Redis refuses this user: {refused}") from refused
        return RedisFacts(
            release=release_of(server),
            identity=f"{server['run_id']}/{client.connection_pool.connection_kwargs.get('db', 0)}",
            used_bytes=int(memory["used_memory"]),
            limit_bytes=int(memory.get("maxmemory", 0)),
            settings=_durability(client),
        )


def release_of(info: Mapping[str, Any]) -> str:
    """Return the name and version of a server from its answer to `INFO server`."""
    return f"valkey {info['valkey_version']}" if "valkey_version" in info else f"redis {info['redis_version']}"


def keys_by_pepper(url: str) -> Mapping[int, int]:
    """Count the API keys that work under each version of the pepper. Raises `StoreUnavailable`."""
    found: Counter[int] = Counter()
    with connect_sync(url) as client:
        seconds, micros = client.time()
        now_ms = seconds * 1000 + micros // 1000
        for name in client.scan_iter(match=redis_key("key", "*"), count=500):
            revoked, expires, version = client.hmget(name, "revoked", "expires", "pepper")
            if not revoked and (expires is None or int(expires) > now_ms):
                found[int(version or 1)] += 1
    return found


def _durability(client: Any) -> dict[str, str] | None:
    try:
        found = [client.config_get(name) for name in DURABLE]
    except ResponseError:
        return None
    return {name: value for answer in found for name, value in answer.items()}
