"""A service that was put back from copies goes on; `restore --check` names what does not fit."""

import asyncio
import hashlib
import json
import math
import os
import shutil
import socket
import socketserver
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serve_app.domain.jobs import JobState
from serve_app.domain.requests import Variant
from serve_app.jobs.records import RECORD_VERSION
from serve_app.loras.stored_weights import LoraFiles
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, running_redis, stop_redis
from serve_app.store.keys import redis_key
from tests.audit import audit
from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.made_jobs import BROKEN, accept, claim, finish, job_of
from tests.store.redis_servers import server, until_it_answers
from tests.support import adapter_of, plain_redis


class Made(NamedTuple):
    secret: str
    jobs: dict[str, str]


async def _fill(resources: Resources) -> Made:
    """Make an account with a key, a stored LoRA, and a job in every state."""
    account = await resources.accounts.create("acme")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    await _register_lora(resources)
    jobs: dict[str, str] = {}
    for state in ("completed", "failed", "delayed", "running"):
        jobs[state] = await accept(resources, account.id)
        (claimed,) = await claim(resources)
        if state == "completed":
            await finish(resources, claimed)
        if state == "failed":
            await resources.queue.fail(claimed.lease, BROKEN, retry=False)
        if state == "delayed":
            await resources.queue.release(claimed.lease, pause=timedelta(hours=1))
    jobs["canceled"] = await accept(resources, account.id)
    await resources.queue.cancel(jobs["canceled"], account_id=account.id)
    jobs["queued"] = await accept(resources, account.id)
    return Made(secret, jobs)


async def _register_lora(resources: Resources) -> None:
    source = resources.settings.data_dir / "lora.safetensors"
    source.write_bytes(b"weights")
    sha256 = hashlib.sha256(b"weights").hexdigest()
    file = await LoraFiles(resources.settings).put(sha256, {"": source})
    lora = adapter_of("", file=file, sha256=sha256, accounts=None)
    await resources.adapter_registry.register(lora)


@pytest.fixture
def embedded(atelier: Atelier, tmp_path: Path) -> Iterator[Atelier]:
    """A service with an embedded Redis."""
    yield _service(atelier, tmp_path / "var")
    stop_redis(tmp_path / "var")


def _service(atelier: Atelier, data_dir: Path) -> Atelier:
    settings = Settings(data_dir=data_dir, redis_url="", catalog=atelier.settings.catalog)
    return Atelier(settings, {**atelier.env, "ATELIER_DATA_DIR": str(data_dir), "ATELIER_REDIS_URL": ""})


@pytest.fixture
def moved(atelier: Atelier, tmp_path: Path) -> Iterator[Atelier]:
    """The same service on another machine: another data directory, where its copies are put."""
    yield _service(atelier, tmp_path / "elsewhere")
    stop_redis(tmp_path / "elsewhere")


def _copy(service: Atelier, into: Path) -> None:
    """Copy a service while it runs, by the commands of the guide."""
    assert service("backup").code == 2, "where to?"
    assert "could not be stored at foo://x: Protocol not known" in service("backup", "foo://x").err
    Path(service.json("backup", str(into))["copy"].removeprefix("file://")).rename(into / "redis.rdb")
    shutil.copy(service.settings.data_dir / "secrets.json", into)
    shutil.copytree(service.settings.data_dir / "images", into / "images")


def _put_back(copies: Path, service: Atelier) -> None:
    home = service.settings.data_dir
    (home / "redis").mkdir(parents=True)
    shutil.copy(copies / "redis.rdb", home / "redis" / "appendonly.aof")
    shutil.copy(copies / "secrets.json", home)
    shutil.copytree(copies / "images", home / "images")


def test_a_service_put_back_elsewhere_knows_its_keys_and_runs_what_waits_once(
    embedded: Atelier, moved: Atelier, tmp_path: Path
) -> None:
    made = embedded.stores(_fill)
    _copy(embedded, tmp_path / "copies")
    embedded.stores(lambda resources: resources.accounts.create("later"))
    _put_back(tmp_path / "copies", moved)
    found = moved.json("restore", "--check")
    assert (found["accounts"], found["keys"], found["jobs"], found["images"], found["loras"]) == (1, 1, 6, 1, 1)
    assert found["missing"] == found["problems"] == []
    (weights,) = (moved.settings.data_dir / "images").rglob("*.safetensors")
    with_weights = weights.rename(tmp_path / "away")
    missing = json.loads(moved("restore", "--check", "--json").out)["missing"]
    assert [Path(uri.removeprefix("file://")) for uri in missing] == [weights], "where it is looked for now"
    with_weights.rename(weights)
    assert running_redis(moved.settings.data_dir) is None, "it was started for the command alone"

    async def look(resources: Resources) -> None:
        for state, job_id in made.jobs.items():
            poll = await resources.poller.poll(made.secret, Variant.A, job_id, of=None)
            assert poll.job is not None
            assert poll.job.state == {"delayed": "queued"}.get(state, state)
            for image in poll.job.images:
                assert await resources.images.get(image.image_uri) == b"png"
        (claimed,) = await claim(resources, limit=8)
        assert claimed.lease.job_id == made.jobs["queued"]
        await finish(resources, claimed)
        assert (await job_of(resources, made.jobs["running"])).state is JobState.RUNNING, "until its lease runs out"

    moved.stores(look)
    with plain_redis(ensure_redis(moved.settings.data_dir).url) as client:
        assert audit(client, max_attempts=5) == []


