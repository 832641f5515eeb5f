"""Sets and reads what Ray has no public interface for: addresses, callers, logs, living processes."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from deployments.config import GENERATOR
from deployments.proxy import missing_variables
from deployments.requirements import SECRETS, Secret, machines, require_shared
from serve_app.atomic_files import PRIVATE_FOLDER, PRIVATE_UMASK
from serve_app.domain.jobs import DEFAULT_GROUP, pool_of
from serve_app.log import configure_logging
from serve_app.settings import Settings

T = TypeVar("T")

ANSWER_LIMIT_S = 60.0
CORE_PROCESSES = ("gcs_server", "raylet")


def use_loopback() -> None:
    """Keep the cluster that this process starts on 127.0.0.1, where it has already imported Ray."""
    constants: Any = import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = False


def keep_session_private() -> None:
    """Keep other users of this machine out of the session's directory, with its sockets and logs.

    Ray 2.60 opens it to everybody, and they could put sockets of theirs in the place of Ray's. The directory above is
    shared by the users' sessions, and stays so, but none can remove another's.
    """
    utils: Any = import_module("ray._common.utils")
    utils.try_make_directory_shared = _share_only_above_sessions


def _share_only_above_sessions(directory: str) -> None:
    path = Path(directory)
    is_of_a_session = any(part.startswith("session_") for part in path.parts)
    with suppress(PermissionError):
        path.chmod(PRIVATE_FOLDER if is_of_a_session else 0o1777)


def prepare_replica(*, takes_requests: bool = False, secrets: Collection[Secret] = SECRETS) -> Settings:
    """Make this process's files private, bind its server between deployments to the node's address, and set its log.

    Called by every constructor, which gets the settings. Serve 2.60 binds that server to every interface, and it
    unpickles what it receives. A group's generators are all that their application has, so that Serve takes them for
    its ingress: unless one `takes_requests`, HAProxy's part in it is left out, which is a port for HTTP, and half a
    minute of serving after a replica is told to stop. `secrets` are those that the replica uses. Raises `RuntimeError`
    on a node whose HTTP proxy would lack its protection, or that has for itself what all must share.
    """
    import ray

    os.umask(PRIVATE_UMASK)
    if missing := missing_variables(os.environ, everywhere=False):
        raise RuntimeError(
            f"this node's HTTP proxy would run unprotected: set {', '.join(missing)} (configs/cluster.env)"
        )
    address = ray.util.get_node_ip_address()
    host = f"[{address}]" if ":" in address else address
    replica: Any = import_module("ray.serve._private.replica")
    replica.RAY_SERVE_ENABLE_DIRECT_INGRESS &= takes_requests
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, wanted: add_port(server, wanted.replace("[::]:", f"{host}:"))
    settings = Settings()
    require_shared(settings, spread=on_several_machines(), secrets=secrets)
    configure_replica_log(settings)
    return settings


def at_drain(act: Callable[[], None]) -> None:
    """Call `act` on this event loop as soon as Serve tells this replica to stop, before it waits for open requests."""
    replica: Any = import_module("ray.serve._private.replica")
    stop, loop = replica.Replica.perform_graceful_shutdown, asyncio.get_running_loop()

    async def act_and_stop(self: Any) -> None:
        loop.call_soon_threadsafe(act)
        await stop(self)

    replica.Replica.perform_graceful_shutdown = act_and_stop


def has_haproxy() -> bool:
    """Whether Serve's proxy is HAProxy, so that every request to a replica has come through it."""
    constants: Any = import_module("ray.serve._private.constants")
    return bool(constants.RAY_SERVE_ENABLE_HA_PROXY)


def admin_socket() -> Path:
    """Return where Serve puts the admin socket of this node's HAProxy."""
    import ray

    constants: Any = import_module("ray.serve._private.constants")
    path = Path(constants.RAY_SERVE_HAPROXY_SOCKET_PATH)
    return path.parent / ray.get_runtime_context().get_node_id() / path.name


def serve_log() -> TextIO | None:
    """Return Serve's log as a stream; None where Serve has not put one in the place of `sys.stderr`.

    Serve's own stream walks the whole stack for each line, which took a tenth of an accept.
    """
    utils: Any = import_module("ray.serve._private.logging_utils")
    stream: Any = sys.stderr
    return cast(TextIO, _LogStream(stream._logger)) if isinstance(stream, utils.StreamToLogger) else None


