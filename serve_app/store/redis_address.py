"""Addresses of Redis: one server by TCP, TLS or a socket, or the primary that Sentinels name.

`redis+sentinel://user:password@host:26379,host:26379/name/db` asks the Sentinels in turn for the primary called `name`;
with `rediss+sentinel://` they and the servers speak TLS. User and password are the servers'; `sentinel_username` and
`sentinel_password` in the query are the Sentinels' own.
"""

import asyncio
import re
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import redis as redis_py
import redis.asyncio as redis_async
from redis.asyncio.connection import AbstractConnection, Connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from redis.sentinel import Sentinel

DIRECT = ("redis", "rediss", "unix")
BY_SENTINEL = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
KINDS = "a redis://, rediss://, unix:// or redis+sentinel:// address"
SENTINEL_PORT = 26379
_OF_SENTINELS = "sentinel_"


class SentinelAddress(NamedTuple):
    sentinels: Sequence[tuple[str, int]]
    service: str
    """The primary's name."""
    server: dict[str, Any]
    """redis-py's options of a connection to the servers."""
    sentinel: dict[str, Any]
    """redis-py's options of a connection to the Sentinels."""

    def sentinel_options(self, options: dict[str, Any], retry: type[AsyncRetry | Retry]) -> dict[str, Any]:
        """Return the options for the Sentinels: each is asked once, with a client's timeouts, and then the next."""
        timeouts = {name: value for name, value in options.items() if name.startswith("socket_")}
        return {**timeouts, **self.sentinel, "retry": retry(NoBackoff(), 0)}


def is_redis_address(text: str) -> bool:
    try:
        address = split_address(text)
        if address.scheme in BY_SENTINEL:
            read_sentinel_address(text)
            return True
        _ = address.port
    except ValueError:
        return False
    return address.scheme in DIRECT and bool(address.netloc or address.path)


def split_address(url: str) -> SplitResult:
    """Split an address that may have several hosts, of which some are in brackets: newer Pythons' `urlsplit` refuses it."""
    scheme, _, rest = url.partition("://")
    netloc = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://{rest[len(netloc) :]}")._replace(netloc=netloc)


def place_of(url: str) -> str:
    """Return the hosts and ports of an address, or its socket's path, without user and password."""
    address = split_address(url)
    return address.netloc.rpartition("@")[2] or address.path


def read_sentinel_address(url: str) -> SentinelAddress:
    """Read an address with Sentinels. Raises `ValueError`."""
    address = split_address(url)
    credentials, _, hosts = address.netloc.rpartition("@")
    service, _, database = address.path.strip("/").partition("/")
    if not hosts or not service or (database and not database.isdecimal()):
        raise ValueError("must be like redis+sentinel://host:26379,host:26379/name, where name is the primary's")
    query = parse_qsl(address.query)
    for_servers = urlencode([pair for pair in query if not pair[0].startswith(_OF_SENTINELS)])
    netloc = f"{credentials}@localhost" if credentials else "localhost"
    server = dict(parse_url(urlunsplit((BY_SENTINEL[address.scheme], netloc, f"/{database}", for_servers, ""))))
    for name in ("host", "port", "connection_class"):
        server.pop(name, None)
    tls: dict[str, Any] = {"ssl": True} if address.scheme.startswith("rediss") else {}
    tls |= {name: value for name, value in server.items() if name.startswith("ssl_")}
    own = {name.removeprefix(_OF_SENTINELS): value for name, value in query if name.startswith(_OF_SENTINELS)}
    if unknown := own.keys() - {"username", "password"}:
        raise ValueError(f"sentinel_{min(unknown)} is not known")
    return SentinelAddress([_host(text) for text in hosts.split(",")], service, {**server, **tls}, {**tls, **own})


def _host(text: str) -> tuple[str, int]:
    host = urlsplit(f"//{text}")
    if not host.hostname:
        raise ValueError(f"{text!r} is no host")
    return host.hostname, host.port or SENTINEL_PORT


@contextmanager
def lost_connection() -> Generator[None]:
    """Raise redis-py's `ConnectionError` where uvloop says that a transport is closed, which redis-py lets through."""
    try:
        yield
    except RuntimeError as error:
        raise RedisConnectionError(str(error)) from error


class _OnAnyLoop(AbstractConnection):
    """A connection that fails only by redis-py's errors, also on uvloop, and tells them to its caller alone."""

    async def _connect(self) -> None:
        """Resolve the name first: uvloop goes on with a lookup whose caller gave up, and logs its error as lost."""
        async with asyncio.timeout(self.socket_connect_timeout):
            if isinstance(self, Connection):
                await asyncio.get_running_loop().getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            await super()._connect()

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        with lost_connection():
            await super().send_packed_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        with lost_connection():
            return await super().read_response(*args, **options)


def _on_any_loop(pool: redis_async.ConnectionPool) -> redis_async.ConnectionPool:
    pool.connection_class = type("Connection", (_OnAnyLoop, pool.connection_class), {})
    return pool


def connection_pool(url: str, **options: Any) -> redis_async.ConnectionPool:
    """Return a pool of connections to the server, or to the current primary."""
    if split_address(url).scheme not in BY_SENTINEL:
        return _on_any_loop(redis_async.ConnectionPool.from_url(url, **options))
    address = read_sentinel_address(url)
    sentinel = AsyncSentinel(address.sentinels, sentinel_kwargs=address.sentinel_options(options, AsyncRetry))
    for client in sentinel.sentinels:
        _on_any_loop(client.connection_pool)
    return _on_any_loop(SentinelConnectionPool(address.service, sentinel, **{**options, **address.server}))


async def close_sentinels(pool: redis_async.ConnectionPool) -> None:
    if isinstance(pool, SentinelConnectionPool):
        for client in pool.sentinel_manager.sentinels:
            await client.aclose()


def blocking_client(url: str, **options: Any) -> redis_py.Redis:
    """Return a client of the server, or of the current primary."""
    if split_address(url).scheme not in BY_SENTINEL:
        return redis_py.Redis.from_url(url, **options)
    address = read_sentinel_address(url)
    sentinel = Sentinel(address.sentinels, sentinel_kwargs=address.sentinel_options(options, Retry))
    return sentinel.master_for(address.service, **{**options, **address.server})
