"""Runs three Ray nodes for their test, as a program: Ray and Serve read the environment once.

The nodes have addresses, resources and environments of their own: a head for ingress and housekeeper, and two with a
fake GPU each, which a generator (0.7) and an upscaler (0.3) share. The second has another pepper at first.
"""

import asyncio
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic import SecretStr

from deployments.cluster_commands import check_cluster, check_places
from deployments.config import ServeConfig
from deployments.nodes import check_nodes, living_nodes
from deployments.runtime import ray_environment
from serve_app.domain.requests import Variant
from serve_app.operations.checks import Check, Level
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect_sync
from serve_app.store.redis_process import server_binary
from tests.composition import open_resources
from tests.deployments.service import serve_config
from tests.processes import descendants
from tests.support import existing, free_port, says_ready, until

JOBS = 4
REDIS_HOST, SECOND, THIRD = "127.0.0.9", "127.0.0.2", "127.0.0.3"
PEPPER = "p" * 32
OPERATOR_TOKEN = "the token of an operator"
OPERATOR = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
POLICY, REPLICAS = "deployments.scaling:BacklogPolicy", "ServeReplica:atelier:"
SCALING: dict[str, Any] = {"upscale_delay_s": 0, "downscale_delay_s": 1, "downscale_to_zero_delay_s": 2}
LIMIT_S = 560
WORKER: dict[str, Any] = {"replicas": "auto", "threads": 1, "drain_s": 3}


def config(port: int, *, most: int, least: int = 0) -> dict[str, Any]:
    """A Serve YAML with `most` generators and upscalers at most, and `least` generators."""
    args = {
        "ingress": {"drain_s": 2, "resources": {"ingress": 1}},
        "housekeeper": {"resources": {"housekeeper": 1}},
        "generator": {**WORKER, "num_gpus": 0.7, "resources": {"generator": 1}, "engine": {"max_rows": 4}},
        "upscaler": {**WORKER, "num_gpus": 0.3, "resources": {"upscaler": 1}},
    }
    scaled = [
        _scaled("generator", "generation", most, least=least, target_s=1),
        _scaled("upscaler", "upscale", most, target_s=20),
    ]
    return serve_config(port, args, deployments=scaled)


def _scaled(name: str, kind: str, most: int, *, target_s: float, least: int = 0) -> dict[str, Any]:
    policy = {"policy_function": POLICY, "policy_kwargs": {"kind": kind, "target_s": target_s}}
    bounds = {**SCALING, "min_replicas": least, "max_replicas": most}
    return {"name": name, "autoscaling_config": {**bounds, "policy": policy}}


