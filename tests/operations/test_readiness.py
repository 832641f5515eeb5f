"""`/readyz` tells whether jobs will be worked on, as far as Redis knows."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import yaml

from deployments.replica import Progress, noting_start
from serve_app.api.responses import time_left
from serve_app.domain.jobs import WORKER_LIFE, JobKind
from serve_app.jobs import images
from serve_app.jobs.images import ImageStore
from serve_app.operations.readiness import LONGEST_START_S
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.worker.executor import Executor
from tests.composition import Resources
from tests.faults.storage import ERROR, SLOW, register_faulty, set_fault
from tests.made_jobs import accept, claim, job_of
from tests.support import put_in_group, wait_until
from tests.worker.scripted_executor import ScriptedExecutor

GENERATION = JobKind.GENERATION


@pytest.fixture
def always_on(resources: Resources) -> Resources:
    """Stores of an ingress whose deployment keeps at least one generator."""

    async def keeps_generator(pool: str) -> bool:
        return pool == GENERATION

    return resources.with_parts(keeps_worker=keeps_generator)


async def working() -> Executor:
    return ScriptedExecutor()


async def failing() -> Executor:
    raise FileNotFoundError("no model_index.json")


async def test_it_is_not_ready_until_the_first_generator_asks_for_work(always_on: Resources) -> None:
    found = await always_on.readiness()
    assert found == ({"redis": "ok", "storage": "ok", "generator": "none has started"}, "")
    assert (found.answers_polls, found.is_ready) == (True, False)
    await claim(always_on)
    found = await always_on.readiness()
    assert found == ({"redis": "ok", "storage": "ok", "generator": "ok"}, "")
    assert found.is_ready


async def test_a_generator_that_was_seen_last_long_ago_is_gone(always_on: Resources, redis_db: redis.Redis) -> None:
    last_seen = time.time() - WORKER_LIFE.total_seconds() - 1
    redis_db.zadd(redis_key("workers", GENERATION), {"worker": last_seen * 1000})
    assert not (await always_on.readiness()).is_ready


async def test_a_generator_that_cannot_start_is_named_with_its_reason(resources: Resources) -> None:
    with pytest.raises(FileNotFoundError):
        await noting_start(GENERATION, resources.workers, failing(), Progress())
    found = await resources.readiness()
    assert not found.is_ready
    assert found.states["generator"] == "cannot start: FileNotFoundError: no model_index.json"
    await noting_start(GENERATION, resources.workers, working(), Progress())
    assert (await resources.readiness()).is_ready


async def test_a_generator_that_starts_tells_how_far_it_is(always_on: Resources, resources: Resources) -> None:
    progress, read = Progress(), asyncio.Event()

    async def loading() -> Executor:
        progress("loading sdxl: 3.1 of 6.9 GB")
        await read.wait()
        progress("loaded sdxl: 6.9 GB in 41 s")
        return ScriptedExecutor()

    starting = asyncio.create_task(noting_start(GENERATION, always_on.workers, loading(), progress))

    async def tells() -> bool:
        return (await always_on.readiness()).states["generator"] == "starting: loading sdxl: 3.1 of 6.9 GB"

    await wait_until(tells)
    assert not (await always_on.readiness()).is_ready
    assert (await resources.readiness()).states["generator"] == "scaled to zero", "a service that may be is ready"
    read.set()
    await starting
    assert await always_on.workers.starting(GENERATION) == "loaded sdxl: 6.9 GB in 41 s"


async def test_a_generator_that_is_stopped_while_it_loads_has_not_failed(always_on: Resources) -> None:
    stopped = ThreadPoolExecutor()
    stopped.shutdown()

    async def loading() -> Executor:
        return await asyncio.get_running_loop().run_in_executor(stopped, ScriptedExecutor)

    with pytest.raises(RuntimeError):
        await noting_start(GENERATION, always_on.workers, loading(), Progress())
    assert (await always_on.readiness()).states["generator"] == "none has started"


async def test_while_no_worker_is_there_an_estimate_has_the_time_of_a_start(
    resources: Resources, redis_db: redis.Redis
) -> None:
    job_id = await accept(resources)

    async def left() -> tuple[float, bool]:
        job = await job_of(resources, job_id)
        return time_left(job).total_seconds(), job.waits_for_worker

    unknown, waits = await left()
    assert waits
    await resources.workers.note_start(GENERATION, timedelta(seconds=42))
    known, waits = await left()
    assert (known - unknown, waits) == (pytest.approx(42, abs=5), True)
    redis_db.zadd(redis_key("workers", GENERATION), {"worker": time.time() * 1000})
    assert await left() == (pytest.approx(unknown, abs=5), False)


async def test_one_of_several_that_cannot_start_does_not_matter(resources: Resources) -> None:
    await claim(resources)
    with pytest.raises(FileNotFoundError):
        await noting_start(GENERATION, resources.workers, failing(), Progress())
    assert (await resources.readiness()).states["generator"] == "ok"


async def test_each_group_that_a_base_model_names_is_told_of(resources: Resources, settings: Settings) -> None:
    """One group that cannot work does not take the service from the others' callers."""

    async def keeps(pool: str) -> bool | None:
        return None if pool == "generation.lost" else False

    service = resources.with_parts(keeps_worker=keeps)
    content = yaml.safe_load(settings.catalog.read_text())
    [pocket] = content["base_models"]
    content["base_models"] += [{**pocket, "id": each, "group": each} for each in ("sdxl", "lost")]
    settings.catalog.write_text(yaml.safe_dump(content))
    await resources.applied_catalog.apply_file()
    found = await service.readiness()
    assert {part: state for part, state in found.states.items() if part.startswith("generator")} == {
        "generator": "scaled to zero",
        "generator.lost": "no application serves this group",
        "generator.sdxl": "scaled to zero",
    }
    with pytest.raises(FileNotFoundError):
        await noting_start("generation.sdxl", resources.workers, failing(), Progress())
    found = await service.readiness()
    assert found.states["generator.sdxl"] == "cannot start: FileNotFoundError: no model_index.json"
    assert found.is_ready
    with pytest.raises(FileNotFoundError):
        await noting_start(GENERATION, resources.workers, failing(), Progress())
    assert not (await service.readiness()).is_ready, "no group can work"
    await claim(resources, pool="generation.sdxl")
    assert (await service.readiness()).states["generator.sdxl"] == "ok"
    assert (await service.readiness()).is_ready


