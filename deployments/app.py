"""Builds the Serve application from typed `args`, which are checked before anything starts.

`serve run configs/local.yaml`, `import_path: deployments.app:build`.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import EncodingType, LoggingConfig

from deployments.args import AppArgs, GroupArgs, ReplicaArgs, WorkerArgs
from deployments.config import Autoscaling, demands
from deployments.housekeeper import Housekeeper
from deployments.ingress import Ingress
from deployments.ray_internals import is_spread
from deployments.replica import Generator, Upscaler
from deployments.requirements import require_protection
from deployments.start_checks import check_start
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.http_server import OPEN_FILES
from serve_app.settings import Settings

HINTS_AT_ONCE = 100
ONE_EVENT_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""The ingress never blocks, so it needs no second thread; by default Serve passes each request to one and back."""


class HealthChecks(TypedDict):
    health_check_period_s: float
    health_check_timeout_s: float


HEALTH_CHECKS = HealthChecks(health_check_period_s=3, health_check_timeout_s=7)
"""Serve replaces a replica that misses three checks in a row, so a frozen one after 24 s at most. A check has to
wait for the threads that compute: on a machine with a load of 73 a generator missed two."""
STOP_MARGIN_S = 5.0
"""Serve kills a replica this long after the end of its own drain."""


def build(args: AppArgs) -> Application:
    """Bind the ingress to generator and upscaler, which pull jobs from Redis, and to the housekeeper.

    Serve calls it, and then sets over it what the YAML says under `deployments:`.
    """
    return assemble(args, {})


def build_group(args: GroupArgs) -> Application:
    """Bind the generators of one group of base models, as an application of their own that takes no requests.

    A change of its `args` restarts its replicas, and those of no other group. Serve calls it as it calls `build`.
    """
    return assemble_group(args, {})


def assemble_group(args: GroupArgs, scaling: Mapping[str, Autoscaling]) -> Application:
    """The application, scaled by `scaling` where `args` leave it to Serve's `deployments:`."""
    settings, spread = Settings(), is_spread()
    require_protection(settings, spread=spread)
    check_start(demands(args, scaling), settings, spread=spread)
    generator = _worker(Generator, args, scaling, replica_logging(settings))
    return generator.bind(args, args.group)


def assemble(args: AppArgs, scaling: Mapping[str, Autoscaling]) -> Application:
    """The application, scaled by `scaling` where `args` leave it to Serve's `deployments:`."""
    settings, spread = Settings(), is_spread()
    require_protection(settings, spread=spread)
    check_start(demands(args, scaling), settings, spread=spread)
    log = replica_logging(settings)
    own = args.generator
    generator = own and _worker(Generator, own, scaling, log).bind(own)
    upscaler = _worker(Upscaler, args.upscaler, scaling, log).bind(args.upscaler)
    housekeeper = serve.deployment(
        name="housekeeper",
        ray_actor_options={"num_cpus": args.housekeeper.num_cpus, "resources": args.housekeeper.resources},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=STOP_MARGIN_S,
        logging_config=log,
        **HEALTH_CHECKS,
    )(Housekeeper).bind(args.housekeeper)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=OPEN_FILES,  # `Ingress` bounds them itself: Serve would count half-sent requests too
        ray_actor_options=_actor_options(args.ingress) | {"runtime_env": {"env_vars": ONE_EVENT_LOOP}},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=args.ingress.drain_s,
        logging_config=log,
        **HEALTH_CHECKS,
        **_replicas(args.ingress.replicas, scaling.get("ingress")),
    )(Ingress)
    return ingress.bind(
        generator,
        upscaler,
        housekeeper,
        requests_at_once=args.ingress.max_ongoing_requests,
        requests_waiting=args.ingress.max_queued_requests,
        max_rank=args.generator.engine.max_rank if args.generator else DEFAULT_MAX_RANK,
    )


def replica_logging(settings: Settings) -> LoggingConfig:
    """Serve's log of a replica, without a line for each request: that was a quarter of the handler's time.

    A YAML may have it back for one deployment, by `logging_config` under `deployments:`.
    """
    encoding = EncodingType.JSON if settings.log_format == "json" else EncodingType.TEXT
    return LoggingConfig(encoding=encoding, enable_access_log=False)


def _worker(deployment: type, args: WorkerArgs, scaling: Mapping[str, Autoscaling], log: LoggingConfig) -> Any:
    name = deployment.__name__.lower()
    return serve.deployment(
        name=name,
        max_ongoing_requests=HINTS_AT_ONCE,
        max_queued_requests=HINTS_AT_ONCE,
        ray_actor_options=_actor_options(args),
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=args.drain_s + STOP_MARGIN_S,
        logging_config=log,
        **HEALTH_CHECKS,
        **_replicas(args.replicas, scaling.get(name)),
    )(deployment)


def _actor_options(args: ReplicaArgs) -> dict[str, Any]:
    return {"num_cpus": args.num_cpus, "num_gpus": args.num_gpus, "resources": args.resources}


def _replicas(replicas: int | Literal["auto"], scaling: Autoscaling | None) -> dict[str, Any]:
    """Return Serve's options; `auto` without `scaling` gets defaults, which the YAML's `deployments:` override."""
    if scaling is None and replicas != "auto":
        return {"num_replicas": replicas}
    asked = {} if scaling is None else scaling.model_dump(exclude_none=True)
    return {"autoscaling_config": AutoscalingConfig(**asked)}
