"""The Redis client: one kind of outage, scripts that a server may forget, keys that are all known."""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.jobs.backlog import read_backlog
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.keys import KEY_MAP, redis_key
from serve_app.store.redis_client import connect
from serve_app.store.script import Argument, Script
from tests.audit import key_problems
from tests.faults.redis_proxy import RedisProxy
from tests.support import plain_redis

NO_SESSION: dict[str, Argument] = {"realm": "", "token_digest": "digest", "idle_ms": 1, "extends": True}
"""Arguments of `session.lua` for a session that does not exist."""


@pytest.mark.slow
async def test_a_server_that_is_not_there_is_an_outage_and_soon(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nothing.sock"
    client = connect(url)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await client.time()
    assert time.monotonic() - began < 15
    with pytest.raises(StoreUnavailable):
        await client.pipeline().ping().execute()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StoreUnavailable):
        await asyncio.to_thread(read_backlog, url, JobKind.GENERATION)
    await client.aclose()


def test_a_name_that_is_waited_for_too_long_is_an_outage_and_told_to_its_caller_alone() -> None:
    told: list[str] = []

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        client = connect("redis://nothing.invalid/0?socket_connect_timeout=0.0001")
        with pytest.raises(StoreUnavailable):
            await client.time()
        asked = asyncio.get_running_loop().getaddrinfo("nothing.invalid", 6379)  # answered after the client's
        await asyncio.gather(asked, return_exceptions=True)
        await client.aclose()

    uvloop.run(ask())
    gc.collect()
    assert told == []


@pytest.mark.slow
async def test_a_server_that_does_not_answer_is_an_outage_and_soon(tmp_path: Path) -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_unix_server(silence, tmp_path / "silent.sock")
    client = connect(f"unix://{tmp_path}/silent.sock")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await client.time()
    assert time.monotonic() - began < 15
    await client.aclose()
    server.close()


@pytest.mark.parametrize(("begins", "ends"), [
    ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
], ids=["full memory", "no replica", "read-only"])  # fmt: skip
async def test_a_server_that_refuses_writes_is_an_outage(begins: str, ends: str, redis_url: str, redis_db: Any) -> None:
    client = connect(redis_url)
    redis_db.execute_command(*begins.split())
    try:
        with pytest.raises(StoreUnavailable):
            await client.set(redis_key("sweep_lock"), "1")
        assert await Script(client, "accounts/session")(**NO_SESSION) == []  # reading goes on
    finally:
        redis_db.execute_command(*ends.split())
        await client.aclose()


async def test_a_mistake_of_ours_is_no_outage(redis_url: str, redis_db: Any) -> None:
    client = connect(redis_url)
    await client.set(redis_key("sweep_lock"), "text")
    with pytest.raises(redis.ResponseError):
        await client.hget(redis_key("sweep_lock"), "a field of text")
    await client.aclose()


async def test_a_script_that_the_server_forgot_is_taught_again(redis_url: str, redis_db: Any) -> None:
    client = connect(redis_url)
    script = Script(client, "accounts/session")
    assert await script(**NO_SESSION) == []
    redis_db.script_flush()
    assert await script(**NO_SESSION) == []
    await client.aclose()


async def test_reads_share_a_connection_and_outlive_it(redis_url: str, redis_db: Any) -> None:
    client, admin = connect(redis_url, connections=32), redis_db
    script = Script(client, "accounts/session", writes=False)
    before = len(admin.client_list())
    admin.script_flush()
    for _ in range(2):
        answers = await asyncio.gather(*(script(**NO_SESSION) for _ in range(32)))
        assert answers == [[]] * 32
    assert len(admin.client_list()) - before <= 33, "of its own has a connection only who taught the script"
    admin.client_kill_filter(_type="normal", skipme=True)
    assert await script(**NO_SESSION) == []
    await client.aclose()


@pytest.mark.slow
async def test_a_shared_connection_that_fell_silent_is_left(redis_url: str, redis_db: Any) -> None:
    proxy = RedisProxy(redis_url.removeprefix("unix://"))
    await proxy.start()
    client = connect(proxy.url)
    script = Script(client, "accounts/session", writes=False)

    async def connections() -> set[str]:
        await script(**NO_SESSION)
        return {each["id"] for each in redis_db.client_list() if each["cmd"] in ("eval", "evalsha")}

    first = await connections()
    proxy.blackhole()
    with pytest.raises(StoreUnavailable):
        await script(**NO_SESSION)
    proxy.heal()
    assert await connections() - first
    await client.aclose()
    await proxy.close()


async def test_a_client_outlives_its_servers_death(tmp_path: Path) -> None:
    server = ensure_redis(tmp_path)
    client = connect(server.url)
    await client.set("k", "v")
    plain_redis(server.url).shutdown(nosave=True)
    ensure_redis(tmp_path)
    assert await client.get("k") == "v"
    await client.aclose()
    stop_redis(tmp_path)


def test_every_key_of_the_map_is_named_once() -> None:
    assert len({known.name for known in KEY_MAP}) == len(KEY_MAP)


def test_the_key_check_can_fail(redis_db: Any) -> None:
    redis_db.set("stray", "1")
    redis_db.set(redis_key("image", "img_x"), "job")  # without a time to live
    redis_db.set(redis_key("lease", "generation"), "not a sorted set")
    problems = "\n".join(key_problems(redis_db))
    assert "stray: not in the key map" in problems
    assert "image:img_x: never expires" in problems
    assert "lease:generation: is a string" in problems
