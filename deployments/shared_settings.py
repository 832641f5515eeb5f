"""Refuses settings that give each machine of a cluster a Redis, secrets or images of its own.

Such a service starts, and then loses jobs, API keys and images by turns, as requests reach one machine or another.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from serve_app.settings import Settings

Secret = Literal["pepper", "signing_keys"]
SECRETS: tuple[Secret, ...] = ("pepper", "signing_keys")
WHERE = "the service runs on more than one machine (or proxy_location is EveryNode)"


def require_shared(settings: Settings, *, spread: bool, secrets: Collection[Secret] = SECRETS) -> None:
    """Raises `RuntimeError` that names every variable to set. `secrets` are those that this process uses."""
    found = of_one_machine(settings, secrets) if spread else []
    if found:
        raise RuntimeError(f"{WHERE}: {'; '.join(found)}")


def of_one_machine(settings: Settings, secrets: Collection[Secret]) -> list[str]:
    """What each machine would have for itself, by the variable to set."""
    return list(_of_one_machine(settings, secrets))


def machines(nodes: Iterable[Mapping[str, Any]]) -> int:
    """How many machines the living ones of Ray's nodes are on."""
    return len({node["NodeManagerAddress"] for node in nodes if node["Alive"]})


def _of_one_machine(settings: Settings, secrets: Collection[Secret]) -> Iterator[str]:
    if not settings.redis_url:
        yield "ATELIER_REDIS_URL is not set, and each would start a Redis of its own"
    elif _is_local(settings.redis_url):
        yield "ATELIER_REDIS_URL is an address of one machine"
    if not settings.storage_url:
        yield "ATELIER_STORAGE_URL is not set, and each would keep its own images"
    elif urlsplit(settings.storage_url).scheme in ("", "file", "local", "memory") and not settings.storage_shared:
        yield "ATELIER_STORAGE_URL is a folder of one machine (ATELIER_STORAGE_SHARED=true, if all have mounted the same)"
    if "pepper" in secrets and not settings.has_pepper:
        yield "ATELIER_PEPPER is not set, and each would refuse the API keys of the others"
    if "signing_keys" in secrets and not settings.signing_keys:
        yield "ATELIER_SIGNING_KEYS is not set, and each would refuse the image addresses of the others"


def _is_local(redis_url: str) -> bool:
    address = urlsplit(redis_url)
    return address.scheme == "unix" or (address.hostname or "") in ("localhost", "127.0.0.1", "::1")
