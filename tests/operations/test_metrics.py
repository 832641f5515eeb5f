"""Metrics count the queue's, the scripts' and the processes' numbers, each once."""

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.domain import metrics
from serve_app.domain.errors import FailureCode, StoreUnavailable
from serve_app.domain.jobs import Failure, JobKind
from serve_app.domain.requests import Variant
from serve_app.operations.metrics_page import render_metrics
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.measures import Measures, gauge_field
from serve_app.store.redis_client import connect
from serve_app.store.script import SLOW_S, Script
from tests.audit import key_problems
from tests.composition import Resources, open_resources
from tests.made_jobs import accept, claim
from tests.support import memory_limit, wait_until

Numbers = dict[tuple[str, ...], float]


async def scrape(resources: Resources) -> Numbers:
    """Every sample by its name and its labels' values, in the order of the labels' names; without the group.

    These tests have one group: `tests/jobs/test_pools.py` has two.
    """
    parts = (resources.measures, resources.queue_stats, resources.images, resources.space)
    text = (await render_metrics(*parts, resources.settings.plan_table, event_streams=0)).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "group")): sample.value
        for sample in samples
    }


async def test_the_metrics_are_what_the_queue_holds(resources: Resources) -> None:
    for _ in range(3):
        await accept(resources)
    await claim(resources)
    ended = await accept(resources, webhook="https://hooks.example")
    await resources.queue.cancel(ended, account_id=None)
    found = await scrape(resources)
    assert found["atelier_webhooks_waiting",] == 1
    assert found["atelier_webhooks_total", "failed"] == 0
    for kind, ready, leased in (("generation", 2, 1), ("upscale", 0, 0)):
        assert found["atelier_jobs_ready", kind] == ready
        assert found["atelier_jobs_leased", kind] == leased
        assert found["atelier_jobs_delayed", kind] == 0
        assert (found["atelier_backlog_seconds", kind] > 0) == (ready > 0)
        assert found["atelier_oldest_job_age_seconds", kind] >= 0
    assert found["atelier_jobs_total", "accepted"] == 4
    assert (found["atelier_workers", "generation"], found["atelier_workers", "upscale"]) == (1, 0)
    assert found["atelier_redis_memory_bytes",] > 0
    assert ("atelier_backup_age_seconds",) not in found, "no account, nothing to copy"
    await resources.accounts.create("acme")
    assert (await scrape(resources))["atelier_backup_age_seconds",] < 3600


@pytest.mark.script_text
async def test_a_slow_script_is_measured_by_its_name(resources: Resources) -> None:
    busy = "local n = 0 while n < 2e7 do n = n + 1 end\n"
    slow = Script(resources.process.redis, "jobs/image_opens", lambda _, text: busy + text)
    assert await slow(name="none") == 0
    found = await scrape(resources)
    assert found["atelier_slow_script_seconds_count", "image_opens"] == 1
    assert found["atelier_slow_script_seconds_sum", "image_opens"] > SLOW_S


async def test_waiting_jobs_are_counted_by_plan(resources: Resources) -> None:
    for plan, variant in (("basic", Variant.A), ("basic", Variant.B), ("premium", Variant.B)):
        await accept(resources, plan=plan, variant=variant)

    async def waiting() -> Numbers:
        found = await scrape(resources)
        rows = {key: value for key, value in found.items() if key[0] == "atelier_jobs_waiting" and value}
        return {(interface, plan): value for (_, interface, _, plan), value in rows.items()}

    assert await waiting() == {("a", "basic"): 1, ("b", "basic"): 1, ("b", "premium"): 1}
    first = (await claim(resources))[0].lease
    assert sum((await waiting()).values()) == 2, "a running job waits no more"
    await resources.queue.fail(first, Failure(code=FailureCode.TIMEOUT, message=""), retry=True)
    assert sum((await waiting()).values()) == 3, "a delayed one does"
    await resources.queue.cancel(first.job_id, account_id=None)
    assert sum((await waiting()).values()) == 2