def main(home: Path, report: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # says where it stands, before the test ends it
    with redis_server(home) as redis_url:
        os.environ.update(ray_environment(home))
        shared = {
            "ATELIER_REDIS_URL": redis_url,
            "ATELIER_STORAGE_URL": (home / "images").as_uri(),
            "ATELIER_STORAGE_SHARED": "true",
            "ATELIER_OPERATOR_TOKEN": OPERATOR_TOKEN,
            "ATELIER_POLLS_PER_SECOND": "10000",
            "ATELIER_NETWORK_ENCRYPTED": "true",  # all addresses are of this machine
        }
        os.environ.update(shared)
        report.write_text(json.dumps(serve_on_three_nodes()))


def serve_on_three_nodes() -> dict[str, Any]:
    from ray import init, serve, shutdown
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 2,
        "resources": {"ingress": 1, "housekeeper": 1},
        "include_dashboard": False,
        "env_vars": {"ATELIER_PEPPER": PEPPER, "ATELIER_SIGNING_KEYS": json.dumps({"k": "s" * 32})},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        odd = add_node(cluster, SECOND, pepper="another pepper, of this node")
        third = add_node(cluster, THIRD, pepper=PEPPER)
        init(address=cluster.address, log_to_driver=False)
        port = free_port()
        seen: dict[str, Any] = {"doctor": doctor(), "too_much": too_much(port), "refused": deploy_and_fail(port)}
        cluster.remove_node(odd)
        add_node(cluster, SECOND, pepper=PEPPER)
        until(lambda: all(check.level is Level.OK for check in doctor_checks()))
        began = time.monotonic()
        deploy(config(port, most=1))
        seen["deployed_s"], seen["shown"] = time.monotonic() - began, generator_has_started()
        seen["doctor_serving"] = {check.name: f"{check.level} {check.found}" for check in check_cluster()}
        seen |= serve_jobs(port, kill=lambda: cluster.remove_node(third, allow_graceful=False))
        serve.shutdown()
        return seen
    finally:
        shutdown()
        cluster.shutdown()


def add_node(cluster: Any, address: str, *, pepper: str) -> Any:
    places = {"generator": 1, "upscaler": 1}
    own = {"ATELIER_PEPPER": pepper}
    return cluster.add_node(num_cpus=2, num_gpus=1, resources=places, node_ip_address=address, env_vars=own)


def doctor_checks() -> list[Check]:
    return check_nodes(living_nodes(demands_of(config(1, most=1))), spread=True)


def demands_of(content: dict[str, Any]) -> Any:
    return ServeConfig.model_validate(content).demands


def doctor() -> list[str]:
    """What `atelier doctor --cluster` finds wrong."""
    return [f"{check.name}: {check.found}" for check in doctor_checks() if check.level is not Level.OK]


def too_much(port: int) -> list[str]:
    """What `atelier check --cluster` says of more replicas than the nodes have GPUs, and of cards that none has."""
    greedy = config(port, most=1)
    greedy["applications"][0]["args"]["generator"]["num_gpus"] = 2
    checks = [*check_places(demands_of(config(port, most=3))), *check_places(demands_of(greedy))]
    return [f"{check.level}: {check.found}" for check in checks]


def deploy(content: dict[str, Any], *, limit: float = 120) -> None:
    """Deploy as `serve deploy` does, and wait."""
    client().deploy_apps(schema(content))
    until(lambda: application().status == "RUNNING", limit=limit, why=lambda: application().message)


def deploy_and_fail(port: int) -> dict[str, Any]:
    from ray import serve

    began = time.monotonic()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    client().deploy_apps(schema(config(port, most=1)))
    until(lambda: application().status == "DEPLOY_FAILED", limit=60)
    return {"message": application().message, "seconds": time.monotonic() - began, "replicas": pids_of(REPLICAS)}


def client() -> Any:
    from ray.serve.context import _get_global_client  # pyright: ignore[reportPrivateUsage] - what `serve run` calls

    return _get_global_client()


def schema(content: dict[str, Any]) -> Any:
    from ray.serve.schema import ServeDeploySchema

    return ServeDeploySchema.model_validate(content)


def application() -> Any:
    from ray import serve

    return serve.status().applications["atelier"]


def serve_jobs(port: int, kill: Callable[[], None]) -> dict[str, Any]:
    """Serve jobs until all have ended, although `kill` ends the node `THIRD` while both generators work."""
    secret, lora_id = asyncio.run(new_key(Settings(pepper=SecretStr(PEPPER))))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {secret}"}) as caller:
        until(lambda: says_ready(f"http://127.0.0.1:{port}"))
        body = {"prompt": "a red circle", "lora_id": lora_id, "steps": 30, "seed": 1}
        silence = serve_in_silence(caller, body)
        kept, tries = False, 0
        while not kept and tries < 3:  # the autoscaler may start one in the same moment: a restart is seen each time
            deploy(config(port, most=1))
            until(lambda: not pids_of("ServeReplica:atelier:generator"), limit=90, why=what_runs)
            before, tries = sorted(pids_of(REPLICAS)), tries + 1
            deploy(config(port, most=2))  # a changed bound, and nothing else
            kept = before == sorted(pids_of(REPLICAS))
        began = time.monotonic()
        ids: list[str] = []

        def both_work() -> bool:
            """Whether two generators work; more jobs are posted, as the first may be done before the second starts."""
            while len(ids) - len(rows_of(ids, state="completed")) < JOBS:
                ids.append(caller.post("/v1/generate", json=body).raise_for_status().json()["request_id"])
            return len(field_of(ids, "worker", state="running")) == 2

        def both_are_halted_at_work() -> bool:
            """Halt both, so that neither can end its job before the node is killed, and let them go on if one had."""
            if not both_work():
                return False
            for generator in generators():
                generator.suspend()
            are_at_work = len(field_of(ids, "worker", state="running")) == 2
            if not are_at_work:
                resume(generators())
            return are_at_work

        until(both_are_halted_at_work)
        grown = time.monotonic() - began
        nodes = len({generator.ppid() for generator in generators()})
        lost = [one for one in generators() if any(THIRD in word for word in existing(one.parent()).cmdline())]
        for generator in lost:
            generator.kill()  # it would not see that its node has died
        kill()
        resume(generators())
        records = [finished(caller, request_id) for request_id in ids]
        done = time.monotonic()
        upscalers = len(pids_of("ServeReplica:atelier:upscaler"))
        ack = caller.post("/v1/upscale", json={"image_id": records[0]["images"][0]["image_id"]})
        enlarged = finished(caller, ack.raise_for_status().json()["request_id"])
        pngs = {caller.get(record["images"][0]["url"]).content for record in records}
        until(lambda: not pids_of("ServeReplica:atelier:generator"), limit=240, why=what_runs)
        shrunk = time.monotonic() - done
        forget_workers()
        unneeded = caller.get("/readyz", headers=OPERATOR).json()
        hold_the_last_place()
        client().deploy_apps(schema(config(port, most=2, least=1)))  # and none can start
        missing = unready(caller)
    return {
        "silence": silence,
        "kept": kept,
        "nodes": nodes,
        "lost": len(lost),
        "grown_s": grown,
        "done_s": done - began,
        "shrunk_s": shrunk,
        "statuses": sorted({record["status"] for record in records}),
        "pictures": len(pngs),
        "upscalers_before": upscalers,
        "enlarged": enlarged["status"],
        "unneeded": unneeded,
        "missing": missing,
        "attempts": max(int(attempt) for attempt in field_of(ids, "attempt", state="completed")),
    }


def serve_in_silence(caller: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Accept the first jobs of an ingress, and answer polls, while neither Ray's GCS nor Serve's controller does."""
    silent = [psutil.Process(pid) for title in ("gcs_server", "ServeController") for pid in pids_of(title)]
    statuses: set[int] = set()
    took: list[float] = []

    def ask(method: str, path: str, **options: Any) -> httpx.Response:
        began = time.monotonic()
        answer = caller.request(method, path, **options)
        took.append(time.monotonic() - began)
        statuses.add(answer.status_code)
        return answer

    for process in silent:
        process.suspend()
    forget_workers()  # so that readiness depends on what Serve promises
    try:
        with ThreadPoolExecutor() as threads:
            asked = threads.submit(caller.get, "/readyz", headers=OPERATOR)
            jobs = [ask("POST", "/v1/generate", json=body).json()["request_id"] for _ in range(3)]
            for _ in range(60):
                for job_id in jobs:
                    ask("GET", f"/v1/generate/{job_id}")
            generator = asked.result().json()["generator"]
    finally:
        resume(silent)
    ended = {finished(caller, job_id)["status"] for job_id in jobs}
    p99 = sorted(took)[int(len(took) * 0.99)]
    return {
        "silent": len(silent),
        "ended": sorted(ended),
        "statuses": sorted(statuses),
        "p99_s": p99,
        "longest_s": max(took),
        "generator": generator,
    }


def generators() -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids_of("ServeReplica:atelier:generator")]


def resume(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.resume()


def hold_the_last_place() -> None:
    """Take the place for a generator on the node that is left."""
    from ray.util.placement_group import placement_group

    assert placement_group([{"generator": 1}]).wait(60)


def unready(caller: httpx.Client) -> dict[str, Any]:
    """Return the first answer of `/readyz` that says `not ready`; the next may say `ready` again."""
    answers: list[httpx.Response] = []

    def is_unready() -> bool:
        answers.append(caller.get("/readyz", headers=OPERATOR))
        return answers[-1].json()["status"] == "not ready"

    until(is_unready)
    return answers[-1].json()


async def new_key(settings: Settings) -> tuple[str, str]:
    """A key for interface A, and a LoRA that it may use."""
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("caller", plan_a="enterprise")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        return secret, (await resources.catalog.all())[0].id


def generator_has_started() -> bool:
    """Whether a generator has ever been ready for jobs, so that it has drawn."""
    with connect_sync(Settings().redis_url) as redis:
        return bool(redis.hexists(redis_key("load", "generation"), "start_seconds"))


def forget_workers(pool: str = "generation") -> None:
    """Make Redis look as it does a minute after the pool's last worker was seen, or told how far its start was."""
    settings = Settings()
    with connect_sync(settings.redis_url or ensure_redis(settings.data_dir).url) as redis:
        redis.delete(redis_key("workers", pool), redis_key("starting", pool))


def field_of(ids: list[str], field: str, *, state: str) -> set[str]:
    """The values of a field in the records in `state`; callers are not told the worker's name."""
    return {row[field] for row in rows_of(ids, state=state)}


def rows_of(ids: list[str], *, state: str) -> list[dict[str, str]]:
    with connect_sync(Settings().redis_url) as redis:
        rows: list[dict[str, str]] = [redis.hgetall(redis_key("job", job_id)) for job_id in ids]
    return [row for row in rows if row.get("state") == state]


def what_runs() -> str:
    """The replicas by Serve's word and by the system's, for a failure's message."""
    states = {name: str(found) for name, found in application().deployments.items()}
    return f"{states} {[str(psutil.Process(pid)) for pid in pids_of('Serve')]}"


def pids_of(title: str) -> list[int]:
    """Processes with this title; the parent of each is its node's raylet."""
    return [pid for pid, line in descendants(os.getpid()).items() if title in line]


def finished(caller: httpx.Client, request_id: str) -> dict[str, Any]:
    """The ended record. A caller whose connection breaks asks again."""
    seen: list[dict[str, Any]] = []

    def has_ended() -> bool:
        try:
            answer = caller.get(f"/v1/generate/{request_id}")
        except httpx.TransportError:
            return False
        seen[:] = [answer.json()] if answer.is_success else []
        return bool(seen) and seen[0]["status"] != "processing"

    until(has_ended)
    return seen[0]


@contextmanager
def redis_server(home: Path) -> Generator[str]:
    """A Redis that every node reaches by the network, and that keeps what it confirms."""
    port, folder = free_port(), home / "redis"
    folder.mkdir()
    words = {"bind": REDIS_HOST, "port": str(port), "dir": str(folder), "appendonly": "yes", "save": ""}
    command = [str(server_binary()), *(word for name, value in words.items() for word in (f"--{name}", value))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://{REDIS_HOST}:{port}/0"
    finally:
        server.terminate()
        server.wait(timeout=10)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
