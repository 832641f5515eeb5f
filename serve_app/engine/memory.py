"""A device's memory: how much of it adapters may fill, and what its lack looks like."""

import torch

CPU_ADAPTER_MEMORY = 2**30
NO_ROOM = "The device has no memory left for this image."
"""What a caller is told: torch's own words are about the machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises its own error on a GPU, and a RuntimeError that names the CPU allocator on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def spare_memory(device: torch.device) -> int:
    return CPU_ADAPTER_MEMORY if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
