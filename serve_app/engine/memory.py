"""A device's memory: how much of it adapters may fill, and what its lack looks like."""

import torch

CPU_ADAPTER_MEMORY = 2**30
NO_ROOM = "The device has no memory left for this image."
"""What a caller is told: torch's own words are about the machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """torch raises its own error on a GPU, and a RuntimeError that names the CPU allocator on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def spare_memory(device: torch.device, *, base_models: int) -> int:
    """Bytes for the adapter slots of one of so many base models. A third of what a GPU leaves this process, since a bank that
    is widened lies beside the old one for a moment, and images need room too."""
    if device.type == "cpu":
        return CPU_ADAPTER_MEMORY // base_models
    card = torch.cuda.device(device).idx  # also of a device without a number, which some calls refuse
    free, total = torch.cuda.mem_get_info(card)
    share = int(total * torch.cuda.get_per_process_memory_fraction(card)) - torch.cuda.memory_reserved(card)
    return min(free, share) // 3 // base_models
