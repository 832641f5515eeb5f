"""Inspects a Redis server: whether a service can use it, and keeps what it acknowledges."""

import re
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from serve_app.domain.errors import StoreUnavailable
from serve_app.store.keys import redis_key
from serve_app.store.redis_address import blocking_client, place_of
from serve_app.store.redis_client import OPTIONS, connect_sync
from serve_app.store.redis_process import OLDEST

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""The settings under which nothing accepted is lost; `everysec` loses up to a second, eviction loses jobs."""

CORRECT = "correct ATELIER_REDIS_URL"
IN_CLUSTER = "is in Cluster mode, where what a script changes lies on several servers: use one primary, with Sentinels"


def require_usable(url: str) -> None:
    """Ask the server once whether a service can use it.

    Raises `StoreUnavailable`, whose message names the cause and what to do: for operators alone, since it holds the
    address.
    """
    if found := _why_unusable(_asked(url)):
        raise StoreUnavailable(f"Redis at {place_of(url)} {found}")


def require_durable(url: str, *, may_lose_jobs: bool) -> None:
    """Ask the server once whether it keeps what it acknowledges, as far as `INFO` tells: managed ones tell no more.

    Raises `StoreUnavailable` as `require_usable` does, but for nothing that passes: a start waits until it has.
    """
    try:
        info = _asked(url)
    except StoreUnavailable:
        return
    found = IN_CLUSTER if info.get("cluster_enabled") else ""
    if not may_lose_jobs and (lossy := _why_lossy(info)):
        found = found or f"{lossy}, or ATELIER_REDIS_MAY_LOSE_JOBS=true, if jobs may be lost"
    if found:
        raise StoreUnavailable(f"Redis at {place_of(url)} {found}")


def _asked(url: str) -> Mapping[str, Any]:
    """Return what the server tells of itself; nothing to a user that may not ask: what lacks is said where needed."""
    with blocking_client(url, **OPTIONS, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return cast(Any, client).info()
        except NoPermissionError:
            return {}
        except RedisError as error:
            raise StoreUnavailable(f"Redis at {place_of(url)} {_why_not_asked(error)}") from error


def _why_not_asked(error: RedisError) -> str:
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    said = re.sub(r" : <.*", "", " ".join(str(error).split())).rstrip(".")  # without redis-py's own objects
    if "unknown command" in said:  # HELLO, with which a connection begins
        return f"is too old: {'.'.join(map(str, OLDEST))} or later is needed"
    if "HELLO must be called" in said or "NOAUTH" in said:
        return f"asks for a password: {CORRECT}"
    if isinstance(error, AuthenticationError):
        return f"refuses the user or the password ({said}): {CORRECT}"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"has a name that cannot be resolved: {CORRECT}, or look at this machine's DNS"
    if isinstance(error, RedisTimeoutError):
        return f"does not answer: start it, {CORRECT}, or open the firewall between"
    return f"cannot be reached ({said}): start it, or {CORRECT}"


def _why_unusable(info: Mapping[str, Any]) -> str:
    """Say what is wrong with a server that answers; nothing when it can be used."""
    if not info:
        return ""
    version = str(info["redis_version"])  # Valkey's is that of the Redis which it is compatible with
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        return f"is version {version}: {'.'.join(map(str, OLDEST))} or later is needed"
    if info.get("role") == "slave":
        return f"is a replica, which takes no writes: {CORRECT} to name the primary, or its Sentinels"
    if info.get("cluster_enabled"):
        return IN_CLUSTER
    if info.get("loading"):
        return "is still reading its file: start again when it has"
    if info.get("aof_last_write_status", "ok") != "ok":
        return "cannot write its file: free some space on its disk"
    return ""


def _why_lossy(info: Mapping[str, Any]) -> str:
    """Say how a server loses what it has acknowledged; nothing where it does not tell."""
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        return f"deletes jobs when it is full ({info['maxmemory_policy']}): set maxmemory-policy noeviction"
    if not info.get("aof_enabled", 1):
        return "forgets accepted jobs when it ends: set appendonly yes and appendfsync always"
    return ""


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
    lossy: str
    """How it loses what it has acknowledged, as far as `INFO` tells; empty where it does not."""

    @property
    def wrong(self) -> dict[str, str]:
        """Settings that must change: name → the value required."""
        return {name: value for name, value in DURABLE.items() if (self.settings or DURABLE).get(name) != value}


def inspect_redis(url: str) -> RedisFacts:
    """Read a server's version, memory and durability. Raises `StoreUnavailable`, also for a refused user."""
    require_usable(url)
    with connect_sync(url) as client:
        try:
            info: Mapping[str, Any] = client.info()
        except (AuthenticationError, NoPermissionError) as refused:
            raise StoreUnavailable(f"Redis refuses this user: {refused}") from refused
        return RedisFacts(
            release=release_of(info),
            identity=f"{info['run_id']}/{client.connection_pool.connection_kwargs.get('db', 0)}",
            used_bytes=int(info["used_memory"]),
            limit_bytes=int(info.get("maxmemory", 0)),
            settings=_durability(client),
            lossy=_why_lossy(info),
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
