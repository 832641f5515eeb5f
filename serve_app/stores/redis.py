"""The only place that makes Redis clients, loads scripts, and knows the name, type and life of every key."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import redis as redis_py
import redis.asyncio as redis_async
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry as SyncRetry

from serve_app.domain.errors import StoreUnavailable

PREFIX = "{job:0}:"
"""Every key begins with this hash tag, so that on a cluster all keys of a script share a slot."""

CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, CALL_TIMEOUT_S = 1.0, 2.0, 3.0
"""A silent server must turn into a 503 soon. A call's own limit holds over redis-py's retries, which take a timeout
during the handshake for a broken connection."""
REPLICA_TIMEOUT_MS = 1_000
RETRIES, RETRY_BASE_S, RETRY_CAP_S = 5, 0.05, 0.5
"""A refused or broken connection is tried again for about a second: a killed server is back in 0.13 s."""
MAX_CONNECTIONS = 64
"""Per process. More add nothing: one fsync confirms all writes of one turn of the server's loop."""


class Key(NamedTuple):
    """One family of keys: its name after the prefix (`*` for the part that varies), its Redis type, when it goes, what it holds."""

    name: str
    type: str
    life: str
    holds: str

    @property
    def is_permanent(self) -> bool:
        """Whether the key may lack a time to live: a bounded index, or a record that only an operator removes."""
        return self.life.startswith("permanent")


KEY_MAP: tuple[Key, ...] = (
    Key("job:*", "hash", "permanent while live, then retention", "the record of a job"),
    Key("queue:*", "zset", "permanent: empty when nothing waits", "kind:account → waiting job ids by sequence"),
    Key("group:*", "zset", "permanent: empty when nothing waits", "kind:group → the same ids, by adapter digest"),
    Key(
        "groups:*",
        "zset",
        "permanent: empty when nothing waits",
        "kind → groups with waiting jobs, by their first sequence",
    ),
    Key("turn:*", "zset", "permanent: empty when nothing waits", "kind → accounts with waiting jobs by virtual time"),
    Key(
        "idle:*",
        "zset",
        "permanent: trimmed as the clock passes",
        "kind → accounts ahead of the clock with nothing waiting",
    ),
    Key("clock:*", "string", "permanent: one number", "kind → virtual time in seconds of one worker"),
    Key(
        "age:*", "zset", "permanent: empty when nothing waits", "kind → waiting and delayed job ids by accept time (ms)"
    ),
    Key("delay:*", "zset", "permanent: empty when nothing waits", "kind → job ids backing off, by due time (ms)"),
    Key("lease:*", "zset", "permanent: empty when nothing runs", "kind → running job ids by lease deadline (ms)"),
    Key(
        "suspect:*",
        "zset",
        "permanent: empty when nothing waits",
        "kind → waiting jobs that lost two workers, by sequence",
    ),
    Key("alone:*", "string", "the lease", "kind → the worker that runs suspects one at a time"),
    Key("held:*", "set", "a day after the last claim", "kind:worker → ids of the jobs it runs"),
    Key(
        "load:*",
        "hash",
        "permanent: five numbers",
        "kind → ready, ready_work, work (thousandths), pace (s per work unit)",
    ),
    Key("workers:*", "zset", "permanent: trimmed by age", "kind → workers by last sign of life (ms)"),
    Key(
        "room:*",
        "hash",
        "permanent: trimmed with workers",
        "kind → images each worker has room for after its last claim",
    ),
    Key("owner:*", "zset", "10 minutes after the last claim", "kind:group → workers that loaded the group, by time"),
    Key("claim:*", "hash", "twice the lease", "worker → nonce of its last claim and what it was given"),
    Key("live", "hash", "permanent: a field per account with unfinished jobs", "account → jobs not yet ended"),
    Key("sequence", "string", "permanent: one number", "order of acceptance"),
    Key("count", "hash", "permanent: a field per state", "jobs accepted, ended by state, requeued, fenced: since ever"),
    Key("dead", "zset", "permanent: trimmed by retention", "failed job ids by time, for the operator"),
    Key("recent", "zset", "permanent: newest 10,000", "job ids by accept time (ms), for the operator"),
    Key("jobs:*", "zset", "retention after the last accept", "account → job ids by accept time (ms)"),
    Key("image:*", "string", "retention", "image id → job id"),
    Key("idem:*", "hash", "idempotency life (24 h)", "account:variant:digest → job id, body digest"),
    Key("counted:*", "zset", "the plan's window", "account:variant → receipts counted in the window, by its end (ms)"),
    Key("account:*", "hash", "permanent", "an account: name, plans, password hash"),
    Key("accounts", "zset", "permanent", "account ids by creation (ms)"),
    Key("name:*", "string", "permanent", "account name → account id"),
    Key("key:*", "hash", "permanent", "an API key: digest, account, interfaces, expiry; never the secret"),
    Key("keys:*", "zset", "permanent", "account → key ids by creation (ms)"),
    Key("session:*", "hash", "idle 30 min, at most 12 h", "digest of a console session's token → account"),
    Key("sessions:*", "set", "12 h", "account → digests of its sessions"),
    Key("throttle:*", "string", "the allowance's window", "sign-in attempts and the like, by digest of who"),
    Key("grants:*", "hash", "permanent", "account → adapter id → allow or deny, over the catalog file"),
    Key("swept", "string", "the sweeper's interval", "who is looking for orphaned objects"),
)
"""Every key there is. The key-leak test walks the server and fails on anything else."""


