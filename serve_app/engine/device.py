"""Chooses the device and the number type, finds memory for adapters, and recognizes its lack."""

from collections.abc import Iterable

import torch
from torch import nn

from serve_app.engine_options import EngineOptions


def torch_device(options: EngineOptions) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_dtype(options: EngineOptions) -> torch.dtype:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if torch_device(options).type == "cpu" else torch.bfloat16


CPU_ADAPTER_MEMORY = 2**30
OUT_OF_MEMORY_MESSAGE = "The device has no memory left for this image."
"""Callers are shown this text, since torch's own message describes the machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """Recognize torch's own error on a GPU, and a RuntimeError that names the CPU allocator on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def module_bytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the modules' weights and buffers, each tensor counted once."""
    tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def spare_memory(device: torch.device, *, base_models: int) -> int:
    """Return bytes for the adapter slots of one of `base_models` base models.

    On a GPU it is a third of what this process may still take: a slot store that grows lies beside the old one for a
    moment, and images need memory too.
    """
    if device.type == "cpu":
        return CPU_ADAPTER_MEMORY // base_models
    card = torch.cuda.device(device).idx  # some calls refuse a device without a number
    free, total = torch.cuda.mem_get_info(card)
    share = int(total * torch.cuda.get_per_process_memory_fraction(card)) - torch.cuda.memory_reserved(card)
    return min(free, share) // 3 // base_models
