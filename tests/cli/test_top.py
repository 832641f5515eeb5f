"""`atelier top`: what the service does now, from Redis alone."""

from serve_app.domain import metrics
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure, JobKind
from serve_app.store.measures import gauge_field
from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.made_jobs import accept, claim
from tests.support import adapter_id


async def _busy(resources: Resources) -> str:
    """Make one failed job, two that wait for one adapter, and a worker; return the failed job's id."""
    account, adapter = await resources.accounts.create("acme"), adapter_id("outline")
    for seed in range(3):
        await accept(resources, account.id, prompt="a secret boat", lora_id=adapter, seeds=(seed,))
    (claimed,) = await claim(resources, worker="worker-1")
    failure = Failure(code=FailureCode.OUT_OF_MEMORY, message="too large")
    await resources.queue.fail(claimed.lease, failure, retry=False)
    gauges = {metrics.RUNS.name: 3, metrics.RUNS_LIMIT.name: 16, metrics.ADAPTERS_RESIDENT.name: 2}
    memory = {
        gauge_field(metrics.WORKER_MEMORY, "cuda", "weights"): 3e9,
        gauge_field(metrics.WORKER_MEMORY, "cpu", "adapter_cache"): 2e6,
    }
    await resources.workers.note_progress(JobKind.GENERATION, "loading sdxl: 3.1 of 6.9 GB")
    await resources.measures.show(JobKind.GENERATION, "worker-1", gauges | memory)
    return claimed.lease.job_id


def test_queue_workers_adapters_and_failures_are_shown_once(atelier: Atelier) -> None:
    failed = atelier.stores(_busy)
    facts = atelier.json("top", "--once")
    assert facts["queue"]["generation"] | {"ready": 2, "running": 0} == facts["queue"]["generation"]
    [worker] = facts["workers"]
    memory = {"cuda": {"weights": 3_000_000_000}, "cpu": {"adapter_cache": 2_000_000}}
    assert worker.pop("memory") == memory
    assert worker == {"name": "worker-1", "kind": "generation", "runs": 3, "runs_limit": 16, "adapters": 2}
    assert facts["adapters"]["waiting"] == [{"name": "Outline", "jobs": 2}]
    assert facts["failures"]["by_code"] == {"out_of_memory": 1}
    assert [row["id"] for row in facts["failures"]["newest"]] == [failed]
    shown = atelier("top", "--once").out
    words = ("worker-1", "3 of 16", "weights 3.0 GB, cache 2.0 MB", "loading sdxl: 3.1 of 6.9 GB", "Outline", failed)
    for text in (*words, "out_of_memory"):
        assert text in shown
    assert "secret" not in shown
