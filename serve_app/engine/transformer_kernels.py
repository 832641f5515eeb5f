"""A kernel for what torch does to queries and keys in four passes over them: their norm, and the turn by their places.

A program computes one token of one row, so a row keeps its bits in any company.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton takes annotations of its own alone, and plain numbers for its constants.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("atelier::turn", mutates_args=())
def turn(x: Tensor, weight: Tensor, rope: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of each head of x [rows, tokens, heads, width], its pairs turned in float32.

    Heads lie side by side. `rope` [1 or rows, tokens, 1, half of the width] holds complex numbers, as `dit.turned`
    takes them. What is normalized is rounded before it is turned, as torch's operators do.
    """
    rows, tokens, heads, width = x.shape
    if x.stride()[2:] != (width, 1):
        x = x.contiguous()
    numbers = torch.view_as_real(rope)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the thread's own device
        _turn[tokens, rows](
            x, weight, numbers, y, x.stride(0), x.stride(1), 0 if len(rope) == 1 else numbers.stride(0), heads, width, eps,
            HEADS=triton.next_power_of_2(heads), PAIRS=triton.next_power_of_2(width // 2),
        )  # fmt: skip
    return y


@turn.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


@torch.inference_mode()
def check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with torch. Raises RuntimeError where they differ, and whatever a launch raises."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, weight = noise(2, 7, 3 * 80).to(device, dtype)[..., :160].unflatten(2, (2, 80)), noise(80).to(device, dtype)
    rope = torch.complex(noise(2, 7, 1, 40), noise(2, 7, 1, 40)).to(device)
    pairs = torch.view_as_complex(F.rms_norm(x, (80,), weight, 1e-5).float().unflatten(3, (-1, 2)))
    answer, expected = turn(x, weight, rope, 1e-5), torch.view_as_real(pairs * rope).flatten(3).to(dtype)
    if not torch.allclose(answer, expected, rtol=0.02, atol=0.05):
        raise RuntimeError(
            f"the kernel of queries and keys is off by up to {(answer - expected).abs().max().item():.3g}"
        )


@triton.jit
def _turn(
    x, weight, rope, y, row_stride, token_stride, rope_stride, heads, width, eps,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # a large batch has over 2³¹ numbers
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, 2 * PAIRS)[None, :]
    at, is_place = head * width + place, place < width
    inside = (head < heads) & is_place
    x += row * row_stride + token * token_stride
    numbers = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / width + eps)[:, None]
    numbers = numbers * scale * tl.load(weight + place, mask=is_place, other=0.0).to(tl.float32)
    numbers = numbers.to(y.dtype.element_ty).to(tl.float32)
    a, b = tl.split(tl.reshape(numbers, (HEADS, PAIRS, 2)))
    turns = tl.load(rope + row * rope_stride + token * width + place, mask=is_place, other=0.0)
    cosine, sine = tl.split(tl.reshape(turns, (1, PAIRS, 2)))
    turned = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), (HEADS, 2 * PAIRS))
    y += (row * tl.num_programs(0) + token) * heads * width
    tl.store(y + at, turned.to(y.dtype.element_ty), mask=inside)
