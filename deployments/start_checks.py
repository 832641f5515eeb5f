"""Checks before Serve starts a replica that a start can succeed, and chooses the configuration of `atelier up`."""

import ctypes
import logging
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from deployments.config import ConfigError, ServeConfig
from deployments.nodes import check_nodes, living_nodes, node_pool
from deployments.pools import Pool, ReplicaDemand, fits_alone, shortfalls
from deployments.requirements import require_shared
from serve_app.domain.catalog import BaseModel
from serve_app.loras.catalog_file import CatalogError, read_catalog
from serve_app.operations.checks import Level
from serve_app.operations.store_checks import check_base_model
from serve_app.settings import ROOT, Settings
from serve_app.store.redis_inspection import require_durable

GPU_HELP = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or start configs/local.yaml, which needs no GPU"
CPU_CONFIG, GPU_CONFIG = ROOT / "configs" / "local.yaml", ROOT / "configs" / "one_gpu.yaml"
NVML = "libnvidia-ml.so.1"
COUNT_LIMIT_S = 60.0
_COUNT_GPUS = """
from ray._private.accelerators import get_accelerator_manager_for_resource
manager = get_accelerator_manager_for_resource("GPU")
visible, found = manager.get_current_process_visible_accelerator_ids(), manager.get_current_node_num_accelerators()
print(found if visible is None else min(found, len(visible)))
"""


def check_this_machine(config: Path, service: ServeConfig, settings: Settings) -> None:
    """Raises `ConfigError` for replicas without a place, models that are not there, and missing settings of a cluster."""
    try:
        require_shared(settings, spread=service.proxy_location == "EveryNode")
    except RuntimeError as error:
        raise ConfigError(f"{config}: {error}") from None
    gpus = gpus_here() if any(demand.gpus for demand in service.demands) else 0
    if missing := missing_on(service.demands, [Pool(name="this machine", nodes=1, gpus=gpus)]):
        raise ConfigError(f"{config}: {missing}")
    weights = service.args.upscaler.weights
    if weights and not any((ROOT / weights).glob("*.safetensors")):
        raise ConfigError(f"{config}: args.upscaler.weights: no *.safetensors in {ROOT / weights}: put them there")
    check_base_models(settings)
    groups = {model.group for model in _base_models(settings)}
    if groups and (empty := service.served_groups - groups):
        lacking = ", ".join(sorted(empty))
        raise ConfigError(f"{config}: {settings.catalog} has no base model for the generators of the group {lacking}")


def unserved_groups(service: ServeConfig, settings: Settings) -> str:
    """Name the base models whose group has no generators, with the group; empty where there are none, or no catalog."""
    lost = (model for model in _base_models(settings) if model.group not in service.served_groups)
    return ", ".join(f"{model.id} ({model.group})" for model in lost)


def _base_models(settings: Settings) -> Sequence[BaseModel]:
    try:
        return list(read_catalog(settings.catalog).base_models.values())
    except CatalogError:
        return []


def check_base_models(settings: Settings) -> None:
    """Raises `ConfigError` for a base model whose files are not there: a replica would find out after a minute."""
    if not settings.catalog.is_file():
        raise ConfigError(f"ATELIER_CATALOG: {settings.catalog} is not a file")
    # Where the file cannot be read, what was applied at an earlier start is served, or the start ends there.
    if found := [check for model in _base_models(settings) for check in check_base_model(model)]:
        raise ConfigError(f"{settings.catalog}: base model {'; '.join(f'{one.found}: {one.advice}' for one in found)}")


def config_for_this_machine() -> tuple[Path, str]:
    """The file that suits this machine, and what to say about it."""
    return chosen_config(gpus_here() if has_gpu_driver() else 0, version("torch"))


def chosen_config(gpus: int, torch: str) -> tuple[Path, str]:
    """Choose the file when none is named, and say which GPUs were found; nothing without one."""
    if not gpus:
        return CPU_CONFIG, ""
    found = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    if "+cpu" in torch:
        return CPU_CONFIG, f"Found {found}, but torch {torch} is built without CUDA: starting configs/{CPU_CONFIG.name}"
    use = "it" if gpus == 1 else "the first; --config names a file for more"
    return GPU_CONFIG, f"Found {found}: the generator and the upscaler share {use} (configs/{GPU_CONFIG.name})"


def gpus_here() -> int:
    """Count the GPUs that Ray would find here, in a process of its own: Ray reads its environment when imported."""
    done = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, timeout=COUNT_LIMIT_S)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def has_gpu_driver() -> bool:
    """Whether there is NVIDIA's library for management or AMD's device, so that asking Ray is worth its second."""
    try:
        ctypes.CDLL(NVML)
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def missing_on(asked: Sequence[ReplicaDemand], pools: Sequence[Pool]) -> str | None:
    """What this machine's nodes lack for the replicas at their largest number; None when they all fit."""
    found = shortfalls(asked, pools)
    if not found:
        return None
    declared = {name for pool in pools for name in pool.resources}
    for_cluster = sorted({name for demand in asked for name in demand.resources} - declared)
    if for_cluster:
        return f"the resources {', '.join(for_cluster)} are a cluster's: start it with `serve deploy`"
    gpus = sum(pool.gpus * pool.nodes for pool in pools)
    wanted = ", ".join(f"{demand.deployment} {_gpus(demand)}" for demand in asked if demand.gpus)
    if not any(demand.gpus for demand in asked if demand.deployment in {short.deployment for short in found}):
        return "; ".join(map(str, found))
    return f"GPUs are asked for ({wanted}), and Ray finds {gpus or 'none'} on this machine: {GPU_HELP}"


def _gpus(demand: ReplicaDemand) -> str:
    return f"{demand.gpus:g}" if demand.replicas == 1 else f"{demand.replicas} × {demand.gpus:g}"


log = logging.getLogger("ray.serve")


def check_start(asked: list[ReplicaDemand], settings: Settings, *, spread: bool) -> None:
    """Raises `RuntimeError` that names what the nodes lack, or what differs between them.

    On one machine every replica must find a place now. On several, nodes may still join: what finds none is logged.
    """
    import ray

    require_shared(settings, spread=spread, secrets=())  # nodes that run replicas are asked for secrets
    if settings.redis_url:
        require_durable(settings.redis_url, may_lose_jobs=settings.redis_may_lose_jobs)
    if not ray.is_initialized():
        return
    if spread:
        _require_alike(asked)
        _log_unplaced(asked)
    elif missing := missing_on(asked, [node_pool(node) for node in ray.nodes() if node["Alive"]]):
        raise RuntimeError(missing)


def _require_alike(asked: list[ReplicaDemand]) -> None:
    checks = check_nodes(living_nodes(asked), spread=True)
    if found := "; ".join(f"{check.name}: {check.found}" for check in checks if check.level is Level.FAIL):
        raise RuntimeError(f"the nodes of the cluster are not alike: {found} (atelier doctor --cluster)")


def _log_unplaced(asked: list[ReplicaDemand]) -> None:
    import ray

    pools = [node_pool(node) for node in ray.nodes() if node["Alive"]]
    for demand in asked:
        if not any(fits_alone(demand, pool) for pool in pools):
            log.warning("%s: no node has space for a replica yet", demand.deployment)
