"""After a real job `/metrics` shows every metric."""

from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file

from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.metrics import METRICS
from serve_app.engine import Engine, EngineOptions, kernels
from serve_app.worker.generation import GenerationExecutor
from serve_app.worker.reports import report
from tests.api.app import BODY_B, TestService, open_service
from tests.support import POCKET
from tests.worker.scripted_executor import until, working

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("measures")]
Exported = dict[str, dict[tuple[str, ...], float]]
"""Sample name → label values → number. A metric without a sample has its name all the same."""


@pytest.fixture(scope="module")
async def exported(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Exported]:
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine,
    ):
        patch.setattr(kernels, "_outcomes", {"lora": "", "unet": "Triton has no C compiler"})  # as on a card
        async with open_service(tmp_path_factory.mktemp("service")) as service:
            yield await _after_a_job(service, engine)


async def _after_a_job(service: TestService, engine: Engine) -> Exported:
    member = await service.member(plan_b="premium")
    executor = GenerationExecutor(
        engine, service.resources.catalog, service.resources.weights, service.resources.images
    )
    async with working(service.resources, executor, name="w"):
        body = BODY_B | {"width": 256, "height": 256}
        run_id = (await service.client.post("/v1/generate", json=body, headers=member.b)).json()["run_id"]
        await until(service.resources, run_id, JobState.COMPLETED, timeout=60)
        await report(service.resources.measures, executor, worker="w")  # with the adapter in its slot
    for path in (
        f"/v1/generations/{run_id}",
        "/v1/generations/nothing",
        "/nothing/here",
        "/docs/static/reference.js",
        "/console/sign-in",
    ):
        await service.client.get(path, headers=member.b)
    await service.client.post("/v1/generate")
    text = (await service.client.get("/metrics", headers=service.operator)).text
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        found[family.name + ("_total" if family.type == "counter" else "")] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "group"}  # there is one
            found.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
    return found


def test_every_metric_is_exported(exported: Exported) -> None:
    assert {metric.full_name for metric in METRICS} <= set(exported)


def test_a_job_leaves_its_numbers(exported: Exported) -> None:
    kind = (JobKind.GENERATION.value,)
    assert exported["atelier_jobs_total"]["completed",] == 1
    assert exported["atelier_job_wait_seconds_count"][kind] == 1
    assert exported["atelier_job_seconds_count"][kind] == 1
    assert exported["atelier_step_seconds_count"][kind] == 30
    assert exported["atelier_step_rows_sum"][kind] == 60, "guidance takes two rows"
    assert exported["atelier_step_adapters_sum"][kind] == 30
    assert exported["atelier_adapter_load_seconds_count"][kind] == 1
    assert exported["atelier_storage_seconds_count"]["write",] == 1
    assert exported["atelier_runs_limit"][kind] > 0
    assert exported["atelier_workers"][kind] == 1
    assert exported["atelier_adapters_resident"][kind] == 1


def test_a_kernel_that_fell_back_is_told(exported: Exported) -> None:
    kind = JobKind.GENERATION.value
    assert exported["atelier_kernel_active"] == {("lora", kind): 1, ("unet", kind): 0}
    assert exported["atelier_pictures_changed"] == {("pocket", kind): 0}


def test_memory_is_counted_by_use(exported: Exported) -> None:
    memory = exported["atelier_worker_memory_bytes"]
    kind = JobKind.GENERATION.value
    assert set(memory) == {("cpu", kind, "weights"), ("cpu", kind, "adapters"), ("cpu", kind, "adapter_cache")}
    files = [file for part in ("unet", "vae", "text_encoder") for file in (POCKET / part).glob("*.safetensors")]
    numbers = sum(tensor.size for file in files for tensor in load_file(file).values())
    assert memory["cpu", kind, "weights"] == pytest.approx(4 * numbers, rel=0.001), "float32 on a CPU"
    assert memory["cpu", kind, "adapters"] > 0
    assert memory["cpu", kind, "adapter_cache"] == 0, "on a CPU an adapter is in a slot or in the cache, never in both"


def test_requests_are_counted_by_the_pattern_of_their_route(exported: Exported) -> None:
    requests = exported["atelier_http_requests_total"]
    assert requests["b", "POST", "/v1/generate", "200"] == 1
    assert requests["b", "GET", "/v1/generations/{run_id}", "200"] == 1
    assert requests["b", "GET", "/v1/generations/{run_id}", "404"] == 1
    assert requests["none", "GET", "unmatched", "404"] == 1
    assert requests["none", "GET", "/docs/static", "200"] == 1
    assert requests["none", "POST", "/v1/generate", "401"] == 1
    assert requests["none", "GET", "/console/sign-in", "200"] == 1
    assert exported["atelier_http_errors_total"]["not_found", "b"] == 1
    assert not [labels for labels in requests if "gen_" in labels[2]]


def test_nothing_but_the_table_is_exported(exported: Exported) -> None:
    series = {metric.full_name: metric for metric in METRICS}
    known = {name + end for name in series for end in ("", "_bucket", "_count", "_sum")}
    assert set(exported) <= known
