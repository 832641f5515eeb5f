"""Two groups of base models under Ray: routed apart, one scaled from zero and rolled under load, the other untouched.

The same Ray is asked before and afterwards for what it and Serve refuse to start, and why.
`python -m tests.deployments.test_groups HOME REPORT` is the program that serves: Ray and Serve read the environment once.
"""

import asyncio
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deployments.args import AppArgs
from deployments.config import ServeConfig
from deployments.ray_internals import CORE_PROCESSES, dead_core_process
from deployments.runtime import Runtime, ray_environment, runtime_home
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.attack.start_sync import start_sync
from tests.deployments.service import run_program, serve_config
from tests.deployments.three_nodes import POLICY, SCALING, client, forget_workers, new_key, pids_of, schema
from tests.support import adapter_id, free_port, until, write_catalog

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(500)]
OPERATOR_TOKEN = "the token of an operator"
DEFAULT, SECOND = adapter_id("outline"), "model_of_second"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program saw: one start of Ray for all tests of this file."""
    folder = tmp_path_factory.mktemp("groups")
    home, report, data_dir = runtime_home(folder), folder / "seen.json", folder / "var"
    catalog = write_catalog(folder / "catalog")
    content = yaml.safe_load(catalog.read_text())
    [pocket], outline = content["base_models"], content["adapters"][0]
    content["base_models"] += [{**pocket, "id": each, "group": each} for each in ("second", "lost")]
    content["adapters"] += [{**outline, "id": SECOND, "base_model": "second"}]
    catalog.write_text(yaml.safe_dump(content))
    try:
        return run_program(
            "tests.deployments.test_groups",
            home,
            report,
            limit_s=480,
            ATELIER_DATA_DIR=str(data_dir),
            ATELIER_CATALOG=str(catalog),
            ATELIER_OPERATOR_TOKEN=OPERATOR_TOKEN,
            RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT="1",  # Serve would try three times what cannot start
        )
    finally:
        stop_redis(data_dir)


def test_each_group_that_a_base_model_names_is_told_of(seen: dict[str, Any]) -> None:
    idle, working = seen["idle"], seen["working"]
    assert (idle["status"], idle["generator"], idle["generator.second"]) == ("ready", "ok", "scaled to zero")
    assert idle["generator.lost"] == "no application serves this group"
    assert (working["generator"], working["generator.second"]) == ("ok", "ok")


def test_a_group_scales_from_zero_by_its_own_jobs_and_loads_its_own_models(seen: dict[str, Any]) -> None:
    assert seen["before"] == []
    assert seen["models"] == [["pocket"], ["second"]]


def test_a_group_opens_no_more_ports_than_a_generator_of_the_main_application(seen: dict[str, Any]) -> None:
    """Serve would give the only deployment of an application an HTTP server."""
    assert seen["ports"][0] == seen["ports"][1] > 0


def test_a_changed_group_is_rolled_alone_under_load_and_no_job_is_lost(seen: dict[str, Any]) -> None:
    assert seen["rolled"], "the group's replicas are others"
    assert seen["kept"], "all replicas of the main application are the same"
    assert {lora: set(statuses) for lora, statuses in seen["statuses"].items()} == {
        DEFAULT: {"completed"},
        SECOND: {"completed"},
    }
    assert all(len(statuses) > 3 for statuses in seen["statuses"].values()), "before, twice from its begin on, after"


def test_nothing_is_deployed_without_the_proxys_protection_encryption_and_the_gpus_asked_for(
    seen: dict[str, Any],
) -> None:
    """Slow clients would hold the service, and callers between machines could run code."""
    unprotected, without_gpus, spread = seen["refused"]
    assert "set RAY_SERVE_ENABLE_HA_PROXY=1, RAY_SERVE_HAPROXY_BINARY_PATH=" in unprotected
    assert "without token" not in unprotected
    assert without_gpus.startswith("GPUs are asked for (generator 2), and Ray finds 1 on this machine")
    assert "Ray's nodes would speak unencrypted: set RAY_USE_TLS=1" in spread


def test_a_start_says_why_its_replicas_do_not_start(seen: dict[str, Any]) -> None:
    too_long, too_large = seen["not_started"]
    assert re.match(r"the service did not start: after 1 s: generator \(.+\), housekeeper \(", too_long)
    assert re.match(r"the service did not start: generator: MemoryError: as float32, pocket ", too_large)
    assert "1000000.00 GB (adapter_memory)" in too_large
    assert "GB free; what helps: " in too_large


def test_without_tls_one_call_of_another_user_ends_ray(seen: dict[str, Any]) -> None:
    """It is the call that `tests/attack/test_listeners.py` makes in vain."""
    assert seen["ended"].startswith(CORE_PROCESSES)


def config(port: int, *, max_rows: int, idle_s: float = 300) -> dict[str, Any]:
    """Serve two applications on one card that is a fake: the main one, and the group `second`, which goes down to none.

    A new cluster begins with one of each group, which shows that it can draw.
    """
    worker = {"threads": 1, "drain_s": 20}
    args = {
        "ingress": {"drain_s": 2},
        "generator": {**worker, "num_gpus": 0.4, "engine": {"max_rows": 4}},
        "upscaler": {**worker, "num_gpus": 0.1},
    }
    content = serve_config(port, args)
    policy = {"policy_function": POLICY, "policy_kwargs": {"kind": "generation.second", "target_s": 20}}
    scaling = {**SCALING, "downscale_to_zero_delay_s": idle_s, "min_replicas": 0, "max_replicas": 1, "policy": policy}
    group = {**worker, "group": "second", "replicas": "auto", "num_gpus": 0.2, "engine": {"max_rows": max_rows}}
    fields = {"name": "second", "route_prefix": None, "import_path": "deployments.app:build_group", "args": group}
    content["applications"].append({**fields, "deployments": [{"name": "generator", "autoscaling_config": scaling}]})
    return content


def main(home: Path, report: Path) -> None:
    os.environ.update(ray_environment(home))
    import ray
    from ray import serve

    data_dir = Settings().data_dir
    ensure_redis(data_dir)
    runtime, folder = Runtime(home), str(home / "ray")
    ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    without_proxy = refusal({}, without=("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BINARY_PATH"))
    refused = [without_proxy, refusal({"generator": {"num_gpus": 2}})]
    seen = {"not_started": not_started(runtime), **serve_two_groups(port)}
    serve.shutdown()
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
    refused.append(refusal({}))
    serve.shutdown()
    start_sync(int(ray.get_runtime_context().gcs_address.rpartition(":")[2]))
    until(lambda: dead_core_process() is not None)
    report.write_text(json.dumps({**seen, "refused": refused, "ended": dead_core_process()}))
    os._exit(0)  # Ray's own end would wait for what has ended


def refusal(args: dict[str, Any], *, without: tuple[str, ...] = ()) -> str:
    """Return why nothing is deployed with these `args`, where these variables are not set."""
    from deployments.app import build

    with pytest.MonkeyPatch.context() as patch:
        for name in without:
            patch.delenv(name)
        with pytest.raises(RuntimeError) as refused:
            build(AppArgs.model_validate(args))
    return str(refused.value)


def not_started(runtime: Runtime) -> list[str]:
    """Return what a start says that may take a second only, and one whose model does not fit.

    There is space for the generator alone, so that the others cost nothing. Serve waits for as long as they may drain.
    """
    from ray import serve
    from ray.util.placement_group import placement_group, remove_placement_group

    places = placement_group([{"CPU": 6.5}])
    assert places.wait(60)
    others: dict[str, Any] = {name: {"num_cpus": 2, "drain_s": 1} for name in ("ingress", "upscaler")}
    others["housekeeper"] = {"num_cpus": 2}
    args = {"generator": {"engine": {"adapter_memory": 10**15}}, **others}
    service = ServeConfig.model_validate({"applications": [{"args": args}]})
    said: list[str] = []
    for limit_s in (1.0, 300.0):
        with pytest.raises(RuntimeError) as refused:
            runtime.deploy(service, lambda _: None, limit_s=limit_s)
        said.append(str(refused.value))
    serve.delete(service.main.name)
    remove_placement_group(places)
    return said


def serve_two_groups(port: int) -> dict[str, Any]:
    deploy(config(port, max_rows=2, idle_s=1))
    secret, _ = asyncio.run(new_key(Settings()))
    base_url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=60) as caller:
        until(lambda: readyz(caller)["generator"] == "ok")
        until(lambda: not group_pids(), why=lambda: str(readyz(caller)))
        forget_workers("generation.second")
        idle, before = readyz(caller), group_pids()
        deploy(config(port, max_rows=2))
        statuses: dict[str, list[str]] = {DEFAULT: [], SECOND: []}
        ask(caller, statuses)
        ports = [listening(pids) for pids in (pids_of("ServeReplica:atelier:generator"), group_pids())]
        working, first, main_pids = readyz(caller), group_pids(), pids_of("ServeReplica:atelier:")
        rolled = threading.Event()
        load = threading.Thread(target=ask_until, args=(rolled, caller, statuses))
        load.start()
        deploy(config(port, max_rows=4))
        until(lambda: bool(group_pids()) and set(group_pids()).isdisjoint(first))
        rolled.set()
        load.join()
        ask(caller, statuses)
        last = group_pids()
        models = asyncio.run(loaded())
    return {
        "idle": idle,
        "before": before,
        "working": working,
        "rolled": bool(first) and set(first).isdisjoint(last),
        "kept": sorted(main_pids) == sorted(pids_of("ServeReplica:atelier:")),
        "models": models,
        "ports": ports,
        "statuses": statuses,
    }


def ask_until(rolled: threading.Event, caller: httpx.Client, statuses: dict[str, list[str]]) -> None:
    """Ask again and again, and at least twice: a job may wait for as long as the group is rolled."""
    rounds = 0
    while rounds < 2 or not rolled.is_set():
        ask(caller, statuses)
        rounds += 1


def ask(caller: httpx.Client, statuses: dict[str, list[str]]) -> None:
    """Ask for a job of each group, and wait for both."""
    body = {"prompt": "a red circle", "steps": 20, "seed": 1}
    answers = {lora: caller.post("/v1/generate", json={**body, "lora_id": lora}) for lora in statuses}
    for lora, answer in answers.items():
        path = f"/v1/generate/{answer.raise_for_status().json()['request_id']}"
        until(lambda path=path: poll(caller, path) != "processing", limit=150, why=lambda: str(readyz(caller)))
        statuses[lora].append(poll(caller, path))


def poll(caller: httpx.Client, path: str) -> str:
    return caller.get(path).raise_for_status().json()["status"]


def deploy(content: dict[str, Any]) -> None:
    """Deploy as `serve deploy` does, and wait for both applications."""
    from ray import serve

    client().deploy_apps(schema(content))
    states = lambda: {name: found.status for name, found in serve.status().applications.items()}  # noqa: E731
    until(lambda: states() == {"atelier": "RUNNING", "second": "RUNNING"}, limit=120, why=lambda: str(serve.status()))


def group_pids() -> list[int]:
    return pids_of("ServeReplica:second:")


def listening(pids: list[int]) -> int:
    """Count the ports on which these processes listen."""
    found = [each for pid in pids for each in psutil.Process(pid).net_connections(kind="inet")]
    return sum(each.status == psutil.CONN_LISTEN for each in found)


def readyz(caller: httpx.Client) -> dict[str, Any]:
    return caller.get("/readyz", headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}).json()


async def loaded() -> list[list[str]]:
    """Return what the living workers of both pools have loaded."""
    from tests.composition import open_resources

    async with open_resources(Settings()) as resources:
        found = [await resources.measures.shown(pool) for pool in ("generation", "generation.second")]
    return [sorted({name for worker in workers for name in worker.base_models}) for workers in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
