"""Workers read adapters that others have drawn with lately, before a job of theirs needs them."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from deployments.args import GeneratorArgs
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import CommitReply, JobKind
from serve_app.engine import Engine, EngineOptions
from serve_app.jobs.queue import new_nonce
from serve_app.loras.registration import remove_lora
from serve_app.worker.attempt import WorkerTiming
from serve_app.worker.generation import GenerationExecutor
from serve_app.worker.prefetch import AdapterPrefetch, pause
from serve_app.worker.worker import Worker
from tests.composition import Resources
from tests.made_jobs import accept, claim
from tests.support import POCKET, adapter_id, existing, lora_record, rewrite_catalog, wait_until

OUTLINE, NEON = adapter_id("outline"), adapter_id("neon")
KIND = JobKind.GENERATION


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine:
        yield engine


@pytest.fixture
async def executor(loaded: Engine, resources: Resources) -> GenerationExecutor:
    """Return an executor of the shared engine, once it has read what an earlier test prefetched.

    While its first adapter is being read, an engine has space for no other.
    """
    await wait_until(lambda: loaded.has_space("pocket"))
    return GenerationExecutor(loaded, resources.catalog, resources.weights, resources.images)


async def digest_of(resources: Resources, lora_id: str) -> str:
    adapter = existing(await resources.catalog.adapter(lora_id))
    return adapter.sha256


async def draw_elsewhere(resources: Resources, lora_id: str, base_model: str = "") -> None:
    """Have another worker complete a job of this LoRA."""
    await accept(resources, lora_id=lora_id, base_model=base_model)
    (claimed,) = await claim(resources, worker="elsewhere", limit=64)
    assert await resources.queue.finish(claimed.lease, [], seconds=1) is CommitReply.OK


async def add_copy(resources: Resources, name: str, file: str) -> None:
    """Add a row to the catalog, `model_copy`, with a copy of a LoRA's weights that no test has loaded."""
    shutil.copyfile(POCKET / "loras" / f"{name}.safetensors", file)
    rewrite_catalog(resources.settings.catalog, lambda rows: rows.append({**rows[0], "id": "model_copy", "file": file}))
    assert await resources.applied_catalog.apply_file() == []


@pytest.mark.slow
async def test_an_adapter_of_the_latest_jobs_is_read_and_its_holder_known(
    executor: GenerationExecutor, resources: Resources, loaded: Engine
) -> None:
    prefetch = AdapterPrefetch(resources.for_workers, executor, worker="here")
    assert await prefetch.prefetch_one() is None, "nothing was drawn yet"
    await accept(resources, lora_id=OUTLINE)
    (claimed,) = await claim(resources, worker="elsewhere")
    assert await prefetch.prefetch_one() is None, "whether it ends its worker is not known yet"
    await resources.queue.finish(claimed.lease, [], seconds=1)
    assert await prefetch.prefetch_one() == OUTLINE
    group = await digest_of(resources, OUTLINE)
    await wait_until(lambda: group in executor.resident)
    assert await prefetch.prefetch_one() is None, "it is here"
    assert group not in loaded.resident_adapters, "the slots are left to what is drawn"
    await resources.queue.claim("here", pool=KIND, nonce=new_nonce(), resident=executor.resident, limit=8)
    job_id = await accept(resources, lora_id=OUTLINE)
    assert await claim(resources, worker="third", limit=8) == [], "left to its holders"
    (claimed,) = await resources.queue.claim("here", pool=KIND, nonce=new_nonce(), resident=executor.resident, limit=8)
    assert claimed.lease.job_id == job_id


async def test_an_adapter_is_read_for_the_base_model_that_it_was_drawn_on(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path
) -> None:
    weights = {name: tensor / 2 for name, tensor in load_file(POCKET / "loras" / "outline.safetensors").items()}
    save_file(weights, tmp_path / "raw.safetensors")
    adapter = lora_record(tmp_path / "raw.safetensors", id="model_raw", base_model="raw", accounts=None)
    await resources.adapter_registry.register(adapter)
    prefetch = AdapterPrefetch(resources.for_workers, executor, worker="here")
    await draw_elsewhere(resources, "model_raw", "raw")
    assert await prefetch.prefetch_one() is None, "it is not loaded here"
    await draw_elsewhere(resources, "model_raw", "pocket")
    async with asyncio.timeout(60):
        while await prefetch.prefetch_one() != "model_raw":
            pass  # it is drawn by chance
    await wait_until(lambda: adapter.sha256 in executor.resident)


async def test_of_two_at_once_one_reads_an_adapter(executor: GenerationExecutor, resources: Resources) -> None:
    blueprint = adapter_id("blueprint")
    found = await asyncio.gather(executor.prefetch(blueprint), executor.prefetch(blueprint))
    assert sorted(found, key=str) == sorted([await digest_of(resources, blueprint), None], key=str)


