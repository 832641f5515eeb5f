"""Kernels for what torch does slowly where channels stay last in memory: group norm with SiLU, and GEGLU's product.

torch's group norm copies its input to channels first, and a convolution copies the answer back; its product of two
halves of a tensor takes a path without wide loads. On an H200 both together were a quarter of a pass of SDXL.

A program sums pixels of one row, in an order that the image's size alone decides, so a row keeps its bits at any row
count.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton takes annotations of its own alone, and plain numbers for its constants.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PIXELS, CHANNELS = 128, 64
"""The sides of a program's tile."""
PARTS = 1024
"""How many partial results are joined at once."""
NUMBERS = 1024
"""How many products a program of GEGLU computes."""


@torch.library.custom_op("atelier::group_norm", mutates_args=())
def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool) -> Tensor:
    """Return the group norm of x [rows, channels, …], whose channels lie last in memory, and its SiLU where asked.

    Sums are in float32: each channel's mean and squared distances from it over `PIXELS` pixels, then joined as Chan et
    al. 1979 do.
    """
    rows, channels = x.shape[:2]
    pixels = x[0, 0].numel()
    tiles = triton.cdiv(pixels, PIXELS)
    grid = tiles, triton.cdiv(channels, CHANNELS), rows
    parts = torch.empty(2, rows, tiles, channels, dtype=torch.float32, device=x.device)
    statistics = torch.empty(2, rows, groups, dtype=torch.float32, device=x.device)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):  # Triton launches on the thread's own device
        _sum_tiles[grid](x, *parts, pixels, channels, BP=PIXELS, BC=CHANNELS)
        _join_tiles[groups, rows](*parts, *statistics, pixels, channels, tiles, channels // groups, eps, PIXELS, PARTS)
        _normalize[grid](
            x, y, weight, bias, *statistics, pixels, channels, channels // groups,
            SILU=silu, BP=PIXELS, BC=CHANNELS,
        )  # fmt: skip
    return y


@group_norm.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("atelier::geglu", mutates_args=())
def geglu(x: Tensor) -> Tensor:
    """Return the first half of x [..., 2 · width] times the GELU of the second (Shazeer 2020)."""
    width = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    with torch.cuda.device_of(x):
        _multiply[x.numel() // x.shape[-1], triton.cdiv(width, NUMBERS)](x, y, width, NUMBERS)
    return y


@geglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.inference_mode()
def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernels with torch. Raises RuntimeError where they differ, and whatever a launch raises."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    image, weight, bias = noise(2, 96, 13, 11).contiguous(memory_format=torch.channels_last), noise(96), noise(96)
    pairs = noise(2, 3, 140)
    value, gate = pairs.chunk(2, -1)
    for name, answer, expected in (
        ("group norm", group_norm(image, weight, bias, 32, 1e-5, True), F.silu(F.group_norm(image, 32, weight, bias))),
        ("GEGLU", geglu(pairs), value * F.gelu(gate)),
    ):
        if not torch.allclose(answer, expected, rtol=0.02, atol=0.05):
            raise RuntimeError(f"the kernel of {name} is off by up to {(answer - expected).abs().max().item():.3g}")


@triton.jit
def _sum_tiles(x, means, squares, pixels, channels, BP: tl.constexpr, BC: tl.constexpr):
    p = (tl.program_id(0) * BP + tl.arange(0, BP)[:, None]).to(tl.int64)  # a large image has over 2³¹ numbers
    c = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (p < pixels) & (c < channels)
    x += tl.program_id(2).to(tl.int64) * pixels * channels
    numbers = tl.load(x + p * channels + c, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(pixels - tl.program_id(0) * BP, BP)
    mean = tl.sum(numbers, 0) / count
    away = tl.where(inside, numbers - mean[None, :], 0.0)
    at = (
        (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * channels + tl.program_id(1) * BC + tl.arange(0, BC)
    )
    is_channel = tl.program_id(1) * BC + tl.arange(0, BC) < channels
    tl.store(means + at, mean, mask=is_channel)
    tl.store(squares + at, tl.sum(away * away, 0), mask=is_channel)


@triton.jit
def _join_tiles(
    means, squares, out_means, out_scales, pixels, channels, tiles, width, eps, BP: tl.constexpr, PARTS: tl.constexpr
):
    first = tl.program_id(1) * tiles * channels + tl.program_id(0) * width
    total = tl.full((PARTS,), 0.0, tl.float32)
    for start in range(0, tiles * width, PARTS):
        i = start + tl.arange(0, PARTS)
        tile, inside = i // width, i < tiles * width
        count = tl.minimum(pixels - tile * BP, BP).to(tl.float32)
        mean = tl.load(means + first + tile * channels + i % width, mask=inside, other=0.0)
        total += tl.where(inside, mean * count, 0.0)
    mean = tl.sum(total, 0) / (pixels * width)
    square = tl.full((PARTS,), 0.0, tl.float32)
    for start in range(0, tiles * width, PARTS):
        i = start + tl.arange(0, PARTS)
        tile, inside = i // width, i < tiles * width
        count = tl.minimum(pixels - tile * BP, BP).to(tl.float32)
        at = first + tile * channels + i % width
        away = tl.load(means + at, mask=inside, other=0.0) - mean
        square += tl.where(inside, tl.load(squares + at, mask=inside, other=0.0) + away * away * count, 0.0)
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_means + at, mean)
    tl.store(out_scales + at, tl.rsqrt(tl.sum(square, 0) / (pixels * width) + eps))


@triton.jit
def _normalize(
    x, y, weight, bias, means, scales, pixels, channels, width,
    SILU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    p = (tl.program_id(0) * BP + tl.arange(0, BP)[:, None]).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    is_channel = c < channels
    group = tl.program_id(2) * (channels // width) + c // width
    factor = tl.load(scales + group, mask=is_channel, other=0.0) * tl.load(weight + c, mask=is_channel, other=0.0)
    mean = tl.load(means + group, mask=is_channel, other=0.0)
    offset = tl.load(bias + c, mask=is_channel, other=0.0)
    at = tl.program_id(2).to(tl.int64) * pixels * channels + p * channels + c[None, :]
    inside = (p < pixels) & is_channel[None, :]
    numbers = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]) * factor[None, :] + offset[
        None, :
    ]
    if SILU:
        numbers = numbers / (1 + tl.exp(-numbers))
    tl.store(y + at, numbers.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(x, y, width, NUMBERS: tl.constexpr):
    i = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
    gelu = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    tl.store(y + row * width + i, (value * gelu).to(y.dtype.element_ty), mask=i < width)
