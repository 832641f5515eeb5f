"""Keeps a service started by `serve run` on this machine: Ray on loopback, HAProxy protected.

Serve imports the request router class of a deployment while it reads a YAML, before it starts Ray; that is the one
moment at which a file can still decide how Ray starts. The class is Serve's default router.
"""

import argparse
import contextlib
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from deployments.config import ConfigError
from deployments.ray_internals import keep_session_private, use_loopback
from deployments.runtime import ray_environment, runtime_home
from deployments.start_checks import check_base_models
from serve_app.atomic_files import PRIVATE, PRIVATE_UMASK
from serve_app.cli.command import BadUsage, read_settings
from serve_app.store.embedded_redis import stop_redis_after_this_process

RAY_TOKEN = Path.home() / ".ray" / "auth_token"
Router = PowerOfTwoChoicesRequestRouter

OF_UP_ALONE = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_SERVE_LOG_TO_STDERR")
"""`atelier up` sets these, and `serve run` must not: Ray authenticates its cluster by a token file of its own, which
`serve status` finds, and the logs of `serve run` belong on its terminal."""


def prepare() -> None:
    """Set what the processes that this one will start find in their environment."""
    os.umask(PRIVATE_UMASK)
    with contextlib.suppress(FileNotFoundError):
        RAY_TOKEN.chmod(PRIVATE)  # Ray writes its token file readable for everyone
    use_loopback()
    keep_session_private()
    try:
        settings = read_settings()
        check_base_models(settings)
    except (BadUsage, ConfigError) as error:
        sys.exit(f"atelier: {error}")
    if not settings.redis_url:
        stop_redis_after_this_process(settings.data_dir)
    environment = ray_environment(runtime_home(settings.data_dir))
    os.environ.update({name: value for name, value in environment.items() if name not in OF_UP_ALONE})


def is_serve_run(arguments: list[str]) -> bool:
    """Whether this process is `serve run`: others that read the YAML start no Ray."""
    return len(arguments) > 1 and Path(arguments[0]).name == "serve" and arguments[1] == "run"


def running_ray(arguments: list[str]) -> str | None:
    """The address of the Ray that `serve run` would join instead of starting one, as it decides itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--address", "-a", default=os.environ.get("RAY_ADDRESS"))
    address: str | None = parser.parse_known_args(arguments[2:])[0].address
    if address and "://" in address:
        return address
    services: Any = import_module("ray._private.services")
    return services.canonicalize_bootstrap_address(address or None)


def refuse_running_ray(arguments: list[str]) -> None:
    """End this process when it would join a Ray that was started without what this module sets."""
    if joined := running_ray(arguments):
        sys.exit(
            f"atelier: this file is for a Ray of its own, and serve run would join the one at {joined}. "
            "Stop that one (ray stop), or start another next to it (--address local); configs/production.yaml is for a "
            "cluster (SECURITY.md)"
        )


if is_serve_run(sys.argv):
    refuse_running_ray(sys.argv)
    prepare()
