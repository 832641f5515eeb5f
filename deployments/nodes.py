"""Asks every node of a Ray cluster what its replicas would run with, and compares the answers."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from deployments.pools import Pool, ReplicaDemand, fits_alone
from deployments.ray_internals import is_spread, off_the_loop, serve_controller
from deployments.requirements import SECRETS, of_one_machine
from serve_app.operations.checks import Check, fail, ok, warn
from serve_app.operations.fingerprints import differences, fingerprints
from serve_app.settings import Settings

ANSWER_LIMIT_S = 60.0
"""All nodes answer side by side within this time: each starts a worker process of Ray, which takes seconds."""
CONTROLLER_LIMIT_S = 30.0
INGRESS = "ingress"
SIGNING = frozenset({INGRESS, "housekeeper"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Describes a living node, and names the deployments that fit on it when it is empty."""

    node_id: str
    address: str
    deployments: frozenset[str]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node's answer: what it shares with no other node, a setting that it cannot read, and digests."""

    own: Sequence[str] = ()
    broken: str = ""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])


def living_nodes(demands: Sequence[ReplicaDemand]) -> list[Node]:
    """List Ray's nodes on which a replica may run, or all of them when no demand is known."""
    import ray

    found: list[Node] = []
    for node in ray.nodes():
        deployments = frozenset(demand.deployment for demand in demands if fits_alone(demand, node_pool(node)))
        if node["Alive"] and (deployments or not demands):
            address = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            found.append(Node(node_id=node["NodeID"], address=address, deployments=deployments or frozenset({INGRESS})))
    return found


def node_pool(node: Mapping[str, Any]) -> Pool:
    resources: dict[str, float] = node["Resources"]
    return Pool(
        name=node["NodeManagerAddress"],
        nodes=1,
        gpus=int(resources.get("GPU", 0)),
        cpus=resources.get("CPU", 0),
        resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
    )


async def check_machines() -> list[Check]:
    """Check the nodes from a replica, for as long as they may take to answer."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S + CONTROLLER_LIMIT_S):
            return await off_the_loop(check_running_nodes)
    except TimeoutError:
        return [fail("cluster nodes", "Ray does not answer", "look at the head node's logs")]


def check_running_nodes() -> list[Check]:
    """Ask every node that may run a replica of the application, from a process that has joined Ray."""
    from ray.exceptions import RayError

    try:
        return check_nodes(living_nodes(_running_demands()), spread=is_spread())
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        return [fail("cluster nodes", f"Ray does not answer: {reason}", "look at the head node's logs")]


def check_nodes(nodes: Sequence[Node], *, spread: bool) -> list[Check]:
    """Ask the nodes at the same time, and compare; when `spread`, no node may have anything for itself alone."""
    answers = _ask(nodes)
    checks = [ok("cluster nodes", ", ".join(node.address for node in nodes) or "none that a replica may run on")]
    for node in nodes:
        answer = answers.get(node.node_id)
        if answer is None:
            advice = "look at its raylet; a node that is leaving answers no more"
            checks.append(warn("cluster node", f"{node.address} did not answer", advice))
        elif answer.broken:
            advice = "correct what it names, on that node"
            checks.append(fail("cluster node", f"{node.address}: {answer.broken}", advice))
        elif spread and answer.own:
            found = f"{node.address}: {'; '.join(answer.own)}"
            checks.append(fail("cluster node", found, "set the same on every node"))
    digests = {node.address: answers[node.node_id].digests for node in nodes if node.node_id in answers}
    return checks + differences({address: found for address, found in digests.items() if found})


def node_facts(deployments: frozenset[str], nonce: bytes) -> NodeFacts:
    """Collect what the check needs to know of a node; this runs there, in the environment that its replicas get.

    Ingress and housekeeper (for webhooks) sign addresses of images, and all others make images, which may be marked.
    """
    try:
        settings = Settings()
    except ValidationError as error:
        first = error.errors()[0]
        return NodeFacts(broken=f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    digests = fingerprints(settings, nonce)
    signs, makes = (bool(each) for each in (deployments & SIGNING, deployments - SIGNING))
    if not signs:
        del digests["signing keys"]
    if not makes:
        del digests["certificate"]
    return NodeFacts(own=list(of_one_machine(settings, SECRETS if signs else ("pepper",))), digests=digests)


def _ask(nodes: Sequence[Node]) -> dict[str, NodeFacts]:
    """Return the answers by node, without nodes that fail or take too long."""
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nonce = secrets.token_bytes(16)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(node_facts)
    calls: dict[Any, str] = {}
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        calls[task.options(scheduling_strategy=here).remote(node.deployments, nonce)] = node.node_id
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_LIMIT_S) if calls else ([], [])
    answers: dict[str, NodeFacts] = {}
    for call in done:
        try:
            answers[calls[call]] = ray.get(call)
        except RayTaskError as error:  # one reason is that the node's code lacks this module
            answers[calls[call]] = NodeFacts(broken=str(error).strip().splitlines()[-1])
        except RayError:  # the node is gone
            continue
    return answers


def _running_demands() -> list[ReplicaDemand]:
    """What the replicas of the running application ask of a node; empty while none is deployed."""
    import ray

    try:
        controller = serve_controller()
    except ValueError:  # nothing is served
        return []
    details: Any = ray.get(controller.get_serve_instance_details.remote(), timeout=CONTROLLER_LIMIT_S)
    return [
        _demand(name, deployment["deployment_config"].get("ray_actor_options") or {})
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
    ]


def _demand(deployment: str, options: dict[str, Any]) -> ReplicaDemand:
    return ReplicaDemand(
        deployment=deployment,
        replicas=1,
        gpus=options.get("num_gpus") or 0,
        cpus=options.get("num_cpus") or 0,
        resources=options.get("resources") or {},
    )
