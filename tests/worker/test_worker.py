"""The worker on the real engine, the demo model, a real Redis and real files; no Ray."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from serve_app.domain.accounts import Caller
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Job, JobKind, JobState
from serve_app.domain.metrics import Metric
from serve_app.domain.requests import GenerationDraft, GenerationRequest, LoraUse, Variant, image_seeds
from serve_app.engine import Engine, EngineOptions, Finished
from serve_app.engine.run import StepTiming, take
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.store.keys import redis_key
from serve_app.store.measures import Measures
from serve_app.worker.attempt import WorkerTiming
from serve_app.worker.generation import GenerationExecutor
from tests.audit import audit
from tests.composition import Resources, open_resources
from tests.made_jobs import ACCOUNT, accept, failure_of, job_of
from tests.rewriting import replacing
from tests.support import POCKET, adapter_id, wait_until, write_catalog
from tests.worker.scripted_executor import QUICK, is_unhealthy, with_queue, working

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("worker")]  # the engine is loaded once
SHORT, LONG = 3, 400
"""Steps: over before anyone looks, and long enough to be met while running."""


@pytest.fixture(scope="session")
def loaded() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=8)) as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Return the session's engine, idle: nothing of one test is left for the next."""
    of_others = set(threading.enumerate())  # workers of other files' session fixtures step on
    yield loaded
    for thread in set(threading.enumerate()) - of_others:
        if thread.name == "generation-steps":
            thread.join(60)
            assert not thread.is_alive()
    for run in loaded.progress():
        loaded.abort(run)
    while loaded.has_work:
        loaded.step()


@pytest.fixture
def executor(engine: Engine, resources: Resources) -> GenerationExecutor:
    return GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)


def picture(*, seed: int = 7, n: int = 1, steps: int = SHORT, lora: str = "outline") -> GenerationRequest:
    return GenerationRequest(
        prompt="a red circle",
        loras=(LoraUse(adapter_id(lora)),),
        width=256,
        height=256,
        steps=steps,
        seeds=image_seeds(seed, n),
    )


async def draw(resources: Resources, request: GenerationRequest) -> str:
    """Accept a request in the group of its weights."""
    adapter = await resources.catalog.adapter(request.lora_id)
    return await accept(resources, request=request, weights=adapter.sha256 if adapter else "")


async def ended(resources: Resources, job_id: str) -> Job:
    async def is_over() -> bool:
        return (await job_of(resources, job_id)).state.is_terminal

    await wait_until(is_over, timeout=60)
    return await job_of(resources, job_id)


async def running(resources: Resources, job_id: str) -> None:
    async def has_progress() -> bool:
        return (await job_of(resources, job_id)).progress > 0

    await wait_until(has_progress, timeout=60)


def objects(resources: Resources) -> list[Path]:
    return [path for path in (resources.settings.data_dir / "images").rglob("*") if path.is_file()]


async def test_a_job_ends_as_pngs_of_the_asked_size(resources: Resources, executor: GenerationExecutor) -> None:
    async with working(resources, executor):
        done = await ended(resources, await draw(resources, picture(n=2)))
    assert done.state is JobState.COMPLETED
    assert done.progress == 100
    assert len(done.images) == len({image.image_id for image in done.images}) == 2
    assert done.timings is not None
    assert done.timings.denoise > 0
    assert min(done.timings.load, done.timings.store) >= 0
    for stored in done.images:
        png = await resources.images.get(stored.image_uri)
        assert len(png) == stored.size_bytes
        opened = Image.open(BytesIO(png))
        assert opened.size == (stored.width, stored.height) == (256, 256)
        assert opened.info["Software"].startswith("Atelier ")
        assert {"Job", "parameters"}.isdisjoint(opened.info)


@pytest.mark.slow
async def test_a_png_names_its_job_and_its_settings_where_that_is_asked_for(
    settings: Settings, redis_db: Any, engine: Engine
) -> None:
    async with open_resources(settings.model_copy(update={"png_job_id": True})) as resources:
        async with working(
            resources, GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)
        ):
            done = await ended(resources, await draw(resources, replace(picture(n=2), embed_settings=True)))
        png = await resources.images.get(done.images[1].image_uri)
    told = Image.open(BytesIO(png)).info
    assert told["Job"] == done.id
    assert told["parameters"].startswith("a red circle <lora:model_outline")
    assert ", Seed: 8, Size: 256x256" in told["parameters"]


