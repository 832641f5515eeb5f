"""A Ray runtime for one machine, with its own ports and directory: several run side by side.

Ray and Serve read their configuration from the environment when they are imported: they are imported after `Runtime.start`
has set it.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from deployments.config import Application, ServeConfig
from deployments.ray_environment import encryption, ray_environment
from deployments.ray_internals import LOOPBACK, dead_core_process
from serve_app.atomic_files import PRIVATE_FOLDER

LONGEST_STOP_S = 7.0
"""Serve has this many seconds to stop before the rest is killed. `atelier up` promises to stop within 15 s."""
STATUS_POLL_S = (0.2, 2.0)
"""The least and the most time between two questions for the status."""
STATUS_SHARE = 0.1
"""Answering them takes at most this share of the time: Serve pickles its configuration for each."""
RAY_POLL_S = 0.5
KILL_LIMIT_S = 2.0


class Runtime:
    """Ray and the Serve application on it, until `stop`."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stopping = threading.Event()

    @property
    def logs(self) -> Path:
        return self._home / "ray" / "session_latest" / "logs" / "serve"

    def start(self, config: ServeConfig, *, host: str, port: int, on_death: Callable[[str], None]) -> None:
        """Start Ray, and Serve with its HTTP proxy. Changes the working directory.

        `on_death` is called in a thread when a process that Ray cannot do without has ended: nothing of the runtime can then
        be stopped in an orderly way. Raises `RuntimeError` when one of the two does not start.
        """
        shutil.rmtree(self._home / "ray", ignore_errors=True)
        environment = ray_environment(self._home)
        os.environ.update(environment | encryption(self._home))
        os.chdir(self._home)  # Ray puts the working directory before the installed packages on the path of its workers
        if environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1":  # only HAProxy listens there; the replicas stay on loopback
            os.environ["ATELIER_HTTP_HOST"] = f"[{host}]" if ":" in host else host
            host = LOOPBACK
        try:
            self._start(config, host, port, on_death)
        except Exception as error:  # Ray raises a plain one when its start takes too long
            raise RuntimeError(f"Ray did not start: {last_line(error)}") from error

    def _start(self, config: ServeConfig, host: str, port: int, on_death: Callable[[str], None]) -> None:
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

    def deploy(self, config: ServeConfig, on_healthy: Callable[[str], None], *, limit_s: float) -> None:
        """Deploy the application and wait until it runs; `on_healthy` gets each healthy deployment.

        Raises `RuntimeError` when a deployment does not start, or not within `limit_s`.
        """
        try:
            self._deploy(config.applications[0], on_healthy, limit_s)
        except Exception as error:  # Ray and Serve have many of their own
            raise RuntimeError(f"the service did not start: {last_line(error)}") from error

    def _deploy(self, application: Application, on_healthy: Callable[[str], None], limit_s: float) -> None:
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        from deployments.app import assemble

        target = serve.RunTarget(
            assemble(application.args, application.scaling), application.name, application.route_prefix
        )
        serve.run_many([target], wait_for_applications_running=False)
        healthy: set[str] = set()
        deadline = time.monotonic() + limit_s
        while True:
            asked = time.monotonic()
            overview = serve.status().applications[application.name]
            cost = time.monotonic() - asked
            for name, deployment in overview.deployments.items():
                if deployment.status == "HEALTHY" and name not in healthy:
                    healthy.add(name)
                    on_healthy(name)
            if overview.status == ApplicationStatus.RUNNING:
                return
            if overview.status == ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError(overview.message)
            if time.monotonic() > deadline:
                waiting = sorted(set(overview.deployments) - healthy)
                reasons = [f"{name} ({overview.deployments[name].message or 'starting'})" for name in waiting]
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
        from ray import serve

        self._stopping.set()
        if ray.is_initialized():
            with _silence():  # Ray reports the regular end of Serve's controller as a failure
                stopping = threading.Thread(target=serve.shutdown, daemon=True)
                stopping.start()
                stopping.join(LONGEST_STOP_S)
                if not stopping.is_alive():  # else it would meet Ray's end, and Ray then ends this process
                    ray.shutdown()
        self.kill()

    def kill(self, session: int | None = None) -> None:
        kill_all_of(self._home, session)


def last_line(error: Exception) -> str:
    """The cause that one of Ray's errors names, without the traces before it."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


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
    mark = os.fsencode(home) + b"/"
    deadline = time.monotonic() + KILL_LIMIT_S
    while alive := [pid for pid in _other_processes() if _is_of(pid, mark, session)]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _other_processes() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").glob("[0-9]*") if int(entry.name) != os.getpid())


def _is_of(pid: int, mark: bytes, session: int | None) -> bool:
    """False for a zombie too: it does nothing any more, and in a container nobody may collect it."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
            return os.getsid(pid) == session or mark in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def processes_in(directory: Path) -> list[int]:
    """The processes of this user whose working directory is `directory`."""
    return [pid for pid in _other_processes() if _working_directory(pid) == directory]


def _working_directory(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cwd").readlink()
    return None
