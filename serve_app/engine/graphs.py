"""Replays the denoiser's forward pass as one CUDA graph for each shape and row count; what cannot be captured is eager.

Where there is no GPU, `tests/engine/test_graphs.py` drives it by a recorder of torch's operators.

A graph repeats the launches of one pass at the addresses of that pass, and no Python. So a pass takes its inputs from
buffers that stay, and reads adapters where they were bound: a graph serves passes of its own key (`AdapterSlots.key`).
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.engine.families.family import Family
from serve_app.engine.run import Conditioning

log = logging.getLogger(__name__)

MAX_GRAPHS = 32
"""How many graphs are held. They go all together: they share memory, and with the first of them torch drops the cuBLAS
workspace of their stream, which all use (pytorch issue 193402)."""

Forward = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""Latents [rows, …], timesteps [rows] and conditioning → the denoiser's output; see `Family.denoise`."""


class Capture(NamedTuple):
    """A captured pass."""

    replay: Callable[[], None]
    output: Tensor


class GraphDevice(Protocol):
    """Captures passes on a device; `CudaGraphs`, and the tests' recorder."""

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        """Do the work as a capture will see it, so that kernels are loaded and libraries have their memory."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> Capture:
        """Record the work without doing it. Raises RuntimeError where it cannot be recorded or memory is short."""
        ...

    def release(self) -> None:
        """Wait for the last replay, and forget every capture: new ones are made when they are needed."""
        ...


class StepGraphs:
    """Computes forward passes of one base model. Only the step thread may use it."""

    def __init__(self, forward: Forward, slots: AdapterSlots, device: GraphDevice, *, max_rows: int) -> None:
        self._forward = forward
        self._slots = slots
        self._device = device
        self._max_rows = max_rows
        self._captures: dict[Hashable, Capture] = {}
        self._uncaptured: set[Hashable] = set()
        self._buffers: dict[Hashable, Tensor] = {}
        self._filled: Conditioning | None = None
        """The conditioning that was last copied into the buffers: a batch keeps its own from pass to pass."""

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """Return the pass's output, by a graph from the second pass of its kind on. The next pass may overwrite it."""
        inputs = {"latents": latents, "timesteps": timesteps, "context": conditioning.context, **conditioning.added}
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        bound = self._slots.key()
        if bound is None or shapes in self._uncaptured:
            return self._forward(latents, timesteps, conditioning)
        key = shapes, bound
        if key not in self._captures and len(self._captures) >= MAX_GRAPHS:
            self.clear()
        rows = self._fill(inputs, conditioning)
        if key in self._captures:
            replay, output = self._captures[key]
            replay()
            return output

        def work() -> Tensor:
            added = {name: rows[name] for name in conditioning.added}
            return self._forward(rows["latents"], rows["timesteps"], Conditioning(rows["context"], added))

        output = self._device.warm_up(work)
        try:
            self._captures[key] = self._device.capture(work)
        except RuntimeError:  # torch's errors of CUDA and of memory are all of this type
            log.warning("a pass of %d rows stays eager: its CUDA graph cannot be captured", len(latents), exc_info=True)
            self._uncaptured.add(shapes)
            self.clear()
        return output

    def clear(self) -> None:
        """Drop all graphs, which gives their memory back. Passes that could not be captured stay eager."""
        self._device.release()
        self._captures.clear()
        self._buffers.clear()
        self._filled = None

    def _fill(self, inputs: Mapping[str, Tensor], conditioning: Conditioning) -> dict[str, Tensor]:
        """Copy inputs to where graphs read them: the first rows of buffers, which all row counts share."""
        rows: dict[str, Tensor] = {}
        for name, tensor in inputs.items():
            key = name, tensor.shape[1:], tensor.dtype
            if key not in self._buffers:
                self._buffers[key] = tensor.new_zeros(self._max_rows, *tensor.shape[1:])
            rows[name] = self._buffers[key][: len(tensor)]
            if name in ("latents", "timesteps") or conditioning is not self._filled:
                rows[name].copy_(tensor)
        self._filled = conditioning
        return rows


def step_graphs(family: Family, slots: AdapterSlots, *, max_rows: int) -> StepGraphs | None:
    """Return graphs of the family's passes on an NVIDIA GPU; elsewhere None, and passes are eager."""
    if family.device.type != "cuda" or torch.version.hip:
        return None
    return StepGraphs(family.denoise, slots, CudaGraphs(family.device), max_rows=max_rows)


class CudaGraphs:
    """Captures on a stream of its own, while other threads decode and load adapters on theirs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # as steps have: a graph keeps the priority
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = work()
        current.wait_stream(self._stream)
        return output

    def capture(self, work: Callable[[], Tensor]) -> Capture:
        graph = torch.cuda.CUDAGraph()
        # The first context leaves the stream again where ending the capture raises, which torch's own does not. Other
        # threads may allocate and wait meanwhile: only the mode `thread_local` does not fail the capture for it.
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            output = work()
        return Capture(graph.replay, output)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)  # the last replay may still run
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses a pool whose graphs are all gone
