"""Chooses the device and the number type, orders its work, finds memory for adapters, and recognizes its lack."""

import ctypes
import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.engine.gathered_rows import AddLora
from serve_app.engine_options import EngineOptions

log = logging.getLogger(__name__)


def torch_device(options: EngineOptions) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def torch_dtype(options: EngineOptions) -> torch.dtype:
    if options.dtype != "auto":
        return getattr(torch, options.dtype)
    return torch.float32 if torch_device(options).type == "cpu" else torch.bfloat16


def lora_kernel(options: EngineOptions) -> AddLora | None:
    """Return the kernel that adds adapters' changes to numbers of 16 bits, or None where torch's products do."""

    def load() -> Any:
        from serve_app.engine import lora_kernels  # it takes Triton, which is not everywhere

        return lora_kernels

    return None if torch_dtype(options) == torch.float32 else getattr(_tried(load, options), "add_lora", None)


def unet_kernels(options: EngineOptions) -> Any:
    """Return the module of a UNet's kernels, or None where torch's own operators do."""

    def load() -> Any:
        from serve_app.engine import unet_kernels

        return unet_kernels

    return _tried(load, options)


def float8_kernels(options: EngineOptions) -> Any:
    """Return the module of a kernel that turns numbers into float8, or None where torch's own operators do."""

    def load() -> Any:
        from serve_app.engine import float8_kernels

        return float8_kernels

    return _tried(load, options)


def _tried(load: Callable[[], Any], options: EngineOptions) -> Any:
    """Return a module of Triton kernels if they work here, or None. They are for NVIDIA GPUs since Ampere."""
    device, dtype = torch_device(options), torch_dtype(options)
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        kernels = load()
        kernels.check(device, dtype)
    except Exception:
        log.warning("torch's own operators are used: Triton kernels do not work here", exc_info=True)
        return None
    return kernels


def upload(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to the device at once; on a GPU nobody waits for it."""
    on_host = torch.from_numpy(numbers)
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


class DeviceQueues:
    """Streams of a GPU's work: steps come first, and all else fills what they leave idle.

    A CPU has none: what a thread computes is done when its call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._threads = threading.local()

    @property
    def any(self) -> bool:
        return self._steps is not None

    def steps(self) -> AbstractContextManager[object]:
        """Return a context whose work comes first."""
        return nullcontext() if self._steps is None else torch.cuda.stream(self._steps)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that is reached when all steps that have been queued so far are done."""
        if self._steps is None:
            return None
        reached = torch.cuda.Event()
        reached.record(self._steps)
        return reached

    @contextmanager
    def beside(self, after: torch.cuda.Event | None = None) -> Generator[None]:
        """Queue the context's work on the calling thread's own stream, behind `after`; leave when it is done."""
        if self._steps is None:
            yield
            return
        if not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self._device, priority=0)
        stream: torch.cuda.Stream = self._threads.stream
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def hand_over(self, tensors: Iterable[Tensor]) -> None:
        """Keep memory of another stream from being reused while steps that read these tensors are queued."""
        for tensor in tensors:
            if self._steps is not None and tensor.is_cuda:
                tensor.record_stream(self._steps)

    def settle(self) -> None:
        """Wait until the device has done all that it was given, on any stream."""
        if self._steps is not None:
            torch.cuda.synchronize(self._device)


FREED_MEMORY = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""The options' numbers in mallopt(3)."""


def reuse_freed_memory() -> None:
    """Let this process keep up to `FREED_MEMORY` bytes that its tensors freed, where its C library is glibc.

    glibc gives large blocks back to the system at once. Each tensor of the next pass is then new memory, whose page
    faults took a tenth of a pass of the bundled model's 16 rows at 256² (7,000 faults, measured).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, FREED_MEMORY)
        mallopt(_M_MMAP_THRESHOLD, FREED_MEMORY)


CPU_ADAPTER_MEMORY, SPARE_PART = 2**30, 3
OUT_OF_MEMORY_MESSAGE = "The device has no memory left for this image."
"""Callers are shown this text, since torch's own message describes the machine."""


def is_out_of_memory(error: BaseException) -> bool:
    """Recognize torch's own error on a GPU, and a RuntimeError that names the CPU allocator on a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def module_bytes(modules: Iterable[nn.Module], device: torch.device) -> int:
    """Return the bytes of the modules' weights and buffers on the kind of a device, each tensor counted once."""
    tensors = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.device.type == device.type)


def spare_memory(device: torch.device, *, base_models: int) -> int:
    """Return bytes for the adapters of one of `base_models` base models, in slots and in the rows of batches.

    On a GPU it is a third of what this process may still take: images and graphs need memory too.
    """
    if device.type == "cpu":
        return CPU_ADAPTER_MEMORY // base_models
    return free_memory(device) // SPARE_PART // base_models


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take of a device's memory."""
    if device.type == "cpu":
        return free_host_memory()
    free, _ = torch.get_device_module(device).mem_get_info(device)
    if device.type != "cuda":
        return free
    return min(free, memory_limit(device) - torch.cuda.memory_reserved(_with_number(device)))


def memory_limit(device: torch.device) -> int:
    """Return the bytes of a card that this process may take in all, whatever others have taken."""
    _, total = torch.get_device_module(device).mem_get_info(device)
    if device.type != "cuda":
        return total
    return int(total * torch.cuda.get_per_process_memory_fraction(_with_number(device)))


def _with_number(device: torch.device) -> int:
    """Return a card's number, as some calls refuse a device without one."""
    return torch.cuda.device(device).idx


def free_host_memory(*, processes: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the machine, or the container's limit, has left; files that were read need not stay."""
    lines = (line.split() for line in (processes / "meminfo").read_text().splitlines())
    free = next(int(kibibytes) << 10 for name, kibibytes, *_ in lines if name == "MemAvailable:")
    with suppress(OSError, ValueError):  # there is no limit of a cgroup, or it is `max`, which is no number
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        uses = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(uses["inactive_file"]) + int(uses["active_file"]))
    return free
