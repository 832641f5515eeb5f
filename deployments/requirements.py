"""Refuses to deploy on a Ray without the protection that SECURITY.md promises, or with settings of one machine.

A service whose machines each have a Redis, secrets or images of their own starts, and then loses jobs, API keys and
images by turns, as requests reach one machine or another.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from deployments.proxy import missing_variables
from serve_app.settings import Settings
from serve_app.store.redis_address import split_address

TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Ray reads these files with `RAY_USE_TLS=1`, and then asks both ends of every connection for a certificate of that
CA."""


def require_protection(settings: Settings, *, spread: bool) -> None:
    """Raises `RuntimeError` that names everything to set. Without a running Ray nothing is asked."""
    import ray

    if not ray.is_initialized():
        return
    found = [*_of_token(), *of_proxy(os.environ, spread=spread)]
    if spread:
        found += of_network(os.environ, is_encrypted=settings.network_encrypted)
    if found:
        raise RuntimeError(f"{'; '.join(found)} (SECURITY.md)")


def _of_token() -> Iterator[str]:
    """Say that the token is missing: without it whoever reaches a port of Ray runs code."""
    core: Any = import_module("ray._raylet")
    if core.get_authentication_mode() != core.AuthenticationMode.TOKEN:
        yield (
            "Ray runs without token authentication: set RAY_AUTH_MODE=token, and the same RAY_AUTH_TOKEN_PATH or "
            "RAY_AUTH_TOKEN on every node, before Ray starts"
        )


def of_proxy(environment: Mapping[str, str], *, spread: bool) -> Iterator[str]:
    """What Serve's HTTP proxy lacks for the limits and rules of `deployments/proxy`."""
    if missing := missing_variables(environment, everywhere=spread):
        yield (
            f"the HTTP proxy would run without its protection: set {', '.join(missing)} on every node, "
            "before Ray starts, as configs/cluster.env does"
        )


def of_network(environment: Mapping[str, str], *, is_encrypted: bool) -> Iterator[str]:
    """What Ray lacks for encrypting what its nodes say to each other."""
    if is_encrypted:
        return
    if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        yield (
            "Ray's nodes would speak unencrypted: set RAY_USE_TLS=1 and the certificates on every node, before Ray "
            "starts (configs/cluster.env), or ATELIER_NETWORK_ENCRYPTED=true, if the network between them is private "
            "and encrypted"
        )
        return
    absent = [name for name in TLS_FILES if not Path(environment.get(name, "")).is_file()]
    if absent:
        yield f"RAY_USE_TLS is set, but {', '.join(absent)} name no file on this node"


Secret = Literal["pepper", "signing_keys"]
SECRETS: tuple[Secret, ...] = ("pepper", "signing_keys")
WHERE = "the service runs on more than one machine (or proxy_location is EveryNode)"


def require_shared(settings: Settings, *, spread: bool, secrets: Collection[Secret] = SECRETS) -> None:
    """Refuse to run on several machines with what only one of them has; `secrets` are those that this process uses.

    Raises `RuntimeError` that names every variable to set.
    """
    if spread and (found := "; ".join(of_one_machine(settings, secrets))):
        raise RuntimeError(f"{WHERE}: {found}")


def machines(nodes: Iterable[Mapping[str, Any]]) -> int:
    return len({node["NodeManagerAddress"] for node in nodes if node["Alive"]})


def of_one_machine(settings: Settings, secrets: Collection[Secret]) -> Iterator[str]:
    """Name each variable that is to be set, and what every machine would have for itself without it."""
    if not settings.redis_url:
        yield "ATELIER_REDIS_URL is not set, and each would start a Redis of its own"
    elif _is_local(settings.redis_url):
        yield "ATELIER_REDIS_URL is an address of one machine"
    if not settings.storage_url:
        yield "ATELIER_STORAGE_URL is not set, and each would keep its own images"
    elif urlsplit(settings.storage_url).scheme in ("", "file", "local", "memory") and not settings.storage_shared:
        shared = "ATELIER_STORAGE_SHARED=true, if all have mounted the same"
        yield f"ATELIER_STORAGE_URL is a folder of one machine ({shared})"
    if "pepper" in secrets and not settings.has_pepper:
        yield "ATELIER_PEPPER is not set, and each would refuse the API keys of the others"
    if "signing_keys" in secrets and not settings.signing_keys:
        yield "ATELIER_SIGNING_KEYS is not set, and each would refuse the image addresses of the others"


def _is_local(redis_url: str) -> bool:
    address = split_address(redis_url)
    return address.scheme == "unix" or (address.hostname or "") in ("localhost", "127.0.0.1", "::1")