async def test_waits_ends_and_failures_are_counted_by_the_scripts_once(resources: Resources) -> None:
    for _ in range(2):
        await accept(resources)
    failing, finishing = [each.lease for each in await claim(resources, limit=2)]
    failure = Failure(code=FailureCode.OUT_OF_MEMORY, message="")
    for _ in range(2):  # each call may be repeated
        await resources.queue.fail(failing, failure, retry=False)
        await resources.queue.finish(finishing, [], seconds=1)
    found = await scrape(resources)
    assert found["atelier_job_failures_total", "out_of_memory", "generation"] == 1
    assert found["atelier_job_wait_seconds_count", "generation"] == 2
    assert found["atelier_job_seconds_count", "generation"] == 1
    assert found["atelier_job_seconds_bucket", "generation", "3600"] == 1
    assert found["atelier_dead_jobs",] == 1


async def test_a_lease_that_runs_out_is_counted(settings: Settings, redis_db: Any) -> None:
    hasty = settings.model_copy(update={"lease": timedelta(milliseconds=1)})
    async with open_resources(hasty) as resources:
        await accept(resources)
        await claim(resources)
        await wait_until(resources.queue.reap)
        assert (await scrape(resources))["atelier_jobs_total", "lease_expired"] == 1


async def test_the_scripts_have_the_buckets_of_the_table(resources: Resources) -> None:
    text = resources.queue.scripts["claim"].text
    written = text.split("JOB_SECONDS = {", 1)[1].split("}", 1)[0]
    assert tuple(float(bound) for bound in written.split(",")) == metrics.JOB_S


async def test_counters_with_known_labels_begin_at_zero(resources: Resources) -> None:
    """Prometheus sees no increase in a series that begins with its first count."""
    found = await scrape(resources)
    for labels in (("out_of_memory", "generation"), ("generation_failed", "upscale")):
        assert found["atelier_job_failures_total", *labels] == 0
    assert found["atelier_storage_errors_total", "write"] == 0
    assert found["atelier_adapter_evictions_total", "generation"] == 0


@pytest.mark.slow
async def test_what_processes_measure_is_summed(resources: Resources, redis_db: Any) -> None:
    for seconds in (0.02, 0.2):
        process = Measures(connect(resources.redis_url))
        process.observe(metrics.STEP_SECONDS, seconds, "generation")
        process.count(metrics.ADAPTER_EVICTIONS, "generation", by=2)
        await process.send()
    found = await scrape(resources)
    assert found["atelier_adapter_evictions_total", "generation"] == 4
    assert found["atelier_step_seconds_bucket", "generation", "0.025"] == 1
    assert found["atelier_step_seconds_count", "generation"] == 2
    assert found["atelier_step_seconds_sum", "generation"] == pytest.approx(0.22)
    assert not key_problems(redis_db)


async def test_what_could_not_be_sent_is_sent_later_and_once(resources: Resources, redis_db: Any) -> None:
    process = Measures(connect(resources.redis_url))
    process.count(metrics.ADAPTER_EVICTIONS, "generation")
    with memory_limit(redis_db), pytest.raises(StoreUnavailable):
        await process.send()
    process.count(metrics.ADAPTER_EVICTIONS, "generation")
    for _ in range(3):
        await process.send()
    assert (await scrape(resources))["atelier_adapter_evictions_total", "generation"] == 2
    process._sequence = 0  # pyright: ignore[reportPrivateUsage]  # as a call repeated after its reply was lost
    process.count(metrics.ADAPTER_EVICTIONS, "generation")
    await process.send()
    assert (await scrape(resources))["atelier_adapter_evictions_total", "generation"] == 2


async def test_gauges_are_the_living_workers(resources: Resources, redis_db: Any) -> None:
    for worker in ("first", "second", "dead"):
        await claim(resources, worker=worker)
        memory = gauge_field(metrics.WORKER_MEMORY, "cuda", "free")
        await resources.measures.show(JobKind.GENERATION, worker, {"runs": 3, memory: 5, "runs_limit": 0, "newer": 1})
    redis_db.zadd(redis_key("workers", "generation"), {"dead": 1})
    found = await scrape(resources)
    assert found["atelier_runs", "generation"] == 6
    assert found["atelier_worker_memory_bytes", "cuda", "generation", "free"] == 10
    assert found["atelier_runs_limit", "generation"] == 0
    await resources.queue.reap()
    assert set(redis_db.hkeys(redis_key("gauges", "generation"))) == {"first", "second"}