async def test_a_comparison_is_drawn_in_one_batch(resources: Resources, engine: Engine) -> None:
    """Two LoRAs have two weights each.

    Their four runs of two rows each share forward passes, both LoRAs being loaded.
    """
    account = await resources.accounts.create("acme")
    plan = resources.settings.plan_named(Variant.A, account.plan_a)
    caller = Caller(account_id=account.id, account_name="acme", key_id="", variant=Variant.A, plan=plan)
    asked = [
        replace(picture(lora=lora), loras=(LoraUse(adapter_id(lora), weight),), steps=10)
        for lora in ("outline", "neon")
        for weight in (0.4, 1.0)
    ]
    executor = StepsExecutor(engine, resources)
    async with working(resources, executor):  # which loads both
        for job_id in [await draw(resources, picture(lora=lora)) for lora in ("outline", "neon")]:
            await ended(resources, job_id)
    executor.steps = []
    jobs = [(await resources.submission.submit(caller, GenerationDraft.like(each))).job for each in asked]
    async with working(resources, executor):
        assert {(await ended(resources, each.id)).state for each in jobs} == {JobState.COMPLETED}
    steps = [*executor.steps, *take(engine.measured.steps)]
    shared = [(step.rows, step.adapters) for step in steps].count((8, 2))
    assert sum(step.rows for step in steps) == 8 * 10
    assert shared >= 5, "each joins between two steps, so that the first ones may lack some"


class StepsExecutor(GenerationExecutor):
    """Keeps what the engine measured of its steps."""

    def __init__(self, engine: Engine, resources: Resources) -> None:
        super().__init__(engine, resources.catalog, resources.weights, resources.images)
        self._measured = engine.measured
        self.steps: list[StepTiming] = []

    def measure(self, measures: Measures) -> Mapping[Metric, float]:
        self.steps += self._measured.steps
        return super().measure(measures)


async def test_a_hint_starts_an_idle_worker_at_once(
    resources: Resources, executor: GenerationExecutor, redis_db: Any
) -> None:
    asleep = WorkerTiming(poll=timedelta(hours=1), heartbeat=timedelta(milliseconds=50))
    async with working(resources, executor, timing=asleep) as worker:
        await wait_until(
            lambda: redis_db.zcard(redis_key("workers", "generation")) == 1
        )  # it has looked and found none
        job_id = await draw(resources, picture())
        worker.hint()
        assert (await ended(resources, job_id)).state is JobState.COMPLETED


async def test_a_canceled_job_leaves_the_engine_and_storage(
    resources: Resources, executor: GenerationExecutor, engine: Engine
) -> None:
    async with working(resources, executor):
        job_id = await draw(resources, picture(steps=LONG))
        await running(resources, job_id)
        await resources.queue.cancel(job_id, account_id=ACCOUNT)
        assert (await ended(resources, job_id)).state is JobState.CANCELED
        await wait_until(lambda: not engine.has_work)
    assert not objects(resources)


async def test_a_job_over_its_time_fails_with_timeout(resources: Resources, executor: GenerationExecutor) -> None:
    hurried = WorkerTiming(poll=QUICK.poll, heartbeat=QUICK.heartbeat, job_limit=timedelta(seconds=0.3))
    async with working(resources, executor, timing=hurried):
        failed = await ended(resources, await draw(resources, picture(steps=LONG)))
    assert (failed.failure and failed.failure.code, failed.attempt) == (FailureCode.TIMEOUT, 1)


async def test_a_drain_finishes_what_it_can(resources: Resources, executor: GenerationExecutor) -> None:
    async with working(resources, executor) as worker:
        job_id = await draw(resources, picture(steps=30))
        await running(resources, job_id)
        await worker.drain(timedelta(seconds=60))
        assert (await job_of(resources, job_id)).state is JobState.COMPLETED


async def test_a_drain_releases_what_it_cannot_finish(
    resources: Resources, executor: GenerationExecutor, engine: Engine
) -> None:
    async with working(resources, executor) as worker:
        job_id = await draw(resources, picture(steps=LONG))
        await running(resources, job_id)
        await worker.drain(timedelta(seconds=2.2))
    assert (await job_of(resources, job_id)).state is JobState.QUEUED
    assert not objects(resources)
    assert not engine.progress(), "no run is live"
    await resources.queue.cancel(job_id, account_id=ACCOUNT)


def _next_format(name: str, text: str) -> str:
    """Rewrite a script as a later version would, with other fields for the request in a record.

    Its own workers can read it.
    """
    read = "for n = 1, #job, 2 do job[n] = string.gsub(job[n], '^q(%d+)$', '%1') end"
    for rewrite in (
        replacing("jobs/accept", "version = version", "version = 99"),
        replacing("jobs/accept", "packed_fields('', job.request)", "packed_fields('q', job.request)"),
        replacing(
            "jobs/claim",
            "return {id, attempt, redis.call('HGETALL', K('job:' .. id))}",
            f"local job = redis.call('HGETALL', K('job:' .. id)) {read} return {{id, attempt, job}}",
        ),
    ):
        text = rewrite(name, text)
    return text


