"""Finds the service address and key of a command: its own options, or the file of `atelier up`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_app.cli.command import BadUsage
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
