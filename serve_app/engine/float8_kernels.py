"""A kernel that turns tokens into float8 in one pass over them, where torch's operators take four.

A program reads one token, so a row keeps its bits in any company.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton takes annotations of its own alone.

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST, LEAST_SCALE = tl.constexpr(448.0), tl.constexpr(1e-12 / 448.0)


@torch.library.custom_op("atelier::quantize", mutates_args=())
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `float8.quantized` does."""
    tokens, width = x.shape
    x = x.contiguous()
    codes = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the thread's own device
        _quantize[(tokens,)](x, codes, scales, width, BLOCK=triton.next_power_of_2(width))
    return codes, scales


@quantize.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@torch.inference_mode()
def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch. Raises RuntimeError where they differ, and whatever a launch raises."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    codes, scales = quantize(x)
    away = codes.float() * scales - x.float()
    if (
        away.norm() > 0.1 * x.float().norm()
    ):  # 0.03 by its 3 bits, and 0.07 in Triton's interpreter, which loses carries
        raise RuntimeError(f"the kernel of float8 is off by up to {away.abs().max().item():.3g}")


@triton.jit
def _quantize(x, codes, scales, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)  # a large batch has over 2³¹ numbers
    i = tl.arange(0, BLOCK)
    numbers = tl.load(x + token * width + i, mask=i < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0) / LARGEST, LEAST_SCALE)
    tl.store(scales + token, scale)
    tl.store(codes + token * width + i, (numbers / scale).to(tl.float8e4nv), mask=i < width)
