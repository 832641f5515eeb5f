"""Runs a rolling update for its test: one Ray, one Redis, replicas of one checkout, then those of another.

rolling_update.py HOME REPORT OLD NEW: both checkouts are deployed as one application, whose workers find their code by
PYTHONPATH, as an image of each version would give it. While Serve rolls, both work on one queue, under load.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from deployments.runtime import ray_environment
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from tests.deployments.service import serve_config
from tests.deployments.three_nodes import deploy, new_key, pids_of
from tests.support import free_port, says_ready, until

CALLERS = 4
BEFORE_S, AFTER_S = 20.0, 10.0


def config(port: int, checkout: str) -> dict[str, Any]:
    worker = {"threads": 1, "drain_s": 20}
    wrapper = f"{checkout}/deployments/proxy/haproxy"  # each checkout asks for its own
    args = {
        "ingress": {"replicas": 2, "drain_s": 40},
        "generator": {**worker, "replicas": 2, "engine": {"max_rows": 4}},
        "upscaler": worker,
    }
    found_at = {"PYTHONPATH": checkout, "RAY_SERVE_HAPROXY_BINARY_PATH": wrapper}
    return serve_config(port, args, runtime_env={"env_vars": found_at})


class Load:
    """Callers post a job, poll it until it ends, and begin again; this holds what they saw."""

    def __init__(self, base_url: str, secret: str, lora_id: str) -> None:
        self._client = httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {secret}"}, timeout=60)
        self._lora_id = lora_id
        self._stop = threading.Event()
        self.statuses: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.refused: list[str] = []
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let every accepted job end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=240)

    def _call(self) -> None:
        body = {"prompt": "a red circle", "lora_id": self._lora_id, "steps": 20, "seed": 1}
        while not self._stop.is_set():
            answer = self._ask("POST", "/v1/generate", json=body)
            if answer is None or not answer.is_success:
                time.sleep(0.2)
                continue
            began, path = time.monotonic(), f"/v1/generate/{answer.json()['request_id']}"
            while time.monotonic() - began < 200:
                polled = self._ask("GET", path)
                if polled is not None and polled.is_success and polled.json()["status"] != "processing":
                    self.ended[polled.json()["status"]] += 1
                    break
                time.sleep(0.1)
            else:
                self.ended["lost"] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        try:
            answer = self._client.request(method, path, **options)
        except httpx.TransportError as error:
            self.statuses[f"{method} {type(error).__name__}"] += 1
            return None
        self.statuses[f"{method} {answer.status_code}"] += 1
        if not answer.is_success:
            self.refused.append(f"{time.monotonic():.1f} {method} {answer.status_code} {answer.text}")
        return answer


def main(home: Path, report: Path, old: str, new: str) -> None:
    os.environ.update(ray_environment(home))
    import ray
    from ray import serve

    data_dir = Settings().data_dir
    ensure_redis(data_dir)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _temp_dir=str(home / "ray"))
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        deploy(config(port, old), limit=240)
        base_url = f"http://127.0.0.1:{port}"
        until(lambda: says_ready(base_url))
        secret, lora_id = asyncio.run(new_key(Settings()))
        load = Load(base_url, secret, lora_id)
        time.sleep(BEFORE_S)
        at_old, began = dict(load.ended), time.monotonic()
        old_replicas = set(pids_of("ServeReplica:atelier:"))
        deploy(config(port, new), limit=240)
        until(lambda: old_replicas.isdisjoint(pids_of("ServeReplica:atelier:")))
        rolled = time.monotonic() - began
        time.sleep(AFTER_S)
        load.end()
        seen = {
            "old_replicas": len(old_replicas),
            "ended_at_old": at_old,
            "ended": dict(load.ended),
            "statuses": dict(load.statuses),
            "refused": load.refused[:20],
            "rolled_s": rolled,
            "slowest_s": load.slowest_s,
        }
        report.write_text(json.dumps(seen))
    finally:
        serve.shutdown()
        ray.shutdown()
        stop_redis(data_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
