"""`atelier check FILE` and `atelier doctor --cluster` check a cluster before and while it serves."""

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from deployments.config import ConfigError, ServeConfig, read_config
from deployments.nodes import check_nodes, check_running_nodes, living_nodes, node_pool
from deployments.pools import ReplicaDemand, fits_alone, shortfalls
from deployments.ray_internals import on_several_machines
from deployments.requirements import of_one_machine
from deployments.start_checks import unserved_groups
from serve_app.cli.command import BadUsage, Failed, Result, command
from serve_app.cli.doctor import checks_result
from serve_app.operations.checks import Check, fail, ok, warn
from serve_app.settings import Settings

CONNECT_LIMIT_S = 30.0

ServeFile = Annotated[Path, typer.Argument(metavar="FILE", help="A Serve YAML.", show_default=False)]
Cluster = Annotated[
    bool, typer.Option("--cluster", help="Compare it with the nodes of the Ray cluster of this machine.")
]


def add_check(app: typer.Typer) -> None:
    command(app, "check")(_check)


def _check(settings: Settings, file: ServeFile, cluster: Cluster = False) -> Result:
    """Check a Serve YAML before it is deployed: words, settings, and a place for every replica."""
    try:
        config = read_config(file)
    except ConfigError as error:
        raise BadUsage(str(error)) from None
    checks = [
        ok("file", f"{file}: {_largest(config.demands)}"),
        *_check_pools(config),
        *_check_settings(config, settings),
        *_check_groups(config, settings),
    ]
    if cluster:
        _connect()
        checks += check_places(config.demands)
        checks += check_nodes(living_nodes(config.demands), spread=_is_spread(config))
    return checks_result(checks)


def check_cluster() -> list[Check]:
    """Ask, for `atelier doctor`, every node on which the running application has replicas or may have them."""
    _connect()
    return check_running_nodes()


def _largest(demands: Iterable[ReplicaDemand]) -> str:
    return ", ".join(f"{demand.replicas} {demand.deployment}" for demand in demands) + " at the most"


def _check_pools(config: ServeConfig) -> Iterable[Check]:
    """Say how the pools were checked: `read_config` has refused replicas that find no place on them."""
    if config.pools:
        nodes = ", ".join(f"{pool.nodes} {pool.name}" for pool in config.pools)
        yield ok("pools", f"every replica finds a place on {nodes}, in whatever order they scale")
    elif config.proxy_location == "EveryNode":
        advice = "declare them: configs/production.yaml"
        yield warn("pools", "none are declared, and nothing is known of the nodes", advice)


def _check_settings(config: ServeConfig, settings: Settings) -> Iterable[Check]:
    if config.proxy_location != "EveryNode":
        return
    if own := "; ".join(of_one_machine(settings, ())):
        yield fail("settings", own, "set the same on every node, and here: the deployment would be refused")
    else:
        yield ok("settings", "Redis and storage are shared, as far as this shell's environment says")


def _check_groups(config: ServeConfig, settings: Settings) -> Iterable[Check]:
    """Warn of base models that no generators would load, as far as the catalog can be read from here."""
    if lost := unserved_groups(config, settings):
        yield warn(
            "groups", f"no application serves {lost}", "add one with the group's name, or change the catalog's `group`"
        )


def check_places(demands: Sequence[ReplicaDemand]) -> Iterable[Check]:
    """Check that the declared demand fits the living nodes. More may join where a cluster scales by itself."""
    import ray

    pools = [node_pool(node) for node in ray.nodes() if node["Alive"]]
    nowhere = [demand.deployment for demand in demands if not any(fits_alone(demand, pool) for pool in pools)]
    if nowhere:
        advice = "start nodes with the GPUs, CPUs and resources that they ask for"
        yield fail("places", f"{', '.join(nowhere)}: no living node has space for a replica", advice)
    elif short := shortfalls(demands, pools):
        advice = "fine where the cluster adds nodes; else add them, or lower max_replicas"
        yield warn("places", "; ".join(map(str, short)), advice)
    else:
        yield ok("places", f"every replica finds a place on the {len(pools)} living nodes")


def _is_spread(config: ServeConfig) -> bool:
    return config.proxy_location == "EveryNode" or on_several_machines()


def _connect() -> None:
    """Join this machine's Ray cluster, unless this process has already joined it.

    Raises `Failed` when there is none, or none answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        return
    failures: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001 - Ray has many of its own
            failures.append(error)

    # A thread joins, as Ray waits without end for a cluster with another token or TLS.
    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    joining.join(CONNECT_LIMIT_S)
    if joining.is_alive():
        failures.append(TimeoutError(f"no answer within {CONNECT_LIMIT_S:g} s"))
    if failures:
        where = "RAY_ADDRESS, RAY_AUTH_TOKEN_PATH, RAY_USE_TLS"
        raise Failed(f"no Ray cluster can be reached from here ({where}): {failures[0]}")
