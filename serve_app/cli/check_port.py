"""The check of the port that `atelier up` would listen on."""

import socket
from collections.abc import Iterable

import httpx

from serve_app.cli.local import READY_FILE, read_ready_file
from serve_app.service.doctor.checks import Check, fail, ok, warn
from serve_app.settings import Settings

READINESS = ("ready", "not ready")


def check_port(settings: Settings, port: int) -> Iterable[Check]:
    """Check that the port is free or held by a service of this program, as `serve run` starts one."""
    serving = _serving_address(settings)
    if serving is not None and httpx.URL(serving).port == port:
        yield ok("port", f"{port}: used by the service of this data directory at {serving}")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if _tells_readiness(port):
                yield warn(
                    "port",
                    f"{port}: used by a service that answers /readyz, which `atelier up` of this data directory did not start",
                    f"leave it, if it is the one that you mean; to start another: atelier up --port {port + 1}",
                )
                return
            yield fail(
                "port",
                f"{port}: {error.strerror}",
                f"stop the process that listens there, or: atelier up --port {port + 1}",
            )
            return
    yield ok("port", f"{port} is free")


def _serving_address(settings: Settings) -> str | None:
    """Address of the local service if it answers now, else None."""
    local = read_ready_file(settings.data_dir / READY_FILE)
    if local is None:
        return None
    try:
        answer = httpx.get(f"{local['base_url']}/healthz", timeout=3.0)
    except httpx.TransportError:
        return None
    return str(local["base_url"]) if answer.is_success else None


def _tells_readiness(port: int) -> bool:
    """Whether the listener answers as this program does, ready or not."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=3.0)
        return answer.json().get("status") in READINESS
    except (httpx.HTTPError, ValueError, AttributeError):
        return False