class _LogStream:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self._log.info("%s", line)
        return len(text)

    def flush(self) -> None:
        """Do nothing, since `write` keeps nothing back."""


def dead_core_process() -> str | None:
    """Name an ended process without which the Ray that was started here cannot go on; None while all live."""
    worker: Any = import_module("ray._private.worker")
    node = worker._global_node
    dead: list[tuple[str, Any]] = node.dead_processes() if node is not None else []
    return next((f"{name}, exit code {process.returncode}" for name, process in dead if name in CORE_PROCESSES), None)


def on_several_machines() -> bool:
    import ray

    return machines(ray.nodes()) > 1


def is_spread() -> bool:
    """Return whether living nodes are on several machines, or Serve's setting for proxies says that they may be."""
    import ray
    from ray.serve.config import ProxyLocation

    if not ray.is_initialized():
        return False
    if on_several_machines():
        return True
    try:
        location: Any = ray.get(serve_controller().get_proxy_location.remote(), timeout=ANSWER_LIMIT_S)
    except ValueError:  # nothing is served yet
        return False
    return location == ProxyLocation.EveryNode


_RAY_THREADS = ThreadPoolExecutor(1, thread_name_prefix="Ray")
"""While Ray's head is silent one call waits in this thread; those whose callers give up meanwhile are never made."""


async def off_the_loop(call: Callable[[], T]) -> T:
    """Make a blocking call of Ray's in that thread; the caller limits its own wait."""
    return await asyncio.get_running_loop().run_in_executor(_RAY_THREADS, call)


async def least_replicas(deployment: str, application: str) -> int | None:
    """Return how many replicas Serve keeps of a deployment without any work; None where it has no such deployment.

    It is asked again each time, as a changed `min_replicas` restarts nothing. Raises what Ray raises while Serve's
    controller does not answer.
    """
    common: Any = import_module("ray.serve._private.common")
    name = common.DeploymentID(name=deployment, app_name=application)
    config: Any = await (await off_the_loop(serve_controller)).get_deployment_config.remote(name)
    if config is None:
        return None
    bounds = config.autoscaling_config
    return config.num_replicas if bounds is None else bounds.min_replicas


def note_run(pool: str) -> None:
    """Remember that a worker of this pool has run here, for as long as this Ray cluster lives."""
    _cluster_memory()._internal_kv_put(pool, "1", namespace=_HAVE_RUN)


def has_run(pool: str) -> bool:
    """Return whether a worker of this pool has ever run in this Ray cluster. Blocks while Ray's head does not answer."""
    return _cluster_memory()._internal_kv_exists(pool, namespace=_HAVE_RUN)


async def until_generators_have_run() -> None:
    """Wait until, of every application that has generators, one has run in this Ray cluster."""
    while not await asyncio.to_thread(_generators_have_run):  # noqa: ASYNC110 - other processes say it
        await asyncio.sleep(_LOOK_EVERY_S)


def _generators_have_run() -> bool:
    from ray import serve

    own = serve.get_replica_context().app_name
    for name, application in serve.status().applications.items():
        if application.status == "DEPLOYING" and not application.deployments:
            return False  # what it consists of is not known yet
        if GENERATOR in application.deployments and not has_run(pool_of(DEFAULT_GROUP if name == own else name)):
            return False
    return True


_HAVE_RUN, _LOOK_EVERY_S = "atelier-pools-that-have-run", 0.5


def _cluster_memory() -> Any:
    """Ray's store of small values in its head, which lasts as long as the cluster does."""
    return import_module("ray.experimental.internal_kv")


def serve_controller() -> Any:
    """Serve's controller. Raises `ValueError` while nothing is served."""
    import ray

    constants: Any = import_module("ray.serve._private.constants")
    return ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)


def configure_replica_log(settings: Settings) -> None:
    """Log JSON lines to the process's own standard error, which is a file of Ray's, and text to Serve's log.

    Serve may have put a stream in the place of `sys.stderr` that makes each line a part of one of its own.
    """
    stream = sys.__stderr__ if settings.log_format == "json" else serve_log()
    configure_logging(settings.log_level, settings.log_format, stream=stream)
