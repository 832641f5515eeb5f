"""Compares processor time through HAProxy and Serve with that of bare uvicorn.

    .venv/bin/python -m benchmarks.serve [--rounds 9] [--seconds 2] [--connections 32]

Measured in turn, in one run: `atelier up` as it is shipped, and the same application on one uvicorn process over the
same Redis and jobs. Each figure is the processor time of every process that a request passes.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.http import Callers, Measured, cpu_seconds
from benchmarks.servers import SERVE, roomy_settings, spread, start_server
from deployments.runtime import kill_all_of, runtime_home
from serve_app.domain.requests import Variant
from serve_app.settings import ROOT, Settings
from serve_app.store.embedded_redis import stop_redis
from tests.composition import open_resources
from tests.support import free_port

START_LIMIT_S, STOP_LIMIT_S = 300.0, 60.0
JOBS_S = 1.0
"""How long jobs are accepted before the first round, to be polled."""
ON_THE_WAY = (
    "haproxy",
    "ray::ProxyActor",
    "ray::HAProxy",
    "ray::ServeReplica:atelier:ingress",
)
WORKERS = ("ray::ServeReplica:atelier:generator", "ray::ServeReplica:atelier:upscaler")
OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_worker_niceness": "0",  # as the bare server: who is interrupted more often takes longer
}

BARE = f"""
from serve_app.log import configure_logging
configure_logging(stream=open("/dev/null", "w"))  # a replica logs each accept, too
{SERVE}"""
UP = "from deployments.local import main; main()"


class Server(NamedTuple):
    port: int
    pids: list[int]
    """The processes that a request passes."""


class Cost(NamedTuple):
    """Processor time of a request, and of each process in it."""

    cpu_ms: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        settings = roomy_settings(Path(folder))
        with (
            atelier_up(settings, Path(folder)) as service,
            start_server(BARE, [str(ROOT)], settings) as (port, pid),
        ):
            servers = {"HAProxy and Serve": service, "bare uvicorn": Server(port, [pid])}
            asyncio.run(_measure(settings, servers, options))


@contextmanager
def atelier_up(settings: Settings, folder: Path, *, worker_niceness: int = 19) -> Generator[Server]:
    """Run `atelier up` until the block ends, its workers, which draw what is accepted, at low priority as a rule."""
    port, ready, log = free_port(), folder / "ready.json", folder / "up.log"
    fields = {f"ATELIER_{name.upper()}": str(getattr(settings, name)) for name in settings.model_fields_set}
    command = [sys.executable, "-c", UP, "up", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **OF_RAY, "HF_HUB_OFFLINE": "1", **fields},
            stdout=output,
            stderr=output,
        )
    try:
        _until(process, log, ready.exists)
        _until(process, log, lambda: "Ctrl-C stops everything" in log.read_text())
        for worker in _processes(process.pid, WORKERS):
            psutil.Process(worker).nice(worker_niceness)
        yield Server(port, _processes(process.pid, ON_THE_WAY))
    finally:
        _stop(process)
        kill_all_of(runtime_home(settings.data_dir))
        stop_redis(settings.data_dir)


def _until(process: subprocess.Popen[bytes], log: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"it did not start: {log.read_text()}")
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _processes(pid: int, titles: tuple[str, ...]) -> list[int]:
    """Return the processes that descend from `pid` and have one of the titles."""
    children = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in children if any(title in " ".join(_command(child)[:1]) for title in titles)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def _measure(settings: Settings, servers: dict[str, Server], options: argparse.Namespace) -> None:
    async with open_resources(settings) as resources:
        account = await resources.accounts.create("benchmark", plan_a="roomy")
        _, secret = await resources.api_keys.create(account.id, interfaces=frozenset({Variant.A}))
        lora_id = (await resources.catalog.all())[0].id
    callers = {
        name: Callers(server.port, server.pids, secret, lora_id, options.connections, name.split()[0])
        for name, server in servers.items()
    }
    ids = await _accepted(callers["bare uvicorn"])
    for each in callers.values():
        await each.accept(JOBS_S)
    costs: dict[str, dict[str, list[Cost]]] = {kind: {name: [] for name in servers} for kind in ("poll", "accept")}
    for number in range(options.rounds):
        for name, each in callers.items():
            each.ids = list(ids)
            costs["poll"][name].append(await _cost(each.poll, servers[name].pids, options.seconds))
            costs["accept"][name].append(await _cost(each.accept, servers[name].pids, options.seconds))
        sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
    sys.stdout.write("\n".join(_lines(costs)) + "\n")
    sys.stdout.write(f"load {os.getloadavg()}, {options}\n")


async def _cost(call: Callable[[float], Awaitable[Measured]], pids: Sequence[int], seconds: float) -> Cost:
    before = {pid: cpu_seconds(pid) for pid in pids}
    measured = await call(seconds)
    used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    total = sum(used.values())
    return Cost(measured.cpu_ms, {_title(pid): measured.cpu_ms * each / total for pid, each in used.items()})


def _title(pid: int) -> str:
    """`haproxy`, `ProxyActor` or the deployment of a replica."""
    title = psutil.Process(pid).cmdline()[0].strip().rpartition("/")[2].rpartition(":")[2]
    return title.partition(".")[0]  # Ray adds what an actor is doing


async def _accepted(callers: Callers) -> list[str]:
    await callers.accept(JOBS_S)
    return callers.ids[-64:]


def _lines(costs: dict[str, dict[str, list[Cost]]]) -> Generator[str]:
    yield "| | | CPU ms each | HAProxy and Serve to this | of which |"
    yield "|---|---|---|---|---|"
    for kind, by_name in costs.items():
        ours = by_name["HAProxy and Serve"]
        for name, each in by_name.items():
            ratios = [mine.cpu_ms / other.cpu_ms for mine, other in zip(ours, each, strict=True)]
            parts = ", ".join(
                f"{title} {statistics.median(cost.parts[title] for cost in each):.2f}" for title in each[0].parts
            )
            yield f"| {kind} | {name} | {spread([cost.cpu_ms for cost in each])} | {spread(ratios)} | {parts} |"


if __name__ == "__main__":
    main()
