"""Other machines reach the HTTP port of a service alone, and other users of its machine nothing more."""

import contextlib
import ipaddress
import os
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from deployments.runtime import runtime_home
from tests.attack.start_sync import OTHER_USER, start_sync
from tests.deployments.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


class Listener(NamedTuple):
    process: str
    kind: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        return ipaddress.ip_address(self.address.removeprefix("::ffff:")).is_loopback


def listeners(pid: int) -> list[Listener]:
    """The TCP and UDP sockets of a process and all its descendants that take what anybody sends."""
    root = psutil.Process(pid)
    return [found for process in [root, *root.children(recursive=True)] for found in listeners_of(process)]


def listeners_of(process: psutil.Process) -> list[Listener]:
    try:
        name = program(process.cmdline())
        connections = process.net_connections("inet")
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
    return [
        Listener(name, connection.type.name, connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    ]


def program(words: list[str]) -> str:
    """What is running: a title of Ray, a program, or the script that Python runs."""
    first = words[0].strip() if words else ""
    scripts = [word for word in words[1:] if not word.startswith("-")]
    is_script = Path(first).name.startswith("python") and bool(scripts)
    return first if first.startswith("ray::") else Path(scripts[0] if is_script else first).name


def test_every_listener_is_on_loopback(service: Service) -> None:
    found = listeners(service.pid)
    assert service.port in {listener.port for listener in found}
    assert len(found) > 10, "Ray's own processes are among them"
    reachable = [listener for listener in found if not listener.is_local]
    assert not reachable, "\n".join(map(str, reachable))


def test_another_user_of_the_machine_cannot_call_ray(service: Service) -> None:
    """Ray asks for a token too late: without TLS the same call ends it.

    See `tests/deployments/test_groups.py`.
    """
    found = [
        one for one in listeners(service.pid) if one.process in ("gcs_server", "raylet") and one.kind == "SOCK_STREAM"
    ]
    assert {one.process for one in found} == {"gcs_server", "raylet"}
    answers = {one: start_sync(one.port) for one in found}
    assert all(answer.startswith("UNAVAILABLE") for answer in answers.values()), answers
    assert service.client.get("/readyz").is_success
    assert {one.port for one in found} <= {one.port for one in listeners(service.pid)}, "both live"


def test_another_user_of_the_machine_reads_no_numbers_at_any_port(service: Service) -> None:
    """HAProxy has no statistics, and the ingress replica answers HAProxy alone."""
    found = [one for one in listeners(service.pid) if one.kind == "SOCK_STREAM"]
    assert {one.port for one in found if one.process == "haproxy"} == {service.port}, "no statistics"
    statuses: dict[Listener, int] = {}
    for one in found:
        if one.process.startswith("ray::") and any(word in one.process for word in ("ingress", "Proxy")):
            with contextlib.suppress(httpx.HTTPError):
                statuses[one] = httpx.get(f"http://127.0.0.1:{one.port}/metrics", timeout=5).status_code
    assert 403 in {status for one, status in statuses.items() if "ingress" in one.process}, found
    assert max(statuses.values()) < 500
    assert min(statuses.values()) >= 400, statuses
    assert service.client.get("/metrics").status_code == 401
    headers = {"Authorization": f"Bearer {(service.data_dir / 'operator-token').read_text()}"}
    assert service.client.get("/metrics", headers=headers).status_code == 200


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_can_open_none_of_its_files(service: Service) -> None:
    """HAProxy's admin socket could redirect the service to a server of theirs."""
    home = runtime_home(service.data_dir)
    sockets = list(home.glob("p/*/admin.sock"))
    assert sockets
    files = [*sockets, *home.glob("p/*/haproxy.cfg"), *(service.data_dir / "redis").glob("*.sock")]
    for file in files:
        seen = subprocess.run(["test", "-e", str(file)], user=OTHER_USER, group=OTHER_USER, extra_groups=[], cwd="/")
        assert seen.returncode == 1, file
    assert all(socket.stat().st_mode & 0o077 == 0 for socket in sockets)


def test_everything_in_its_data_directory_is_private(service: Service) -> None:
    """Files of the replicas, the proxy and Redis are included.

    pytest's own folders would keep another user out anyway.
    """
    found = [service.data_dir, *service.data_dir.rglob("*"), runtime_home(service.data_dir)]
    assert any(path.suffix == ".png" for path in (service.data_dir / "images").rglob("*")), "the start's first image"
    assert any(path.parent.name == "weights" for path in found)
    assert not [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o077]
