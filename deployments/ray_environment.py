"""Environment variables and ports of a Ray runtime of its own, so that several run side by side."""

import errno
import os
import secrets
import socket
from pathlib import Path

from deployments.node_certificate import new_authority, write_certificate
from deployments.proxy import environment as proxy_environment
from deployments.ray_internals import LOOPBACK_ENVIRONMENT
from serve_app.atomic_files import PRIVATE_FOLDER

PROXY_PORTS = 2
REPLICA_PORTS = 100
"""Ports for ingress replicas: Serve reuses the port of a replaced replica only after minutes."""

RECOVERY = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a frozen replica takes no part in its own stop
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",  # a killed proxy is back in 5 s instead of 29 s
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",  # with 2, a busy machine missed some
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine starts none in Serve's 5 s: it was killed, again and again
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",  # HAProxy sends nothing more to a frozen ingress after 7 s instead of 16
}
"""How soon Serve and HAProxy notice what is dead or frozen; `deployments/app.py` says it of the replicas."""


def ray_environment(home: Path) -> dict[str, str]:
    """Environment variables for Ray and Serve. A variable that is already set keeps its value."""
    proxy = home / "p"
    proxy.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    first = _free_block(PROXY_PORTS + REPLICA_PORTS)
    fallback_http, fallback_grpc = range(first, first + PROXY_PORTS)
    replicas = first + PROXY_PORTS
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # otherwise any user of this machine could run code in the replicas
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **LOOPBACK_ENVIRONMENT,
        **proxy_environment(),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # a quarter less for a request than with four (benchmarks/RESULTS.md)
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replicas),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replicas + REPLICA_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # the default of 30 s is longer than a whole stop may take
        **RECOVERY,
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def encryption(home: Path) -> dict[str, str]:
    """Return the environment variables of TLS between Ray's processes, with a new CA.

    The CA is of this start alone, and its key is kept nowhere. Other users of this machine can then call none of the
    processes: Ray 2.60 lets one call without a token end it. `RAY_USE_TLS` decides when it is already set.
    """
    if "RAY_USE_TLS" in os.environ:
        return {}
    return write_certificate(new_authority(), home / "tls")


def _free_block(count: int) -> int:
    """Return the first of `count` consecutive free ports, below the range of the kernel's own ports.

    A port of that range may be taken before it is listened on.
    """
    for _ in range(100):
        first = 20_000 + secrets.randbelow(12_000 // count) * count
        if not any(cannot_listen("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} consecutive free ports between 20000 and 32000")


def cannot_listen(host: str, port: int) -> str | None:
    """The reason why the address cannot be listened on; None when it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        return None