async def test_two_versions_of_the_code_work_on_one_queue(
    resources: Resources, executor: GenerationExecutor, redis_db: Any
) -> None:
    """This version's worker draws the jobs it can read, and leaves newer records to newer workers.

    What is damaged fails alone.
    """
    newer = with_queue(resources, _next_format)
    damaged = await draw(resources, picture(seed=1))
    redis_db.hset(redis_key("job", damaged), "0", "{}")
    async with working(resources, executor) as worker:
        foreign = [await draw(newer, picture(seed=seed)) for seed in range(2, 5)]
        own = [await draw(resources, picture(seed=seed)) for seed in range(5, 8)]
        for job_id in own:
            assert (await ended(resources, job_id)).state is JobState.COMPLETED
        await ended(resources, damaged)
        assert "cannot be read" in (await failure_of(resources, damaged)).message
        assert {(await job_of(resources, job_id)).state for job_id in foreign} <= {JobState.QUEUED, JobState.RUNNING}
        with Engine.load({"pocket": POCKET}, EngineOptions(exact=False)) as second:
            async with working(newer, GenerationExecutor(second, newer.catalog, newer.weights, newer.images)):
                for job_id in foreign:
                    assert (await ended(newer, job_id)).state is JobState.COMPLETED
        worker.check()
    assert audit(redis_db, max_attempts=resources.settings.max_attempts) == []


class HeldExecutor(GenerationExecutor):
    """An executor whose next step can be made to hang, or to fail, as a device does."""

    def __init__(self, engine: Engine, resources: Resources) -> None:
        super().__init__(engine, resources.catalog, resources.weights, resources.images)
        self.hold = threading.Event()
        self.hold.set()
        self.errors: list[Exception] = []
        """Raised one a step while a run is live: what a broken device refuses is to draw."""

    def step(self) -> Sequence[Finished]:
        self.hold.wait(60)
        if self.errors and self.progress():
            raise self.errors.pop()
        return super().step()


@pytest.fixture
def held(engine: Engine, resources: Resources) -> Iterator[HeldExecutor]:
    hanging = HeldExecutor(engine, resources)
    yield hanging
    hanging.hold.set()


@pytest.fixture
async def hasty(settings: Settings, redis_db: Any) -> AsyncIterator[Resources]:
    """Return stores with a lease short enough to lose."""
    async with open_resources(settings.model_copy(update={"lease": timedelta(seconds=0.5)})) as opened:
        yield opened


async def test_a_hung_step_loses_its_lease_and_its_late_images(hasty: Resources, engine: Engine, redis_db: Any) -> None:
    hung = HeldExecutor(engine, hasty)
    strict = WorkerTiming(poll=QUICK.poll, heartbeat=QUICK.heartbeat, step_limit=timedelta(seconds=0.2))
    async with working(hasty, hung, timing=strict) as worker:
        hung.hold.clear()
        job_id = await draw(hasty, picture())
        await wait_until(lambda: is_unhealthy(worker))

        async def is_queued_again() -> bool:
            await hasty.queue.reap()
            return (await job_of(hasty, job_id)).state is JobState.QUEUED

        await wait_until(is_queued_again)
        claims: list[Claim] = []

        async def is_claimed_elsewhere() -> bool:
            claims.extend(await hasty.queue.claim("another", pool=JobKind.GENERATION, nonce="n"))
            return bool(claims)

        await wait_until(is_claimed_elsewhere)
        assert claims[0].lease.attempt == 2
        keeping = asyncio.create_task(keep(hasty, claims[0]))
        hung.hold.set()
        await wait_until(lambda: worker.open_jobs == 0, timeout=60)
        assert (await job_of(hasty, job_id)).state is JobState.RUNNING
        assert not objects(hasty)
        keeping.cancel()
        await hasty.queue.cancel(job_id, account_id=ACCOUNT)


async def keep(resources: Resources, claim: Claim) -> None:
    while True:
        await resources.queue.heartbeat(claim.lease, progress=0)
        await asyncio.sleep(0.1)


async def test_a_failed_step_starts_its_jobs_over(resources: Resources, held: HeldExecutor) -> None:
    held.errors = [RuntimeError("device lost")]
    async with working(resources, held) as worker:
        done = await ended(resources, await draw(resources, picture()))
        worker.check()
    assert done.state is JobState.COMPLETED
    assert done.attempt == 2


async def test_a_job_outlives_a_killed_redis(tmp_path: Path, engine: Engine) -> None:
    home = tmp_path / "own"
    settings = Settings(data_dir=home, catalog=write_catalog(tmp_path / "catalog"), redis_url=ensure_redis(home).url)
    try:
        async with open_resources(settings) as resources:
            async with working(
                resources, GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)
            ):
                job_id = await draw(resources, picture(steps=30))
                await running(resources, job_id)
                os.kill(ensure_redis(home).pid, signal.SIGKILL)
                await asyncio.to_thread(ensure_redis, home)
                assert (await ended(resources, job_id)).state is JobState.COMPLETED
            assert (await job_of(resources, job_id)).attempt == 1
    finally:
        stop_redis(home)
