"""Redis users of `configs/redis/users.acl`, as a file and in the chart: what each may do."""

import asyncio
import hashlib
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

from serve_app.domain.audit import Actor
from serve_app.domain.jobs import JobKind
from serve_app.domain.requests import Variant
from serve_app.jobs.backlog import read_backlog
from serve_app.operations.housekeeping import sweep
from serve_app.operations.metrics_page import render_metrics
from serve_app.settings import ROOT, Settings
from serve_app.store.redis_inspection import inspect_redis
from tests.composition import open_resources
from tests.made_jobs import accept, claim, finish, job_of, put, stored_image
from tests.manifests.chart import find, rendered
from tests.store.redis_servers import server, until_it_answers
from tests.support import adapter_id, plain_redis, write_catalog

USERS = ("service", "scaler", "operator")


@asynccontextmanager
async def guarded(folder: Path) -> AsyncGenerator[dict[str, str]]:
    """Start a server with the users of the file, and yield the address of each."""
    rules = (ROOT / "configs" / "redis" / "users.acl").read_text()
    for user in USERS:
        rules = rules.replace(f"#{user.upper()}", f"#{hashlib.sha256(user.encode()).hexdigest()}")
    (folder / "users.acl").write_text(rules)
    with server(folder / "server", [f"aclfile {folder}/users.acl"]) as port:
        await until_it_answers(port)
        yield {user: f"redis://{user}:{user}@127.0.0.1:{port}/0" for user in USERS}


@asynccontextmanager
async def of_the_chart(folder: Path, users: tuple[str, ...] = USERS) -> AsyncGenerator[dict[str, str]]:
    """Start a server as the chart's pod does, by a Secret of these users, and yield the address of each.

    The pod's script runs as it is, but for the places of its files, and leaves its configuration to a server of this
    machine.
    """
    documents = rendered("many-gpus")
    (script,) = find(documents, "StatefulSet", "atelier-redis-jobs")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    for name in ("etc", "secrets", "run"):
        (folder / name).mkdir()
    for file, text in find(documents, "ConfigMap", "atelier-redis-jobs")["data"].items():
        (folder / "etc" / file).write_text(text.replace("dir /data", ""))
    for user in users:
        (folder / "secrets" / ("password" if user == "service" else f"{user}-password")).write_text(user)
    places = {"/etc/redis": "etc", "/run/secrets/redis": "secrets", "/run/redis": "run"}
    for place, name in places.items():
        script = script.replace(place, str(folder / name))
    script = script.replace("exec valkey-server", "exec test -s")
    await asyncio.to_thread(subprocess.run, ["sh", "-ec", script], check=True)
    with server(folder / "server", [(folder / "run" / "redis.conf").read_text()]) as port:
        await until_it_answers(port)
        yield {user: f"redis://{'' if user == 'service' else user}:{user}@127.0.0.1:{port}/0" for user in users}


@pytest.mark.slow
@pytest.mark.parametrize("started", [guarded, of_the_chart])
async def test_each_redis_user_may_do_what_its_role_needs_and_no_more(
    tmp_path: Path, started: Callable[[Path], AbstractAsyncContextManager[dict[str, str]]]
) -> None:
    async with started(tmp_path) as urls:
        await _live_one_job(tmp_path, urls["service"])
        assert (await asyncio.to_thread(read_backlog, urls["scaler"], JobKind.GENERATION)).ready == 0
        assert inspect_redis(urls["service"]).settings is not None, "the doctor reads durability"
        for user, command in (
            ("service", "FLUSHALL"),
            ("service", "CONFIG SET maxmemory 1"),
            ("service", "GET other"),
            ("service", "KEYS *"),
            ("service", "SHUTDOWN NOSAVE"),
            ("service", "ACL LIST"),
            ("scaler", "SET {job:0}:count 1"),
            ("scaler", "EVAL return(1) 0"),
            ("scaler", "CONFIG GET *"),
        ):
            with plain_redis(urls[user]) as client, pytest.raises(NoPermissionError):
                client.execute_command(*command.split())
        with plain_redis(urls["operator"]) as client:
            assert client.flushall()


@pytest.mark.slow
async def test_a_secret_without_the_new_passwords_leaves_its_one_password_everything(tmp_path: Path) -> None:
    """An upgrade of the chart finds Redis working before anybody has changed the Secret."""
    async with of_the_chart(tmp_path, ("service",)) as urls:
        with plain_redis(urls["service"]) as client:
            assert client.flushall()
        without = urls["service"].replace(":service@", ":@")
        with plain_redis(without) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


async def _live_one_job(folder: Path, url: str) -> None:
    """Do what every process of a service does with Redis, from an account to its deletion."""
    settings = Settings(data_dir=folder / "var", redis_url=url, catalog=write_catalog(folder / "catalog"))
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("acme")
        await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
        outline = adapter_id("outline")
        job_id = await accept(resources, account.id, lora_id=outline)
        [claimed] = await claim(resources)
        await resources.queue.heartbeat(claimed.lease, progress=5)
        await finish(resources, claimed)
        await resources.queue.reap()
        image = stored_image(await put(resources, "img_x", account_id=account.id, when=datetime.now(UTC)))
        added = await resources.uploaded.add(
            image, account=account.id, user="x", lasts=timedelta(minutes=1), idempotency_digest="k"
        )
        assert added == ("added", image.image_id)
        assert (await resources.uploaded.page(account.id, limit=1))[0]
        await resources.uploaded.let_go(image.image_id, "y")
        assert await resources.deletions.delete_upload(image.image_id, account_id=account.id)
        assert await resources.deletions.remove_due_uploads() == 0
        await sweep(resources.images, resources.jobs, resources.uploaded, resources.settings)
        assert b"atelier_redis_memory_bytes" in await render_metrics(
            resources.measures,
            resources.queue_stats,
            resources.images,
            resources.space,
            resources.settings.plan_table,
            event_streams=0,
        )
        assert await resources.queue_stats.counts()
        assert not await resources.dead_letters.list(1)
        assert [worker.name for worker in await resources.measures.shown(JobKind.GENERATION)] == ["w"]
        assert (await job_of(resources, job_id)).images
        assert await resources.account_deletion.delete(account, Actor("operator:test")) is not None
