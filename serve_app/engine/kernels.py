"""Tries the engine's own Triton kernels before they are used, and tells which run and what a fallback costs."""

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.gathered_rows import AddLora
from serve_app.engine_options import EngineOptions

log = logging.getLogger(__name__)

FALLBACKS: Mapping[str, str] = {
    "lora": "torch's products add LoRAs, which makes a step of SDXL about 1.1 times as long (estimated)",
    "unet": "torch's group norm and GEGLU make a step of SDXL 1.2 times as long (329 ms for 275 on an H200)",
    "transformer": "torch turns queries and keys in four passes, 3 ms more for each row of klein at 1024² (estimated)",
    "float8": "torch's operators read what is rounded to float8 four times, which costs more than it gains (estimated)",
}
"""What it costs that a kernel does not run, by the kernel's name: benchmarks/RESULTS.md has the figures."""

_outcomes: dict[str, str] = {}
"""Why each kernel that this process tried does not run; empty where it does."""


def lora_kernel(options: EngineOptions) -> AddLora | None:
    """Return the kernel that adds adapters' changes to numbers of 16 bits, or None where torch's products do."""
    return None if torch_dtype(options) == torch.float32 else getattr(_tried("lora", options), "add_lora", None)


def unet_kernels(options: EngineOptions) -> Any:
    """Return the module of a UNet's kernels, or None where torch's own operators do."""
    return _tried("unet", options)


def transformer_kernels(options: EngineOptions) -> Any:
    """Return the module of a transformer's kernel, or None where torch's own operators do."""
    return _tried("transformer", options)


def float8_kernels(options: EngineOptions) -> Any:
    """Return the module of a kernel that turns numbers into float8, or None where torch's own operators do."""
    return _tried("float8", options)


def _tried(name: str, options: EngineOptions) -> Any:
    """Return a module of Triton kernels if they work here, or None. They are for NVIDIA GPUs since Ampere."""
    device, dtype = torch_device(options), torch_dtype(options)
    if device.type != "cuda":
        return None
    try:
        from serve_app.engine import triton_module  # it takes Triton, which is not everywhere

        triton_module.find_module()
        if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
            raise RuntimeError("it is for NVIDIA cards since Ampere")
        kernels = importlib.import_module(f"serve_app.engine.{name}_kernels")
        kernels.check(device, dtype)
    except Exception as error:
        log.debug("the kernel %s does not work here", name, exc_info=True)
        _outcomes[name] = next(iter(str(error).splitlines()), type(error).__name__)
        return None
    _outcomes.setdefault(name, "")
    return kernels


def kernel_outcomes() -> Mapping[str, str]:
    """Return why each kernel that was tried in this process does not run, by its name; empty where it runs."""
    return dict(_outcomes)


def told() -> str:
    """Say in one line which kernels run, and where one does not, why and what its fallback costs."""
    running = [name for name, why in _outcomes.items() if not why]
    missing = [f"{name} does not ({why}): {FALLBACKS[name]}" for name, why in _outcomes.items() if why]
    return "; ".join((f"kernels that run: {', '.join(running) or 'none'}", *missing))


def log_kernels() -> None:
    """Log which kernels run, if any was tried."""
    if _outcomes:
        log.log(logging.WARNING if any(_outcomes.values()) else logging.INFO, "%s", told())


def main() -> None:
    """Try every kernel on this machine's card and print what is told of them; exit with 1 where one falls back."""
    options = EngineOptions(device="cuda", dtype="bfloat16")
    lora_kernel(options)
    unet_kernels(options)
    transformer_kernels(options)
    print(told())  # noqa: T201
    sys.exit(any(_outcomes.values()))
