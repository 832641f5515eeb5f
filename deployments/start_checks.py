"""Checks that a start can succeed before Serve starts a replica, and names what is missing."""

import logging
from collections.abc import Mapping

from deployments.args import AppArgs
from deployments.config import Autoscaling, demands
from deployments.nodes import check_nodes, living_nodes, node_pool
from deployments.pools import ReplicaDemand, fits_alone
from deployments.shared_settings import require_shared
from deployments.this_machine import missing_on
from serve_app.service.doctor.checks import Level
from serve_app.settings import Settings

log = logging.getLogger("ray.serve")


def check_start(args: AppArgs, scaling: Mapping[str, Autoscaling], settings: Settings, *, spread: bool) -> None:
    """Raises `RuntimeError` that names what the nodes lack, or what differs between them.

    On one machine every replica must find a place now. On several, nodes may still join: what finds none is logged.
    """
    import ray

    require_shared(settings, spread=spread, secrets=())  # this node may have none: those that run replicas are asked
    if not ray.is_initialized():
        return
    asked = demands(args, scaling)
    if spread:
        _require_alike(asked)
        _log_unplaced(asked)
    elif missing := missing_on(asked, [node_pool(node) for node in ray.nodes() if node["Alive"]]):
        raise RuntimeError(missing)


def _require_alike(asked: list[ReplicaDemand]) -> None:
    checks = check_nodes(living_nodes(asked), spread=True)
    if found := [f"{check.name}: {check.found}" for check in checks if check.level is Level.FAIL]:
        raise RuntimeError(f"the nodes of the cluster are not alike: {'; '.join(found)} (atelier doctor --cluster)")


def _log_unplaced(asked: list[ReplicaDemand]) -> None:
    import ray

    pools = [node_pool(node) for node in ray.nodes() if node["Alive"]]
    for demand in asked:
        if not any(fits_alone(demand, pool) for pool in pools):
            log.warning("%s: no node has space for a replica yet", demand.deployment)