async def test_a_removed_lora_is_no_recent_adapter(resources: Resources) -> None:
    outline = existing(await resources.catalog.adapter(OUTLINE))
    await resources.adapter_registry.register(replace(outline, id="model_mine"))
    await draw_elsewhere(resources, OUTLINE)
    await draw_elsewhere(resources, "model_mine")
    assert await recent_adapters(resources) == {OUTLINE, "model_mine"}
    assert await remove_lora(resources.adapter_registry, resources.lora_weights, "model_mine") == "removed"
    assert await recent_adapters(resources) == {OUTLINE}


async def recent_adapters(resources: Resources) -> set[str]:
    return {lora_id for lora_id, _ in await resources.recent_adapters.sample(KIND, 64)}


@pytest.mark.slow
async def test_an_adapter_whose_weights_are_gone_is_tried_once_and_hurts_nothing(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await add_copy(resources, "stripes", str(tmp_path / "c.safetensors"))
    await draw_elsewhere(resources, "model_copy")
    (tmp_path / "c.safetensors").unlink()
    prefetch = AdapterPrefetch(resources.for_workers, executor, worker="here")
    with caplog.at_level("INFO", logger="serve_app.worker.prefetch"):
        assert [await prefetch.prefetch_one() for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
    await draw_elsewhere(resources, NEON)
    async with asyncio.timeout(60):
        while await prefetch.prefetch_one() != NEON:
            pass  # it is drawn by chance


@pytest.mark.slow
async def test_an_adapter_that_an_outage_hid_is_tried_again(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path
) -> None:
    file = tmp_path / "c.safetensors"
    await add_copy(resources, "confetti", str(file))
    await draw_elsewhere(resources, "model_copy")
    prefetch = AdapterPrefetch(resources.for_workers, executor, worker="here")
    file.rename(tmp_path / "away")
    file.symlink_to(file)  # whoever opens it meets an error of the system
    with pytest.raises(StoreUnavailable):
        await prefetch.prefetch_one()
    (tmp_path / "away").rename(file)
    assert await prefetch.prefetch_one() == "model_copy"


async def test_nothing_is_prefetched_onto_a_disk_that_is_nearly_full(
    executor: GenerationExecutor, resources: Resources
) -> None:
    await draw_elsewhere(resources, adapter_id("sepia"))
    full = resources.with_parts(settings=resources.settings.model_copy(update={"disk_reserve": 2**60}))
    assert await AdapterPrefetch(full.for_workers, executor, worker="here").prefetch_one() is None
    assert await AdapterPrefetch(resources.for_workers, executor, worker="here").prefetch_one() == adapter_id("sepia")


@pytest.mark.parametrize(("seconds", "every"), [(0, None), (3, timedelta(seconds=3))])
def test_an_operator_sets_how_often(seconds: float, every: timedelta | None) -> None:
    assert GeneratorArgs(prefetch_s=seconds).timing == WorkerTiming(prefetch=every)


def test_after_failures_the_next_look_is_later() -> None:
    every = timedelta(seconds=2)
    assert [pause(every, failures).total_seconds() for failures in (0, 1, 4, 5, 10**6)] == [2, 4, 32, 60, 60]
    assert pause(timedelta(minutes=5), 3) == timedelta(minutes=5), "never sooner than the operator wants"


@pytest.mark.slow
async def test_an_outage_is_not_asked_again_and_again(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.safetensors"
    await add_copy(resources, "shadow", str(file))
    await draw_elsewhere(resources, "model_copy")
    file.unlink()
    file.symlink_to(file)  # whoever opens it meets an error of the system
    with caplog.at_level("DEBUG", logger="serve_app.worker.prefetch"):
        running = asyncio.create_task(
            AdapterPrefetch(resources.for_workers, executor, worker="here").run(timedelta(seconds=0.05))
        )
        await wait_until(lambda: len(caplog.records) >= 4)
        running.cancel()
    times = [record.created for record in caplog.records]
    assert times[3] - times[2] > 0.35, "eight times as long as without failures"


@pytest.mark.slow
async def test_a_worker_prefetches_until_it_drains(executor: GenerationExecutor, resources: Resources) -> None:
    mosaic = adapter_id("mosaic")
    await draw_elsewhere(resources, mosaic)
    timing = WorkerTiming(prefetch=timedelta(milliseconds=20))
    worker = Worker(resources.for_workers, executor, name="here", timing=timing)
    worker.start()
    group = await digest_of(resources, mosaic)
    await wait_until(lambda: group in executor.resident)
    await worker.drain(timedelta(seconds=5))
    assert worker._prefetching is not None  # pyright: ignore[reportPrivateUsage]
    assert worker._prefetching.done()  # pyright: ignore[reportPrivateUsage]
