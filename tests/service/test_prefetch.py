"""Workers read adapters of the fleet's latest jobs before a job of theirs needs them."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from serve_app.domain.jobs import JobKind, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.engine import Engine, EngineOptions
from serve_app.executors.generation import GenerationExecutor
from serve_app.service.prefetch import AdapterPrefetch
from serve_app.service.register import remove
from serve_app.service.resources import Resources
from serve_app.service.worker import Worker
from serve_app.service.worker_timing import WorkerTiming
from serve_app.stores.claiming import new_nonce
from tests.support import POCKET, adapter_id, wait_until

OUTLINE, NEON = adapter_id("outline"), adapter_id("neon")
KIND = JobKind.GENERATION


@pytest.fixture(scope="module")
def loaded() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine:
        yield engine


@pytest.fixture
def executor(loaded: Engine, resources: Resources) -> GenerationExecutor:
    return GenerationExecutor(loaded, resources)


async def digest_of(resources: Resources, lora_id: str) -> str:
    adapter = await resources.catalog.adapter(lora_id)
    assert adapter is not None
    return adapter.sha256


async def draw_elsewhere(resources: Resources, lora_id: str, *, worker: str = "elsewhere") -> None:
    """Have another worker claim a job of this LoRA."""
    request = GenerationRequest(prompt="a boat", lora_id=lora_id, seeds=(1,))
    group = await digest_of(resources, lora_id)
    await resources.queue.accept(
        job_id=new_job_id(KIND), variant=Variant.A, account_id="acct", request=request, group=group, adapter_id=lora_id
    )
    assert len(await resources.queue.claim(worker, kind=KIND, nonce=new_nonce(), limit=64)) == 1


@pytest.mark.slow
async def test_an_adapter_of_the_latest_jobs_is_read_and_its_holder_known(
    executor: GenerationExecutor, resources: Resources, loaded: Engine
) -> None:
    prefetch = AdapterPrefetch(resources, executor, worker="here")
    assert await prefetch.prefetch_one() is None, "no job was claimed yet"
    await draw_elsewhere(resources, OUTLINE)
    assert await prefetch.prefetch_one() == OUTLINE
    group = await digest_of(resources, OUTLINE)
    await wait_until(lambda: group in executor.resident)
    assert await prefetch.prefetch_one() is None, "it is here"
    assert group not in loaded.resident_adapters, "the slots are left to what is drawn"
    await resources.queue.claim("here", kind=KIND, nonce=new_nonce(), resident=executor.resident, limit=8)
    request = GenerationRequest(prompt="a boat", lora_id=OUTLINE, seeds=(2,))
    job_id = new_job_id(KIND)
    await resources.queue.accept(
        job_id=job_id, variant=Variant.A, account_id="acct", request=request, group=group, adapter_id=OUTLINE
    )
    assert await resources.queue.claim("third", kind=KIND, nonce=new_nonce(), limit=8) == [], "left to its holders"
    (claim,) = await resources.queue.claim("here", kind=KIND, nonce=new_nonce(), resident=executor.resident, limit=8)
    assert claim.lease.job_id == job_id


async def test_a_removed_lora_is_no_recent_adapter(resources: Resources) -> None:
    outline = await resources.catalog.adapter(OUTLINE)
    assert outline is not None
    await resources.adapter_registry.register(replace(outline, id="model_mine"))
    await draw_elsewhere(resources, OUTLINE)
    await draw_elsewhere(resources, "model_mine")
    assert await recent_adapters(resources) == {OUTLINE, "model_mine"}
    assert await remove(resources, "model_mine") == "removed"
    assert await recent_adapters(resources) == {OUTLINE}


async def recent_adapters(resources: Resources) -> set[str]:
    return set(await resources.recent_adapters.sample(KIND, 64))


@pytest.mark.slow
async def test_an_adapter_whose_weights_are_gone_is_tried_once_and_hurts_nothing(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = yaml.safe_load(resources.settings.catalog.read_text())
    catalog["adapters"].append({**catalog["adapters"][0], "id": "model_copy", "file": str(tmp_path / "c.safetensors")})
    (tmp_path / "c.safetensors").write_bytes((POCKET / "loras" / "stripes.safetensors").read_bytes())
    resources.settings.catalog.write_text(yaml.safe_dump(catalog))
    assert await resources.applied_catalog.apply_file() == []
    await draw_elsewhere(resources, "model_copy")
    (tmp_path / "c.safetensors").unlink()
    prefetch = AdapterPrefetch(resources, executor, worker="here")
    with caplog.at_level("INFO", logger="serve_app.service.prefetch"):
        assert [await prefetch.prefetch_one() for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
    await draw_elsewhere(resources, NEON)
    async with asyncio.timeout(60):
        while await prefetch.prefetch_one() != NEON:
            pass  # it is drawn by chance


@pytest.mark.slow
async def test_a_worker_prefetches_until_it_drains(executor: GenerationExecutor, resources: Resources) -> None:
    mosaic = adapter_id("mosaic")
    await draw_elsewhere(resources, mosaic)
    timing = WorkerTiming(prefetch=timedelta(milliseconds=20))
    worker = Worker(resources, executor, name="here", timing=timing)
    worker.start()
    group = await digest_of(resources, mosaic)
    await wait_until(lambda: group in executor.resident)
    await worker.drain(timedelta(seconds=5))
    assert worker._prefetching is not None  # pyright: ignore[reportPrivateUsage]
    assert worker._prefetching.done()  # pyright: ignore[reportPrivateUsage]
