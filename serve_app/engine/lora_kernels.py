"""Adds every row's low-rank change to a linear layer's output in one launch, reading the adapters in their slots.

A program computes some positions of one row in tiles of a fixed size, over the rank of that row's own slot, which it
reads on the device. So a row keeps its bits at any row count, at any place and beside any other rank; over how many
programs the outputs are spread changes no sum.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton takes annotations of its own alone.

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from serve_app.engine.adapter_slots import AdapterSlots, AddLora, ModuleWeights
from serve_app.engine.adapter_store import LINE_BYTES, AdapterStore
from serve_app.engine.lora_layers import wrap_layers

POSITIONS, OUTPUTS = 64, 128
"""The sides of a tile of the output: the fastest of four choices, each with four or eight warps, for four of five
layers of SDXL (H200, rank 32). A tile of the inputs that are summed at once is 128 bytes wide."""
PROGRAMS = 256
"""Outputs are spread over up to this many programs: about two for each multiprocessor of an H100."""


@torch.library.custom_op("atelier::add_lora", mutates_args=("y",))
def add_lora(
    numbers: Tensor, starts: Tensor, ranks: Tensor, unscaled: Tensor, rows: Tensor, layer: int, y: Tensor, x: Tensor
) -> None:
    """Add scale·(x·downᵀ)·up of each row's own adapter to `y` in place; a row without one keeps its bits.

    y is [rows, positions, out], x [rows, positions, in]. The tables are those of `AdapterSlots`, one row for each slot;
    `rows` is [2, rows or more] int32: each row's slot, and the bits of its float32 scale. Sums are in float32 and are
    rounded once, above rank 128 twice.

    As an operator of torch's it is known to fake tensors, and to whoever counts launches.
    """
    count, positions, fan_out = y.shape
    tiles = -(-positions // POSITIONS)
    spread = min(-(-fan_out // OUTPUTS), max(1, PROGRAMS // (tiles * count)))
    with torch.cuda.device_of(y):  # Triton launches on the thread's own device
        _kernel[(tiles, count, spread)](
            y, x.contiguous(), numbers, starts, ranks, unscaled, rows, rows.view(torch.float32),
            layer, ranks.shape[1], starts.stride(0), ranks.stride(0), rows.shape[1], positions, x.shape[2], fan_out,
            LINE=LINE_BYTES // y.element_size(), BM=POSITIONS, BK=128 // y.element_size(), BN=OUTPUTS,
            num_warps=4,  # pyright: ignore[reportCallIssue]  an option of the launch
        )  # fmt: skip


@add_lora.register_fake
def _(*_: object) -> None:
    """Fake tensors have nothing to add."""


CHECKED_RANKS = (0, 8, 24, 40, 128)
"""Rank 0 is no adapter; the kernel computes each of the other ranks in another way."""


@torch.inference_mode()
def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch's products. Raises RuntimeError where they differ, and whatever a launch raises."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    base = nn.Linear(96, 80).to(device, dtype)
    x = noise(len(CHECKED_RANKS), 70, 96).to(device, dtype)
    adapters = [{"0": ModuleWeights(noise(rank, 96) / 10, noise(80, rank) / 10, 1.0)} for rank in CHECKED_RANKS[1:]]

    def computed(kernel: AddLora | None) -> Tensor:
        net = nn.Sequential(base)
        slots = AdapterSlots(
            [wrap_layers(net)], len(CHECKED_RANKS), AdapterStore(device, dtype, 2**20), add_lora=kernel
        )
        for slot, weights in enumerate(adapters, 1):
            row = slots.pack(weights)
            slots.set(slot, row, slots.store.take(len(row.lines)) or 0)
        slots.bind(range(len(CHECKED_RANKS)), [0.75] * len(CHECKED_RANKS))
        return net(x)

    expected, answer = computed(None), computed(add_lora)
    if not torch.allclose(answer, expected, rtol=0.02, atol=0.05):
        raise RuntimeError(f"the LoRA kernel is off by up to {(answer - expected).abs().max().item():.3g}")


@triton.jit(do_not_specialize=["layer", "layers", "starts_stride", "ranks_stride", "capacity", "positions"])
def _kernel(
    y, x, numbers, starts, ranks, unscaled, slots, scales,
    layer, layers, starts_stride, ranks_stride, capacity, positions, fan_in, fan_out,
    LINE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    scale = tl.load(scales + capacity + row)
    rank = tl.load(ranks + slot * ranks_stride + layer)
    scale = tl.where((tl.load(unscaled + slot * ranks_stride + layer) != 0) & (scale != 0), 1.0, scale)
    part = starts + slot * starts_stride + layer
    down = tl.multiple_of(numbers + tl.load(part).to(tl.int64) * LINE, 16)
    up = tl.multiple_of(numbers + tl.load(part + layers).to(tl.int64) * LINE, 16)
    y += row.to(tl.int64) * positions * fan_out
    x += row.to(tl.int64) * positions * fan_in
    if rank > 64:
        _add_row(y, x, down, up, rank, scale, positions, fan_in, fan_out, BM, BK, BN // 2, 128)  # to fit shared memory
    elif rank > 32:
        _add_row(y, x, down, up, rank, scale, positions, fan_in, fan_out, BM, BK, BN, 64)
    elif rank > 16:
        _add_row(y, x, down, up, rank, scale, positions, fan_in, fan_out, BM, BK, BN, 32)
    elif rank > 0:
        _add_row(y, x, down, up, rank, scale, positions, fan_in, fan_out, BM, BK, BN, 16)


@triton.jit
def _add_row(
    y, x, down, up, rank, scale, positions, fan_in, fan_out,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    for first_rank in range(0, rank, BR):
        r = first_rank + tl.arange(0, BR)
        shrunk = tl.full((BM, BR), 0.0, tl.float32)
        for first_in in range(0, fan_in, BK):
            k = first_in + tl.arange(0, BK)
            inputs = tl.load(x + m * fan_in + k[None, :], mask=(m < positions) & (k[None, :] < fan_in), other=0.0)
            turned = (r[None, :] < rank) & (k[:, None] < fan_in)
            matrix = tl.load(down + r[None, :] * fan_in + k[:, None], mask=turned, other=0.0)
            shrunk = tl.dot(inputs, matrix, shrunk)
        low = shrunk.to(x.dtype.element_ty)
        for first_out in range(tl.program_id(2) * BN, fan_out, tl.num_programs(2) * BN):
            n = first_out + tl.arange(0, BN)[None, :]
            matrix = tl.load(up + r[:, None] * fan_out + n, mask=(r[:, None] < rank) & (n < fan_out), other=0.0)
            change = tl.dot(low, matrix) * scale
            inside = (m < positions) & (n < fan_out)
            before = tl.load(y + m * fan_out + n, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + m * fan_out + n, (before + change).to(y.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # above rank 128 a thread may next read what another wrote
