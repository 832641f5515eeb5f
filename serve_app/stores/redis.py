"""Redis clients. Every failure to be served is `StoreUnavailable`."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import redis as redis_py
import redis.asyncio as redis_async
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as SyncRetry

from serve_app.domain.errors import StoreUnavailable

CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, CALL_TIMEOUT_S = 2.0, 2.0, 3.0
"""A silent server must turn into a 503 soon. A call's own limit holds over redis-py's retries, which take a timeout
during the handshake for a broken connection. Two seconds to connect: while this process's event loop stands still, the
time of every connection that it is opening runs out together (a stall of 1 s failed 41 to 64 of 100 calls at a limit of 1 s)."""
RETRIES, RETRY_BASE_S, RETRY_CAP_S = 5, 0.05, 0.5
"""A refused or broken connection is tried again for about a second: a killed server is back in 0.13 s."""
MAX_CONNECTIONS = 64
"""Per process. More add nothing: one fsync confirms all writes of one turn of the server's loop."""


def connect(url: str) -> redis_async.Redis:
    """Open an asyncio client of `redis://`, `rediss://` or `unix://`; a failure to reach the server is `StoreUnavailable`."""
    pool = redis_async.BlockingConnectionPool.from_url(
        url,
        decode_responses=True,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        max_connections=MAX_CONNECTIONS,
        timeout=REPLY_TIMEOUT_S,
        retry=Retry(ExponentialWithJitterBackoff(RETRY_CAP_S, RETRY_BASE_S), RETRIES, (RedisConnectionError,)),
    )
    return _Client.from_pool(pool)


def connect_sync(url: str) -> redis_py.Redis:
    """Open a blocking client, for the autoscaling thread and the doctor; use it inside `redis_errors()`."""
    return redis_py.Redis.from_url(
        url,
        decode_responses=True,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        retry=SyncRetry(ExponentialWithJitterBackoff(RETRY_CAP_S, RETRY_BASE_S), RETRIES, (RedisConnectionError,)),
    )


@contextmanager
def redis_errors() -> Generator[None]:
    """Raise `StoreUnavailable` for every failure to be served; an error of our own passes through."""
    try:
        yield
    except RedisError as error:
        if _is_outage(error):
            raise StoreUnavailable("the job store cannot be reached") from error
        raise


@asynccontextmanager
async def _in_time() -> AsyncGenerator[None]:
    with redis_errors():
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                yield
        except TimeoutError as late:
            raise RedisTimeoutError("no answer in time") from late


_OUTAGES = ("OOM", "MISCONF", "READONLY", "LOADING", "BUSY", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")


def _is_outage(error: RedisError) -> bool:
    if isinstance(error, RedisConnectionError | RedisTimeoutError | OutOfMemoryError | ReadOnlyError):
        return True
    if not isinstance(error, ResponseError):
        return False
    text = f"{error.status_code or ''} {error}"  # redis-py moves the error code of the errors that it knows
    # inside a script Redis 6.2 wraps the code: "Error running script …: -OOM command not allowed"
    return any(text.strip().startswith(code) or f"-{code}" in text for code in _OUTAGES)


class _Client(redis_async.Redis):
    """redis-py's client with one kind of outage."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        async with _in_time():
            return await super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        async with _in_time():
            return await super().execute(raise_on_error)
