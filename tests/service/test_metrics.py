"""Job metrics: every family there is, with the numbers that the queue has."""

from prometheus_client.parser import text_string_to_metric_families

from serve_app.domain.jobs import JobKind, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.service.metrics import render_metrics
from serve_app.service.resources import Resources

REQUEST = GenerationRequest(prompt="a boat", lora_id="model_x", seeds=(1,))


async def test_the_metrics_are_what_the_queue_holds(resources: Resources) -> None:
    for _ in range(3):
        await resources.queue.accept(
            job_id=new_job_id(JobKind.GENERATION), variant=Variant.A, account_id="acct_a", request=REQUEST, group=""
        )
    await resources.queue.claim("w", kind=JobKind.GENERATION, nonce="n")
    text = (await render_metrics(resources.jobs)).decode()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for kind, ready, leased in (("generation", 2, 1), ("upscale", 0, 0)):
        assert found["atelier_jobs_ready", kind] == ready
        assert found["atelier_jobs_leased", kind] == leased
        assert found["atelier_jobs_delayed", kind] == 0
        assert (found["atelier_backlog_seconds", kind] > 0) == (ready > 0)
        assert found["atelier_oldest_job_age_seconds", kind] >= 0
    assert found["atelier_jobs_total", "accepted"] == 3
