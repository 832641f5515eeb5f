"""Where the service is and which key opens it: as given, from the environment, or the file of the service on this machine."""

import json
import os
from pathlib import Path
from typing import Literal, NamedTuple

READY_FILE = "local.json"
"""`atelier up` writes this file into its data directory, of mode 0600.

It holds `{"base_url", "console_url", "account", "keys": {"a", "b", "both"}, "console_password"}`.
"""
URL_VARIABLES = ("ATELIER_URL", "ATELIER_BASE_URL")
"""Variables of the environment that hold the address; the second is the former name."""
KEY_VARIABLE = "ATELIER_KEY"


class Access(NamedTuple):
    base_url: str
    key: str


def find_access(
    base_url: str | None, key: str | None, interface: Literal["a", "b"], ready_file: Path | str | None = None
) -> Access:
    """Complete an address and a key from the environment, and then from the ready file.

    That is `local.json` in `ATELIER_DATA_DIR`, which is `var` by default. Its key goes to its own address alone. Raises
    `ValueError`, which names what is missing and where it was looked for.
    """
    if base_url is None:
        base_url = next(filter(None, map(os.environ.get, URL_VARIABLES)), None)
    if key is None:
        key = os.environ.get(KEY_VARIABLE) or None
    if base_url is not None and key is not None:
        return Access(base_url, key)
    path = Path(ready_file or Path(os.environ.get("ATELIER_DATA_DIR") or "var", READY_FILE)).absolute()
    try:
        local = json.loads(path.read_text())
        local_url, keys = str(local["base_url"]), dict[str, str](local["keys"])
        local_key = keys.get("both") or keys[interface]
    except FileNotFoundError:
        missing, variable = ("base_url", URL_VARIABLES[0]) if base_url is None else ("key", KEY_VARIABLE)
        raise ValueError(
            f"{missing}: give it, or set {variable}: there is no {path} to read it from (`atelier up` writes it)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error!r}") from None
    if key is None and base_url is not None and base_url.rstrip("/") != local_url.rstrip("/"):
        raise ValueError("key: give it too, since the local service's is not sent to another address")
    return Access(base_url or local_url, key or local_key)
