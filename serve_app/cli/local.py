"""Finds the service that `atelier up` runs on this machine: its address, a key of it, and the port that it holds."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from serve_app.cli.command import BadUsage
from serve_app.operations.checks import Check, cannot_listen, fail, ok, warn
from serve_app.settings import Settings

READY_FILE = "local.json"
"""The name of the file in the data directory, of mode 0600.

It holds `{"base_url", "console_url", "account", "keys": {"a", "b", "both"}, "console_password"}`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    base_url: str
    key: str


def access(settings: Settings, *, base_url: str | None, key: str | None, interface: Literal["a", "b"]) -> Access:
    """Return the given address and key, completed from the local service's file.

    Raises `BadUsage` when one is missing.
    """
    if base_url and key:
        return Access(base_url=base_url, key=key)
    path = settings.data_dir / READY_FILE
    local = read_ready_file(path)
    if local is None:
        missing = " and ".join(name for name, given in (("--base-url", base_url), ("--key", key)) if not given)
        raise BadUsage(f"give {missing}: there is no {path} to read it from (atelier up writes it)")
    if base_url and base_url.rstrip("/") != local["base_url"].rstrip("/"):
        raise BadUsage("give --key too: the key of the local service is not sent to another address")
    keys = local["keys"]
    return Access(base_url=base_url or local["base_url"], key=key or keys.get("both") or keys[interface])


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
