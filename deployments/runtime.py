"""A Ray runtime for one machine, with its own ports and directory: several run side by side.

Ray and Serve read their configuration from the environment when they are imported, so this module imports them after
`Runtime.start` has set it.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import psutil

from deployments.config import ServeConfig
from deployments.node_certificate import new_authority, write_certificate
from deployments.proxy import environment as proxy_environment
from deployments.ray_internals import dead_core_process
from serve_app.atomic_files import PRIVATE_FOLDER
from serve_app.operations.checks import cannot_listen

LOOPBACK = "127.0.0.1"
LONGEST_STOP_S = 7.0
"""Serve has this many seconds to stop before the rest is killed. `atelier up` promises to stop within 15 s."""
STATUS_POLL_S = (0.2, 2.0)
"""The least and the most time between two questions for the status of the deployments."""
STATUS_SHARE = 0.1
"""Serve answers these questions for at most this share of the time, as it pickles its configuration for each."""
RAY_POLL_S = 0.5
KILL_LIMIT_S = 2.0
SESSIONS_KEPT = 5
PROXY_PORTS = 2
REPLICA_PORTS = 100
"""How many ports ingress replicas have: many, as Serve reuses the port of a replaced replica only after minutes."""

RECOVERY = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a frozen replica takes no part in its own stop
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",  # a killed proxy is back in 5 s instead of 29 s
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",  # within 2 s a busy machine missed some checks
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # a busy machine's proxy was killed after Serve's 5 s
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "2s",  # a frozen ingress is sent nothing more after 7 s instead of 16
}
"""Serve and HAProxy notice this soon what is dead or frozen; `deployments/app.py` sets how soon for replicas."""


@contextlib.contextmanager
def _raising(meaning: str) -> Generator[None]:
    """Raise every error of a block or function as a `RuntimeError`: Ray and Serve have many of their own."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{meaning}: {last_line(error)}") from error


