"""Builds the Serve application from typed `args`, which are checked before anything starts.

`serve run configs/local.yaml`, `import_path: deployments.app:build`.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.args import AppArgs, LoadScaleArgs, ReplicaArgs, ScaleArgs, WorkerArgs
from deployments.generator import Generator
from deployments.housekeeper import Housekeeper
from deployments.ingress import Ingress
from deployments.protection import require_protection
from deployments.ray_internals import is_spread
from deployments.shared_settings import require_shared
from deployments.upscaler import Upscaler
from serve_app.domain.jobs import JobKind
from serve_app.settings import Settings

HINTS_AT_ONCE = 100
STOP_MARGIN_S = 5.0
"""Time between the end of a replica's own drain and its kill by Serve."""


def build(args: AppArgs) -> Application:
    """Bind the ingress to the generator and the upscaler, which pull jobs from Redis, and to the housekeeper."""
    settings, spread = Settings(), is_spread()
    require_protection(settings, spread=spread)
    require_shared(settings, spread=spread, secrets=())  # this node may have none: the replicas ask for theirs
    generator = _worker(Generator, JobKind.GENERATION, args.generator).bind(args.generator)
    upscaler = _worker(Upscaler, JobKind.UPSCALE, args.upscaler).bind(args.upscaler)
    housekeeper = serve.deployment(
        name="housekeeper",
        ray_actor_options={"num_cpus": args.housekeeper.num_cpus, "resources": args.housekeeper.resources},
        graceful_shutdown_wait_loop_s=0.1,
    )(Housekeeper).bind(args.housekeeper)
    open_requests = args.ingress.max_ongoing_requests or settings.open_requests
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=open_requests,
        max_queued_requests=args.ingress.max_queued_requests,
        ray_actor_options=_actor_options(args.ingress),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=args.ingress.drain_s,
        **_ingress_replicas(args.ingress.replicas),
    )(Ingress)
    return ingress.bind(
        generator,
        upscaler,
        housekeeper,
        always_on=always_on(args),
        open_requests=args.ingress.max_ongoing_requests,
        max_rank=args.generator.engine.max_rank,
    )


def always_on(args: AppArgs) -> frozenset[JobKind]:
    """The kinds of which there is a worker also without work."""
    workers = {JobKind.GENERATION: args.generator, JobKind.UPSCALE: args.upscaler}
    return frozenset(kind for kind, worker in workers.items() if worker.least_replicas)


def _worker(deployment: type, kind: JobKind, args: WorkerArgs) -> Any:
    return serve.deployment(
        name=deployment.__name__.lower(),
        max_ongoing_requests=HINTS_AT_ONCE,
        max_queued_requests=HINTS_AT_ONCE,
        ray_actor_options=_actor_options(args),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=args.drain_s + STOP_MARGIN_S,
        **_replicas(kind, args.replicas),
    )(deployment)


def _ingress_replicas(replicas: int | LoadScaleArgs) -> dict[str, Any]:
    """By Serve's own policy: only the ingress has requests in progress to count."""
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    return {"autoscaling_config": AutoscalingConfig(**replicas.model_dump())}


def _actor_options(args: ReplicaArgs) -> dict[str, Any]:
    return {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus, "resources": args.resources}


def _replicas(kind: JobKind, replicas: int | ScaleArgs) -> dict[str, Any]:
    if isinstance(replicas, int):
        return {"num_replicas": replicas}
    policy = AutoscalingPolicy(
        policy_function="deployments.scaling:BacklogPolicy",
        policy_kwargs={"kind": kind, "target_s": replicas.target_s},
    )
    bounds = replicas.model_dump(exclude={"target_s"})
    return {"autoscaling_config": AutoscalingConfig(**bounds, policy=policy)}
