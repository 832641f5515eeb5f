"""Addresses of Redis: TLS, Sentinels that name another primary, and what is no address."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.jobs.backlog import read_backlog
from serve_app.store.redis_address import is_redis_address, read_sentinel_address
from serve_app.store.redis_client import connect, connect_sync
from tests.store.redis_servers import behind_tls, certificate, server, until_it_answers
from tests.support import plain_redis, wait_until


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("redis://localhost", True),
        ("rediss://user:word@redis.internal:6380/0?ssl_ca_certs=/etc/ca.pem", True),
        ("unix:///run/redis.sock", True),
        ("redis+sentinel://a:26379,b,[::1]:26379/jobs", True),
        ("rediss+sentinel://user:w%40rd@a/jobs/2?sentinel_password=x", True),
        ("redis+sentinel://a:26379", False),
        ("redis+sentinel:///jobs", False),
        ("redis+sentinel://a:x/jobs", False),
        ("redis+sentinel://a,,b/jobs", False),
        ("redis+sentinel://a/jobs/first", False),
        ("redis+sentinel://a/jobs?sentinel_pasword=x", False),
        ("http://localhost", False),
        ("redis://localhost:x", False),
        ("redis://", False),
    ],
)
def test_an_address_is_known_by_its_form(text: str, is_one: bool) -> None:
    assert is_redis_address(text) is is_one


def test_servers_and_sentinels_have_passwords_of_their_own() -> None:
    found = read_sentinel_address(
        "rediss+sentinel://user:w%40rd@a,b:9/jobs/2?sentinel_password=s%26cret&ssl_ca_certs=/ca.pem"
    )
    tls = {"ssl": True, "ssl_ca_certs": "/ca.pem"}
    assert found.sentinels == [("a", 26379), ("b", 9)]
    assert found.service == "jobs"
    assert found.server == {"username": "user", "password": "w@rd", "db": 2, **tls}
    assert found.sentinel == {"password": "s&cret", **tls}


@pytest.mark.slow
async def test_both_clients_speak_tls_and_check_the_certificate(tmp_path: Path) -> None:
    file = certificate(tmp_path)
    with server(tmp_path / "server", []) as port:
        await until_it_answers(port)
        async with behind_tls(port, file) as tls_port:
            url = f"rediss://localhost:{tls_port}/0?ssl_ca_certs={file}"
            client = cast(Any, connect(url))
            assert await client.set("name", "value")
            assert await client.execute_read("GET", "name") == "value"
            await client.aclose()
            assert (await asyncio.to_thread(read_backlog, url, JobKind.GENERATION)).ready == 0
            untrusting = cast(Any, connect(f"rediss://localhost:{tls_port}/0"))
            with pytest.raises(StoreUnavailable):  # a certificate that nobody vouches for
                await untrusting.ping()
            await untrusting.aclose()


@pytest.mark.slow
async def test_both_clients_follow_the_primary_that_the_sentinels_name(tmp_path: Path) -> None:
    with server(tmp_path / "first", ["requirepass word", "masterauth word"]) as first:
        await until_it_answers(first)
        replica = [f"replicaof 127.0.0.1 {first}", "requirepass word", "masterauth word"]
        watched = [f"sentinel monitor jobs 127.0.0.1 {first} 1", "sentinel auth-pass jobs word", "requirepass guard"]
        with (
            server(tmp_path / "second", replica) as second,
            server(tmp_path / "guard", watched, sentinel=True) as guard,
        ):
            await until_it_answers(second)
            await until_it_answers(guard)
            url = f"redis+sentinel://:word@127.0.0.1:1,127.0.0.1:{guard}/jobs/0?sentinel_password=guard"
            client = cast(Any, connect(url))
            with connect_sync(url) as blocking:
                assert await client.execute_write("SET", "name", "before") == "OK"
                assert blocking.get("name") == "before"
                _fail_over(guard, first, second)
                await _write_when_possible(client)
                assert await client.execute_read("GET", "name") == "after"
                assert blocking.get("name") == "after"
            with plain_redis(f"redis://:word@127.0.0.1:{second}") as direct:
                assert direct.get("name") == "after", "written to the new primary"
            await client.aclose()


def _fail_over(guard: int, first: int, second: int) -> None:
    """Do at once what Sentinels do after a vote, which takes them half a minute."""
    new, old = [plain_redis(f"redis://:word@127.0.0.1:{port}") for port in (second, first)]
    with new, old, plain_redis(f"redis://:guard@127.0.0.1:{guard}") as sentinel:
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", second)
        old.client_kill_filter(_type="normal", skipme=True)
        sentinel.sentinel_remove("jobs")
        sentinel.sentinel_monitor("jobs", "127.0.0.1", second, 1)
        sentinel.sentinel_set("jobs", "auth-pass", "word")


async def _write_when_possible(client: Any) -> None:
    async def is_written() -> bool:
        try:
            await client.execute_write("SET", "name", "after")
        except StoreUnavailable:
            return False
        return True

    await wait_until(is_written)