class Runtime:
    """Ray and the Serve applications on it, until `stop`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stopping = threading.Event()
        _keep_last_logs(home / "ray")

    @property
    def logs(self) -> Path:
        return self._home / "ray" / "session_latest" / "logs" / "serve"

    @property
    def said(self) -> str:
        """Where a start that failed has left logs, as the end of a sentence; nothing before Ray has written any."""
        return f" (logs: {self.logs})" if self.logs.exists() else ""

    @_raising("Ray did not start")
    def start(self, config: ServeConfig, *, host: str, port: int, on_death: Callable[[str], None]) -> None:
        """Start Ray, and Serve with its HTTP proxy. Changes the working directory.

        `on_death` is called in a thread when a process that Ray cannot do without has ended: nothing of the runtime can
        then be stopped in an orderly way. Raises `RuntimeError` when one of the two does not start.
        """
        environment = ray_environment(self._home)
        os.environ.update(environment | encryption(self._home))
        os.chdir(self._home)  # Ray puts the working directory before the installed packages on the path of its workers
        if environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1":  # only HAProxy listens there; the replicas stay on loopback
            os.environ["ATELIER_HTTP_HOST"] = f"[{host}]" if ":" in host else host
            host = LOOPBACK
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
        threading.Thread(target=self._watch, args=[on_death], daemon=True).start()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port, "keep_alive_timeout_s": config.http_options.keep_alive_timeout_s},
            logging_config=config.logging_config.model_dump(),
        )

    @_raising("the service did not start")
    def deploy(self, config: ServeConfig, on_status: Callable[[set[str]], None], *, limit_s: float) -> None:
        """Deploy the applications and wait until they run; `on_status` is told again and again what is healthy.

        Deployments have the names that they have among `config.demands`.

        Raises `RuntimeError` when a deployment does not start, or not within `limit_s`.
        """
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        from deployments.app import assemble, assemble_group

        main, groups = config.main, config.groups
        targets = [serve.RunTarget(assemble(main.args, main.scaling), main.name, main.route_prefix)]
        targets += [serve.RunTarget(assemble_group(each.args, each.scaling), each.name, None) for each in groups]
        serve.run_many(targets, wait_for_applications_running=False)
        deadline = time.monotonic() + limit_s
        while True:
            asked = time.monotonic()
            overviews = serve.status().applications
            cost = time.monotonic() - asked
            found = {
                name if application == main.name else f"{name}.{application}": deployment
                for application, overview in overviews.items()
                for name, deployment in overview.deployments.items()
            }
            healthy = {name for name, deployment in found.items() if deployment.status == "HEALTHY"}
            on_status(healthy)
            states = [overviews[target.name] for target in targets]
            if all(state.status == ApplicationStatus.RUNNING for state in states):
                return
            if failed := [state for state in states if state.status == ApplicationStatus.DEPLOY_FAILED]:
                broken = {name: each.message for name, each in found.items() if each.status == "DEPLOY_FAILED"}
                causes = [f"{name}: {last_line(message)}" for name, message in broken.items()]
                raise RuntimeError("; ".join(causes) or failed[0].message)
            if time.monotonic() > deadline:
                waiting = sorted(set(found) - healthy)
                reasons = [f"{name} ({found[name].message or 'starting'})" for name in waiting]
                raise TimeoutError(f"after {limit_s:g} s: {' '.join(', '.join(reasons).split())}")
            least, most = STATUS_POLL_S
            time.sleep(min(max(least, cost / STATUS_SHARE), most))

    def _watch(self, on_death: Callable[[str], None]) -> None:
        """Ray itself notices the end of its control service after a minute, and then ends this process."""
        while not self._stopping.wait(RAY_POLL_S):
            if dead := dead_core_process():
                on_death(f"Ray has died ({dead})")
                return

    def stop(self) -> None:
        """Drain and stop the application and Ray; kill what does not stop in time."""
        import ray

        self._stopping.set()
        if ray.is_initialized():
            with _silence():  # Ray reports the regular end of Serve's controller as a failure
                stopping = threading.Thread(target=_shut_down, daemon=True)
                stopping.start()
                stopping.join(LONGEST_STOP_S)
                if not stopping.is_alive():  # else it would meet Ray's end, and Ray would then end this process
                    ray.shutdown()
        self.kill()

    def kill(self, session: int | None = None) -> None:
        kill_all_of(self._home, session)


def _shut_down() -> None:
    """Stop the applications, and then Serve, which by itself would kill HAProxy before it has passed on their answers."""
    from ray import serve

    try:
        names = [*serve.status().applications]
        for is_blocking in (False, True):
            for name in names:
                serve.delete(name, _blocking=is_blocking)
    finally:
        serve.shutdown()


def last_line(error: Exception | str) -> str:
    """The cause that one of Ray's errors or messages names, without the traces before it."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _keep_last_logs(ray: Path) -> None:
    """Leave only the logs of the last sessions, so that with the next one there are `SESSIONS_KEPT`."""
    (ray / "session_latest").unlink(missing_ok=True)
    sessions = sorted(ray.glob("session_*"))  # the time of the start is in the name
    for session in sessions[: 1 - SESSIONS_KEPT]:
        shutil.rmtree(session, ignore_errors=True)
    for rest in {*ray.glob("*"), *ray.glob("session_*/*")} - {*sessions, *ray.glob("session_*/logs")}:
        if rest.is_dir() and not rest.is_symlink():
            shutil.rmtree(rest, ignore_errors=True)
        else:
            rest.unlink(missing_ok=True)


def runtime_home(data_dir: Path) -> Path:
    """Create the private runtime directory of `data_dir`.

    Its name is short: HAProxy's socket paths may have 97 bytes, of which Serve takes 70.
    """
    owner = f"{os.getuid()}:{data_dir.resolve()}"
    home = Path("/tmp") / f"atelier-{hashlib.sha256(os.fsencode(owner)).hexdigest()[:10]}"
    home.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    if home.lstat().st_uid != os.getuid() or not home.is_dir() or home.is_symlink():
        raise PermissionError(f"{home} belongs to someone else")
    home.chmod(PRIVATE_FOLDER)
    return home


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
        # Ray's node address stays 127.0.0.1, as on macOS by itself; with any other Ray listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
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
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # the default of 30 s exceeds a whole stop
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


@contextlib.contextmanager
def _silence() -> Generator[None]:
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def kill_all_of(home: Path, session: int | None = None) -> None:
    """Kill every process with `home` on its command line, and every other of that session.

    Ray's workers have titles instead of command lines; HAProxy outlives a killed Ray.
    """
    deadline = time.monotonic() + KILL_LIMIT_S
    while alive := [each for each in psutil.process_iter() if _is_of(each, f"{home}/", session)]:
        for each in alive:
            with contextlib.suppress(psutil.Error):
                each.kill()
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _is_of(process: psutil.Process, mark: str, session: int | None) -> bool:
    """Return whether another process has the session or the mark; a zombie counts as ended: nobody may reap it."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
            return os.getsid(process.pid) == session or mark in "\0".join(process.cmdline())
    return False


def processes_in(directory: Path) -> list[int]:
    """The processes of this user whose working directory is `directory`."""
    return [each.pid for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(directory)]
