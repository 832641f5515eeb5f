"""`atelier backup` and `restore` keep a service whole: its jobs run once, and damage is named."""

import asyncio
import json
import stat
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import redis

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, JobKind, JobState, StoredImage, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.resources import Resources
from serve_app.stores import redis_copy
from serve_app.stores.claiming import new_nonce
from tests.audit import audit
from tests.cli.conftest import Atelier
from tests.support import adapter_id

POISON = Failure(code=FailureCode.OUT_OF_MEMORY, message="too large for this device")


class Made(NamedTuple):
    secret: str
    account_id: str
    jobs: dict[str, str]


async def _job(resources: Resources, account_id: str) -> str:
    request = GenerationRequest(prompt="a boat", lora_id=adapter_id("neon"), seeds=(7,))
    job_id = new_job_id(JobKind.GENERATION)
    kind: dict[str, Any] = {"job_id": job_id, "variant": Variant.A, "group": "g"}
    await resources.queue.accept(account_id=account_id, request=request, **kind)
    return job_id


async def _finish(resources: Resources, claim: Any) -> None:
    name = resources.images.object_name(claim.account_id, claim.lease.job_id, claim.lease.attempt, 0, claim.created_at)
    uri = await resources.images.put(name, b"png")
    image = StoredImage(image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256="0" * 64, size_bytes=3)
    await resources.queue.finish(claim.lease, [image], seconds=1)


async def _fill(resources: Resources) -> Made:
    """An account with a key, and a job in every state."""
    account = await resources.accounts.create("acme")
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    states = ("compact", "completed", "failed", "delayed", "running")
    jobs: dict[str, str] = {}
    for state in states:
        jobs[state] = await _job(resources, account.id)
        (claim,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
        if state in ("compact", "completed"):
            await _finish(resources, claim)
        if state == "compact":
            await resources.compaction.compact(timedelta())
        if state == "failed":
            await resources.queue.fail(claim.lease, POISON, retry=False)
        if state == "delayed":
            await resources.queue.release(claim.lease, pause=timedelta(hours=1))
    jobs["canceled"] = await _job(resources, account.id)
    await resources.queue.cancel(jobs["canceled"], account_id=account.id)
    jobs["queued"] = await _job(resources, account.id)
    return Made(secret, account.id, jobs)


async def _claim_all(resources: Resources) -> list[str]:
    found: list[str] = []
    while claims := await resources.queue.claim("later", kind=JobKind.GENERATION, nonce=new_nonce(), limit=8):
        for claim in claims:
            found.append(claim.lease.job_id)
            await _finish(resources, claim)
    return found


def test_a_restored_service_knows_its_keys_answers_its_jobs_and_runs_what_waits_once(
    atelier: Atelier, redis_db: redis.Redis, tmp_path: Path
) -> None:
    made = atelier.stores(_fill)
    backup = tmp_path / "backup"
    facts = atelier.json("backup", str(backup))
    assert (facts["jobs"], facts["objects"]) == (7, 2)
    assert {stat.S_IMODE(path.stat().st_mode) for path in backup.iterdir()} == {0o600}
    assert stat.S_IMODE(backup.stat().st_mode) == 0o700
    before = {name: cast(Any, redis_db).pttl(name) for name in redis_db.keys()}  # noqa: SIM118 - a client is no dictionary
    redis_db.flushall()
    assert atelier.json("restore", str(backup), "--check")["missing"] == []
    assert redis_db.dbsize() == 0
    assert atelier.json("restore", str(backup))["keys"] == len(before)
    assert {name: cast(Any, redis_db).pttl(name) > 0 for name in redis_db.keys()} == {  # noqa: SIM118
        name: life > 0 for name, life in before.items()
    }
    assert audit(redis_db, max_attempts=5) == []

    async def look(resources: Resources) -> None:
        for state, job_id in made.jobs.items():
            poll = await resources.poller.poll(made.secret, Variant.A, job_id, of=None)
            assert poll.job is not None
            wanted = {"compact": "completed", "delayed": "queued"}.get(state, state)
            assert poll.job.state == wanted
            for image in poll.job.images:
                assert await resources.images.get(image.image_uri) == b"png"
        assert await _claim_all(resources) == [made.jobs["queued"]]
        running = await resources.jobs.find(made.jobs["running"])
        assert running is not None
        assert running.state is JobState.RUNNING, "until its lease runs out"

    atelier.stores(look)
    assert audit(redis_db, max_attempts=5) == []


def test_a_copy_of_a_service_at_work_is_of_one_moment(
    atelier: Atelier, redis_db: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are accepted and finished all the time; the copy holds each in exactly the places of its state."""
    monkeypatch.setattr(redis_copy, "AT_ONCE", 5)
    done, ready = threading.Event(), threading.Event()

    async def work(resources: Resources) -> None:
        while not done.is_set():
            accepted = [_job(resources, f"acct_{number}") for number in range(24)]
            await asyncio.gather(*accepted)
            ready.set()
            claims = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), limit=20)
            await asyncio.gather(*(resources.queue.finish(claim.lease, [], seconds=1) for claim in claims))

    working = threading.Thread(target=lambda: atelier.stores(work))
    working.start()
    try:
        assert ready.wait(30)
        assert atelier.json("backup", str(tmp_path / "backup"))["jobs"] > 0
    finally:
        done.set()
        working.join()
    redis_db.flushall()
    atelier.json("restore", str(tmp_path / "backup"))
    assert audit(redis_db, max_attempts=5) == []


def test_a_backup_that_would_not_work_is_refused_by_name(
    atelier: Atelier, redis_db: redis.Redis, tmp_path: Path
) -> None:
    made = atelier.stores(_fill)
    backup = tmp_path / "backup"
    atelier.json("backup", str(backup))
    assert "already holds a backup" in atelier("backup", str(backup)).err
    assert "an empty one" in atelier("restore", str(backup)).err
    assert atelier.stores(lambda resources: resources.jobs.find(made.jobs["queued"])), "nothing was touched"

    async def lose_an_image(resources: Resources) -> None:
        job = await resources.jobs.find(made.jobs["completed"])
        assert job is not None
        await resources.images.delete(job.images[0].image_uri)

    atelier.stores(lose_an_image)
    checked = atelier("restore", str(backup), "--check", "--json")
    assert (checked.code, [made.jobs["completed"] in name for name in json.loads(checked.out)["missing"]]) == (
        1,
        [True],
    )
    redis_db.flushall()
    assert "pepper" in atelier("restore", str(backup), env={"ATELIER_PEPPER": "another"}).err
    part = backup / "redis-00001.jsonl.gz"
    part.write_bytes(part.read_bytes() + b"x")
    assert "redis-00001.jsonl.gz was changed after it was written" in atelier("restore", str(backup)).err
    manifest = backup / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert "version 2" in atelier("restore", str(backup), "--check").err
    manifest.unlink()
    assert "no manifest.json" in atelier("restore", str(backup), "--check").err
    assert redis_db.dbsize() == 0


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupted_restore_is_begun_again(
    atelier: Atelier, redis_db: redis.Redis, tmp_path: Path, *, interrupted: bool
) -> None:
    atelier.stores(_fill)
    atelier.json("backup", str(tmp_path / "backup"))
    if interrupted:
        cast(Any, redis_db).set("{job:0}:restoring", "half of it")
    assert atelier("restore", str(tmp_path / "backup")).code == (0 if interrupted else 1)
    assert not redis_db.exists("{job:0}:restoring")
