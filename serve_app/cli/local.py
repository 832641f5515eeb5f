"""Which service a command speaks to, and with which key: said on the command line, or left by `atelier up`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_app.cli.ending import BadUsage
from serve_app.settings import Settings

READY_FILE = "local.json"
"""In the data directory, 0600: `{"base_url", "console_url", "account", "keys": {"a", "b", "both"}, "console_password"}`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    base_url: str
    key: str


def access(settings: Settings, *, base_url: str | None, key: str | None, interface: Literal["a", "b"]) -> Access:
    """What the caller named, completed from the local service's file. Raises `BadUsage` when something is missing."""
    if base_url and key:
        return Access(base_url=base_url, key=key)
    path = settings.data_dir / READY_FILE
    local = read_ready_file(path)
    if local is None:
        missing = " and ".join(name for name, given in (("--base-url", base_url), ("--key", key)) if not given)
        raise BadUsage(f"give {missing}: there is no local service's {path} to take it from (atelier up writes it)")
    if base_url and base_url.rstrip("/") != local["base_url"].rstrip("/"):
        raise BadUsage("give --key too: the local service's key is not sent to another address")
    keys = local["keys"]
    return Access(base_url=base_url or local["base_url"], key=key or keys.get("both") or keys[interface])


def read_ready_file(path: Path) -> Mapping[str, Any] | None:
    """None when there is no such file; it is written whole, so one that is there can be read."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadUsage(f"{path}: {error}") from None
