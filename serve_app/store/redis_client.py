"""Clients of Redis. Every failure to be served is `StoreUnavailable`."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import hiredis
import redis.asyncio as redis_async
from redis.asyncio import ConnectionPool
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as SyncRetry

from serve_app.domain.errors import Overloaded, StoreUnavailable
from serve_app.store.keys import redis_key
from serve_app.store.redis_address import blocking_client, close_sentinels, connection_pool, lost_connection

_Row = TypeVar("_Row")

LONGEST_SILENCE_S = 2.0
"""When a caller gives up after this many seconds without an answer, its connection is closed, and the next opens
another."""


class SharedConnection:
    """One connection of a pool, shared by many callers.

    With 32 callers a call costs 21 µs of processor time, against 165 on a connection of its own. It carries reads, and
    scripts that may run twice: whether a call that lost its connection happened is not known.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connection: Any = None  # redis-py's Connection; Any, because we use its private `_writer`
        self._opening = asyncio.Lock()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, unless connected. Raises redis-py's errors."""
        if self._reading is not None:
            return
        async with self._opening:
            if self._reading is not None:
                return
            if self._connection is None:
                self._connection = cast(Any, await self._pool.get_connection())
            else:
                await self._connection.connect()
            self._reading = asyncio.create_task(self._read(), name="answers of Redis")

    async def call(self, *command: str | bytes | int | float) -> Any:
        """Send a command on the open connection and return its answer. Raises `RedisConnectionError` without one."""
        if self._reading is None:
            raise RedisConnectionError("the shared connection is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        with lost_connection():
            self._connection._writer.write(_pack(command))
        self._waiting.append(answer)
        sent = loop.time()
        try:
            return await answer
        except asyncio.CancelledError:
            if loop.time() - sent >= LONGEST_SILENCE_S:
                await self.close()
            raise

    async def close(self) -> None:
        """Close the connection; whoever waits for an answer gets `RedisConnectionError`."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await self._connection.disconnect(nowait=True)
            self._fail_waiting()

    async def _read(self) -> None:
        try:
            while True:
                try:
                    reply = await self._connection.read_response(timeout=math.inf)
                except ResponseError as error:
                    reply = error
                answer = self._waiting.popleft()
                if answer.done():  # its caller was canceled
                    continue
                if isinstance(reply, ResponseError):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
        except (RedisError, OSError):
            self._reading = None
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(RedisConnectionError("the connection was lost before the answer"))


_pack = cast(Callable[[tuple[str | bytes | int | float, ...]], bytes], hiredis.pack_command)
"""hiredis' own stub knows tuples of one item."""


CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, CALL_TIMEOUT_S = 2.0, 2.0, 3.0
"""A silent server must turn into a 503 soon. A call's own limit holds over redis-py's retries, which take a timeout
during the handshake for a broken connection. Two seconds to connect: while this process's event loop stands still, the
time of every connection that it is opening runs out together (a stall of 1 s failed 41 to 64 of 100 calls at a limit of
1 s)."""
RETRIES, _BACKOFF, _RETRIED = 5, ExponentialWithJitterBackoff(cap=0.5, base=0.05), (RedisConnectionError,)
"""A refused or broken connection is tried again for about a second: a killed server is back in 0.13 s."""
OPTIONS: Mapping[str, Any] = {
    "decode_responses": True,
    "encoding_errors": "surrogateescape",
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "socket_timeout": REPLY_TIMEOUT_S,
}
"""Answers are text; packed fields of a job's record are bytes, and come with surrogate escapes."""
MOST_SLOW = 1_000
MAX_CONNECTIONS, MAX_WAIT = 64, timedelta(seconds=5)
"""A process that is no ingress has these bounds; `Settings` sizes both for the requests of an ingress."""


Value = str | float
Life = timedelta | None


class RedisPipeline(Protocol):
    """Commands that are sent together; their answers come from `execute`, in order."""

    def __getattr__(self, command: str) -> Callable[..., "RedisPipeline"]: ...

    async def execute(self) -> list[Any]: ...


class RedisClient(Protocol):
    """What the stores use of redis-py's client, with answers as text.

    redis-py types every answer as a value or an awaitable of it; here is the one place where that is resolved.
    """

    slow_scripts: deque[tuple[str, float]]
    """The latest calls of scripts that were slow, each with its seconds, until `Measures` has taken them."""

    async def time(self) -> tuple[int, int]: ...
    async def info(self, section: str) -> dict[str, Any]: ...
    async def exists(self, *names: str) -> int: ...
    async def delete(self, *names: str) -> int: ...
    async def get(self, name: str) -> str | None: ...
    async def set(self, name: str, value: Value, *, ex: Life = ..., px: Life = ..., nx: bool = ...) -> bool | None: ...
    async def hget(self, name: str, key: str) -> str | None: ...
    async def hmget(self, name: str, keys: str | Sequence[str], *more: str) -> list[str | None]: ...
    async def hgetall(self, name: str) -> dict[str, str]: ...
    async def hset(self, name: str, key: str = ..., value: Value = ..., mapping: Mapping[str, Value] = ...) -> int: ...
    async def hdel(self, name: str, *keys: str) -> int: ...
    async def smembers(self, name: str) -> AbstractSet[str]: ...
    async def srem(self, name: str, *values: str) -> int: ...
    async def zadd(self, name: str, mapping: Mapping[str, float], nx: bool = False) -> int: ...
    async def zcard(self, name: str) -> int: ...
    async def zrange(self, name: str, start: int, end: int) -> list[str]: ...
    async def zrevrange(self, name: str, start: int, end: int) -> list[str]: ...
    async def zrem(self, name: str, *values: str) -> int: ...
    async def xrange(self, name: str, *, min: int | str) -> list[tuple[str, dict[str, str]]]: ...
    def scan_iter(self, match: str, count: int | None = None) -> AsyncIterator[str]: ...
    def pipeline(self, transaction: bool = True) -> RedisPipeline: ...

    async def eval(self, script: str, numkeys: int, *keys_and_args: str | bytes | float) -> Any: ...
    async def execute_read(self, *args: str | bytes | float) -> Any: ...
    async def execute_write(self, *args: str | bytes | float) -> Any: ...
    async def aclose(self) -> None: ...


def connect(url: str, *, connections: int = MAX_CONNECTIONS, wait: timedelta = MAX_WAIT) -> RedisClient:
    """Open an asyncio client of an address (`redis_address.py`).

    Calls beyond `connections` take turns, in the order in which they came. One that has waited for `wait` while others
    were answered raises `Overloaded`; a server that cannot be reached, `StoreUnavailable`.
    """
    most = connections + 2  # the shared ones
    pool = connection_pool(url, **OPTIONS, max_connections=most, retry=Retry(_BACKOFF, RETRIES, _RETRIED))
    client = _Client(connection_pool=pool)
    client.auto_close_connection_pool = True
    client.slow_scripts = deque(maxlen=MOST_SLOW)
    client.turns = _Turns(connections, wait.total_seconds())
    client.reads, client.writes = SharedConnection(pool), SharedConnection(pool)
    return cast(RedisClient, client)


def in_parts(rows: Sequence[_Row], size: int) -> Iterator[list[_Row]]:
    """Yield the rows, `size` of them at a time, so that no call of Redis is long."""
    return (list(rows[start : start + size]) for start in range(0, len(rows), size))


async def read_records(redis: RedisClient, ids: Sequence[str], family: str, *parts: str) -> dict[str, dict[str, str]]:
    """Return the hashes of a family (of keys) that exist, by the id that ends their names, in one round trip."""
    pipeline = redis.pipeline(transaction=False)
    for each in ids:
        pipeline.hgetall(redis_key(family, *parts, each))
    rows: list[dict[str, str]] = await pipeline.execute() if ids else []
    return {each: row for each, row in zip(ids, rows, strict=True) if row}


@contextmanager
def connect_sync(url: str) -> Generator[Any]:
    """Open a blocking client, for the autoscaling thread and the doctor. It is redis-py's own, and so untyped.

    Raises `StoreUnavailable` in the block for every failure to be served.
    """
    with redis_errors(), blocking_client(url, **OPTIONS, retry=SyncRetry(_BACKOFF, RETRIES, _RETRIED)) as client:
        yield client


@contextmanager
def redis_errors() -> Generator[None]:
    """Raise `StoreUnavailable` for every failure to be served; an error of our own passes through."""
    try:
        yield
    except RedisError as error:
        if _is_outage(error):
            raise StoreUnavailable("the job store cannot be reached") from error
        raise


_OUTAGES = ("OOM", "MISCONF", "READONLY", "LOADING", "BUSY", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")


def _is_outage(error: RedisError) -> bool:
    if isinstance(error, RedisConnectionError | RedisTimeoutError | OutOfMemoryError | ReadOnlyError):
        return True
    if not isinstance(error, ResponseError):
        return False
    text = f"{error.status_code or ''} {error}"  # redis-py moves the error code of the errors that it knows
    # inside a script Redis 6.2 wraps the code: "Error running script …: -OOM command not allowed"
    return any(text.strip().startswith(code) or f"-{code}" in text for code in _OUTAGES)


class _Turns:
    """Lets as many calls at a time to Redis as there are connections, in order of arrival.

    redis-py's own waiting lets late calls pass early ones, and cannot tell a busy process from a server that does not
    answer.
    """

    def __init__(self, connections: int, wait_s: float) -> None:
        self._free = asyncio.Semaphore(connections)
        self._wait_s = wait_s
        self._answered_at = 0.0

    async def take(self, call: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Make a call when it is its turn, within the limit of time.

        Raises `StoreUnavailable` when the server does not answer, and `Overloaded` when it does but the wait was too
        long.
        """
        if self._free.locked():
            await self._wait()
        else:
            await self._free.acquire()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await call(*args, **options)
        except (RedisError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or _is_outage(error):
                raise StoreUnavailable("the job store cannot be reached") from error
            raise
        finally:
            self._free.release()
        self._answered_at = asyncio.get_running_loop().time()
        return answer

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError:
            if asyncio.get_running_loop().time() - self._answered_at > CALL_TIMEOUT_S:
                raise StoreUnavailable("the job store cannot be reached") from None
            raise Overloaded("too many requests are open") from None


class _Client(redis_async.Redis):
    """redis-py's client with one kind of outage."""

    slow_scripts: deque[tuple[str, float]]
    turns: _Turns
    reads: SharedConnection
    writes: SharedConnection
    """Writes have a connection apart from the reads, which would wait with them until Redis has synced its file."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self.turns.take(super().execute_command, *args, **options)

    async def execute_read(self, *args: str | bytes | int | float) -> Any:
        """Send a command that writes nothing on the connection that all reads share.

        If that breaks, send it again on a connection of its own.
        """
        return await self.turns.take(self._execute_shared, self.reads, args)

    async def execute_write(self, *args: str | bytes | int | float) -> Any:
        """Send a command on the connection that all scripts which write share.

        If that breaks, send it once more on a connection of its own.
        """
        return await self.turns.take(self._execute_shared, self.writes, args)

    async def _execute_shared(self, shared: SharedConnection, args: Sequence[str | bytes | int | float]) -> Any:
        await shared.open()
        try:
            return await shared.call(*args)
        except RedisConnectionError:
            return await super().execute_command(*args)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.reads.close()
        await self.writes.close()
        await super().aclose(close_connection_pool)
        await close_sentinels(self.connection_pool)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        pipeline = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.turns = self.turns
        return pipeline


class _Pipeline(Pipeline):
    turns: _Turns

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return await self.turns.take(super().execute, raise_on_error)
