"""Run as a program by the two-node test: Ray and Serve read their environment once, when they are imported.

Two Ray nodes, a generator replica on each; the second node is killed while both draw; every job must complete. The
upscaler has no replica until there is something to enlarge.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from deployments.args import AppArgs
from deployments.ray_environment import encryption, ray_environment
from serve_app.domain.requests import Variant
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
from serve_app.stores.embedded import ensure_redis
from serve_app.stores.redis import connect_sync
from serve_app.stores.redis_keys import redis_key
from tests.support import free_port

JOBS = 6
ARGS = {
    "generator": {"replicas": 2, "resources": {"executor": 1}, "threads": 1, "engine": {"max_rows": 4}, "drain_s": 3},
    "ingress": {"drain_s": 2},
    "upscaler": {"drain_s": 3, "replicas": {"min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0}},
}


def main(home: Path, report: Path) -> None:
    os.environ.update(ray_environment(home) | encryption(home))
    from ray import init, serve, shutdown
    from ray.cluster_utils import Cluster

    from deployments.app import build

    node: dict[str, Any] = {"num_cpus": 2, "resources": {"executor": 1}}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    second = cluster.add_node(**node)
    init(address=cluster.address, log_to_driver=False)
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(AppArgs.model_validate(ARGS)), name="atelier", route_prefix="/")
    try:
        seen = draw_through_a_kill(port, kill=lambda: cluster.remove_node(second, allow_graceful=False))
        report.write_text(json.dumps(seen))
    finally:
        serve.shutdown()
        shutdown()
        cluster.shutdown()


def draw_through_a_kill(port: int, kill: Callable[[], None]) -> dict[str, Any]:
    secret, lora_id = asyncio.run(new_key())
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {secret}"}) as client:
        body = {"prompt": "a red circle", "lora_id": lora_id, "steps": 30, "seed": 1}
        until(lambda: client.get("/readyz").is_success)
        ids = [client.post("/v1/generate", json=body).raise_for_status().json()["request_id"] for _ in range(JOBS)]
        until(lambda: len(field_of(ids, "worker", state="running")) == 2)
        nodes = len({psutil.Process(pid).ppid() for pid in pids_of("ServeReplica:atelier:generator")})
        kill()
        records = [finished(client, request_id) for request_id in ids]
        upscalers = len(pids_of("ServeReplica:atelier:upscaler"))
        body = {"image_id": records[0]["images"][0]["image_id"]}
        ack = client.post("/v1/upscale", json=body).raise_for_status().json()
        enlarged = finished(client, ack["request_id"])
        pngs = {client.get(record["images"][0]["url"]).content for record in records}
    return {
        "nodes": nodes,
        "statuses": sorted({record["status"] for record in records}),
        "pictures": len(pngs),
        "upscalers_before": upscalers,
        "enlarged": enlarged["status"],
        "attempts": max(int(attempt) for attempt in field_of(ids, "attempt", state="completed")),
    }


async def new_key() -> tuple[str, str]:
    async with open_resources(Settings()) as resources:
        account = await resources.accounts.create("two-nodes", plan_a="enterprise")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        return secret, (await resources.catalog.all())[0].id


def field_of(ids: list[str], field: str, *, state: str) -> set[str]:
    """What the records in `state` say; the worker's name is nobody's business but ours."""
    with connect_sync(ensure_redis(Settings().data_dir).url) as client:
        rows: list[dict[str, str]] = [client.hgetall(redis_key("job", job_id)) for job_id in ids]  # pyright: ignore[reportAssignmentType]
    return {row[field] for row in rows if row.get("state") == state}


def pids_of(title: str) -> list[int]:
    """Processes with this title; the parent of each is its node's raylet."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if any(title in word for word in child.cmdline())]


def finished(client: httpx.Client, request_id: str) -> dict[str, Any]:
    """The ended record. The killed node may have held the ingress: a caller asks again."""
    seen: list[dict[str, Any]] = []

    def has_ended() -> bool:
        try:
            answer = client.get(f"/v1/generate/{request_id}")
        except httpx.TransportError:
            return False
        seen[:] = [answer.json()] if answer.is_success else []
        return bool(seen) and seen[0]["status"] != "processing"

    until(has_ended)
    return seen[0]


def until(condition: Callable[[], bool], limit: float = 200) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
