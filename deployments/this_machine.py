"""Whether the replicas of a configuration find a place on this machine, for `atelier up`: asked before anything starts."""

from importlib import import_module
from pathlib import Path
from typing import Any

from deployments.args import AppArgs
from deployments.config import ConfigError, ServeConfig, demands
from deployments.pools import Pool, ReplicaDemand, shortfalls
from deployments.shared_settings import require_shared
from serve_app.settings import Settings

GPU_HELP = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or start configs/local.yaml, which needs no GPU"


def check_this_machine(config: Path, service: ServeConfig, settings: Settings) -> None:
    """Raises `ConfigError` for replicas that would wait in vain, and for settings of a cluster that are missing."""
    try:
        require_shared(settings, spread=service.proxy_location == "EveryNode")
    except RuntimeError as error:
        raise ConfigError(f"{config}: {error}") from None
    asks_for_gpus = any(demand.gpus for demand in demands(service.args))
    gpus = gpus_here() if asks_for_gpus else 0  # Ray is imported for nothing else yet
    if missing := missing_here(service.args, gpus=gpus):
        raise ConfigError(f"{config}: {missing}")


def gpus_here() -> int:
    """How many GPUs Ray would find on this machine."""
    accelerators: Any = import_module("ray._private.accelerators")
    manager = accelerators.get_accelerator_manager_for_resource("GPU")
    visible: list[str] | None = manager.get_current_process_visible_accelerator_ids()
    found: int = manager.get_current_node_num_accelerators()
    return found if visible is None else min(found, len(visible))


def missing_here(args: AppArgs, *, gpus: int) -> str | None:
    """What this machine lacks for the replicas at their largest number; None when they all fit."""
    asked = demands(args)
    if not shortfalls(asked, [Pool(name="this machine", nodes=1, gpus=gpus)]):
        return None
    for_cluster = sorted({name for demand in asked for name in demand.resources})
    if for_cluster:
        return f"the resources {', '.join(for_cluster)} are a cluster's: start it with `serve deploy`"
    wanted = ", ".join(f"{demand.deployment} {_gpus(demand)}" for demand in asked if demand.gpus)
    return f"GPUs are asked for ({wanted}), and Ray finds {gpus or 'none'} on this machine: {GPU_HELP}"


def _gpus(demand: ReplicaDemand) -> str:
    return f"{demand.gpus:g}" if demand.replicas == 1 else f"{demand.replicas} × {demand.gpus:g}"
