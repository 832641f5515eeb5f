"""Finds the service that `atelier up` runs on this machine: its address and the port that it holds."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from serve_app.cli.command import BadUsage
from serve_app.client.access import READY_FILE
from serve_app.operations.checks import Check, cannot_listen, fail, ok, warn
from serve_app.settings import Settings


def local_base_url(settings: Settings) -> str:
    """Return the service's public address, or else that of the local service; '' when neither is known."""
    local = read_ready_file(settings.data_dir / READY_FILE) or {}
    return (settings.public_url or str(local.get("base_url", ""))).rstrip("/")


def read_ready_file(path: Path) -> Mapping[str, Any] | None:
    """Contents of the file, or None when there is none. The file is written atomically."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadUsage(f"{path}: {error}") from None


def check_port(settings: Settings, port: int) -> Iterable[Check]:
    """Check that the port is free, or held by a service of this program."""
    reason = cannot_listen("127.0.0.1", port)
    local = read_ready_file(settings.data_dir / READY_FILE) or {"base_url": ""}
    if reason is None:
        yield ok("port", f"{port} is free")
    elif not _tells_readiness(port):
        yield fail("port", f"{port} {reason}", f"stop what listens there, or: atelier up --port {port + 1}")
    elif httpx.URL(local["base_url"]).port == port:
        yield ok("port", f"{port}: used by the service of this data directory at {local['base_url']}")
    else:
        found = "used by a service that answers /readyz, which `atelier up` of this data directory did not start"
        advice = f"leave it, if it is the one that you mean; to start another: atelier up --port {port + 1}"
        yield warn("port", f"{port}: {found}", advice)


def _tells_readiness(port: int) -> bool:
    """Whether the listener answers as this program does, ready or not."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=3.0)
        return answer.json().get("status") in ("ready", "not ready")
    except (httpx.HTTPError, ValueError, AttributeError):
        return False