@pytest.mark.parametrize("diskless", ["yes", "no"])
def test_what_is_not_whole_gets_no_name_and_pushes_no_copy_out(atelier: Atelier, tmp_path: Path, diskless: str) -> None:
    older = tmp_path / "copies" / "redis-20260101T000000Z.rdb"
    older.parent.mkdir()
    older.touch()
    with (
        server(tmp_path / "source", [f"repl-diskless-sync {diskless}", "repl-diskless-sync-delay 0"]) as port,
        cut_short(port, 4 << 20) as worse,
    ):
        asyncio.run(until_it_answers(port))
        plain_redis(f"redis://127.0.0.1:{port}").set("job", os.urandom(8 << 20))
        words = ("backup", str(older.parent), "--keep", "1")
        ended = atelier(*words, env={"ATELIER_REDIS_URL": f"redis://127.0.0.1:{worse}"})
        assert "is not whole: it ended in its middle" in ended.err
        assert list(older.parent.iterdir()) == [older]
        assert atelier(*words, env={"ATELIER_REDIS_URL": f"redis://127.0.0.1:{port}"}).code == 0
    (copy,) = older.parent.iterdir()
    assert copy.stat().st_size > 8 << 20


@contextmanager
def cut_short(port: int, most: int) -> Generator[int]:
    """Pass connections to a port on, and close each once the server has sent so many bytes."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as server:
                threading.Thread(target=pass_on, args=(self.request, server), daemon=True).start()
                pass_on(server, self.request, most)

    def pass_on(source: socket.socket, target: socket.socket, left: float = math.inf) -> None:
        with suppress(OSError):
            while left > 0 and (piece := source.recv(1 << 16)):
                target.sendall(piece)
                left -= len(piece)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as relay:
        relay.daemon_threads = True
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        yield relay.server_address[1]
        relay.shutdown()


def test_a_copy_that_is_missing_is_told(atelier: Atelier, redis_db: Any, tmp_path: Path) -> None:
    async def age(resources: Resources) -> timedelta | None:
        return await resources.queue_stats.copy_age()

    def told() -> dict[str, str]:
        (check,) = [each for each in json.loads(atelier("doctor", "--json").out)["checks"] if each["name"] == "backup"]
        return check

    assert (atelier.stores(age), told()["level"]) == (None, "ok"), "nothing to copy"
    account = atelier.json("accounts", "create", "acme", "--no-key")["id"]
    old = redis_db.zscore(redis_key("accounts"), account) - 3 * 24 * 3600 * 1000
    redis_db.zadd(redis_key("accounts"), {account: old})
    assert (told()["level"], told()["found"]) == ("warn", "Redis was not copied for 3 d")
    assert atelier("backup", "--made").code == 0
    found = atelier.stores(age)
    assert found is not None
    assert found < timedelta(hours=1)
    assert told()["level"] == "ok"


def test_what_is_missing_or_does_not_fit_is_named(atelier: Atelier, redis_db: Any) -> None:
    assert "put it back first" in atelier("restore", "--check").err
    atelier.settings.data_dir.mkdir(parents=True, exist_ok=True)
    made = atelier.stores(_fill)
    assert "backup-and-restore.md" in atelier("restore").err
    assert atelier.json("restore", "--check")["problems"] == []
    assert "the pepper is another one" in _problem(atelier, ATELIER_PEPPER="another pepper of this node")
    assert "1 API keys use a version" in _problem(atelier, ATELIER_PEPPERS='{"2": "another pepper of this node"}')
    storage = atelier.settings.data_dir / "images"
    for path in storage.rglob("*.safetensors"):
        path.unlink()
    shutil.rmtree(next(storage.rglob(made.jobs["completed"])))
    found = atelier("restore", "--check", "--json")
    image, weights = json.loads(found.out)["missing"]
    assert found.code == 1
    assert made.jobs["completed"] in image
    assert weights.endswith(".safetensors")
    assert "1 images and 1 LoRA files looked for, 2 not in the storage" in atelier("restore", "--check").out
    record = redis_key("job", made.jobs["queued"])
    redis_db.hset(record, "version", RECORD_VERSION + 1)
    assert "1 job records were written by a newer version" in _problem(atelier)
    redis_db.hset(record, "state", "unheard of")
    assert f"1 job records cannot be read, such as {made.jobs['queued']}" in _problem(atelier)
    redis_db.flushall()
    assert "holds no account" in _problem(atelier)


def _problem(atelier: Atelier, **env: str) -> str:
    ended = atelier("restore", "--check", env=env)
    assert ended.code == 1, ended.out
    return ended.out