async def test_a_base_model_that_came_to_a_group_whose_generators_have_not_loaded_it_is_named(
    resources: Resources, settings: Settings
) -> None:
    """Its jobs are put back beside idle generators until these are restarted."""
    await claim(resources, pool="generation.sdxl")
    await resources.measures.show("generation.sdxl", "w", {}, base_models=["other"])
    put_in_group(settings.catalog, "sdxl")
    await resources.applied_catalog.apply_file()
    found = await resources.readiness()
    words = "ok, but no generator has loaded pocket: restart its generators"
    assert found.states["generator.sdxl"] == words
    assert found.is_ready, "the others' jobs are worked on"
    await resources.measures.show("generation.sdxl", "w", {}, base_models=["other", "pocket"])
    assert (await resources.readiness()).states["generator.sdxl"] == "ok"


async def test_scaled_to_zero_is_ready_while_no_work_waits_in_vain(resources: Resources, redis_db: redis.Redis) -> None:
    assert (await resources.readiness()).states["generator"] == "scaled to zero"
    redis_db.zadd(redis_key("age", GENERATION), {"job": (time.time() - LONGEST_START_S + 60) * 1000})
    assert (await resources.readiness()).is_ready
    redis_db.zadd(redis_key("age", GENERATION), {"job": (time.time() - LONGEST_START_S - 60) * 1000})
    assert (await resources.readiness()).states["generator"] == "none has started"


async def test_a_storage_that_fails_or_hangs_is_found_by_few_tries(
    resources: Resources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_faulty()
    bucket = tmp_path / "bucket"
    set_fault(bucket, None)
    settings = Settings.model_validate(resources.settings.model_dump() | {"storage_url": f"faulty://{bucket}"})
    there = resources.with_parts(images=ImageStore(settings))
    assert not (await there.readiness()).reason
    set_fault(bucket, ERROR)
    assert not (await there.readiness()).reason, "it is tried once in a while"
    monkeypatch.setattr(images, "PROBE_EVERY_S", 0.0)
    found = await there.readiness()
    assert (found.reason, found.states["storage"]) == ("storage cannot be written", "cannot be written")
    assert found.is_ready, "polls are answered"
    set_fault(bucket, None)
    assert not (await there.readiness()).reason
    monkeypatch.setattr(images, "PROBE_WAIT_S", 0.05)
    set_fault(bucket, SLOW)
    try:
        for _ in range(5):
            assert (await there.readiness()).reason == "storage cannot be written"
        trying = [thread for thread in threading.enumerate() if thread.name.startswith("storage-probe")]
        assert len(trying) == 1
    finally:
        set_fault(bucket, None)

    async def recovers() -> bool:
        return not (await there.readiness()).reason

    await wait_until(recovers)
    assert not [path for path in bucket.rglob("*") if path.is_file()]