def key(family: str, *parts: str) -> str:
    """The full name of a key: `key("job", job_id)`."""
    return PREFIX + ":".join((family, *parts))


def connect(url: str) -> redis_async.Redis:
    """An asyncio client of `redis://`, `rediss://` or `unix://`. Every failure to reach the server is `StoreUnavailable`."""
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
    """The blocking twin, for the autoscaling thread and the doctor; use it inside `reaching_redis()`."""
    return redis_py.Redis.from_url(
        url,
        decode_responses=True,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=REPLY_TIMEOUT_S,
        retry=SyncRetry(ExponentialWithJitterBackoff(RETRY_CAP_S, RETRY_BASE_S), RETRIES, (RedisConnectionError,)),
    )


@contextmanager
def reaching_redis() -> Generator[None]:
    """Turns every way of not being served by Redis into `StoreUnavailable`; a real mistake of ours passes through."""
    try:
        yield
    except RedisError as error:
        if _is_outage(error):
            raise StoreUnavailable("the job store cannot be reached") from error
        raise


@asynccontextmanager
async def _in_time() -> AsyncGenerator[None]:
    with reaching_redis():
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
    text = f"{error.status_code or ''} {error}"  # redis-py moves the first word of the errors it knows
    # inside a script Redis 6.2 wraps the word: "Error running script …: -OOM command not allowed"
    return any(text.strip().startswith(word) or f"-{word}" in text for word in _OUTAGES)


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


Rewrite = Callable[[str, str], str]
"""(script name, text) → text. Tests move the clock with it and plant the defects that they must catch."""

_INCLUDE = "-- include "
_SCRIPTS = Path(__file__).parent / "scripts"


@cache
def script_text(name: str) -> str:
    """A script with the words all scripts share before it, and those of the files it names by `-- include <name>`."""
    text = (_SCRIPTS / f"{name}.lua").read_text()
    included = [line.removeprefix(_INCLUDE) for line in text.splitlines() if line.startswith(_INCLUDE)]
    return "".join((_SCRIPTS / f"{part}.lua").read_text() for part in ("common", *included)) + text


class Script:
    """One state change. Runs by digest; a server that forgot it is taught again.

    The digest pins the script to this version of the code, so that two versions can run side by side during a roll-out.
    """

    def __init__(self, client: redis_async.Redis, name: str, rewrite: Rewrite | None = None) -> None:
        self._client = client
        self.text = rewrite(name, script_text(name)) if rewrite else script_text(name)
        self._sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, *args: str | int | float) -> Any:
        call = cast(Callable[..., Any], self._client.evalsha)  # redis-py's stubs mix the sync and async answers
        try:
            return await call(self._sha, 1, PREFIX, *args)
        except NoScriptError:
            return await cast(Callable[..., Any], self._client.eval)(self.text, 1, PREFIX, *args)

    async def on_replicas(self, replicas: int, *args: str | int | float) -> Any:
        """Run, and answer only when so many replicas have the writes. Raises `StoreUnavailable` when they do not in time:
        the change may have happened, and asking again is safe."""
        pipeline = cast(
            Any, self._client.pipeline(transaction=False)
        )  # WAIT speaks for the writes of its own connection
        pipeline.eval(self.text, 1, PREFIX, *args)
        pipeline.wait(replicas, REPLICA_TIMEOUT_MS)
        answer, confirmed = await pipeline.execute()
        if confirmed < replicas:
            raise StoreUnavailable(f"{confirmed} of {replicas} replicas have the job")
        return answer
