"""Computes a base model's large products in float8: a scale for each output of the weights, one for each token.

A token's scale depends on that token alone, so a row keeps its bits beside any others wherever the product keeps them,
which is measured as for other number types (`batch_invariance.py`). Adapters take the input as it was before: only the
base's own product is rounded.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.domain.catalog import FP8
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.kernels import float8_kernels
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import LoRALinear, linear_of
from serve_app.engine_options import EngineOptions

LARGEST = 448.0
"""The largest number of float8 E4M3."""
LEAST_SCALE = 1e-12 / LARGEST
DIVISOR = 16
"""Tensor cores take inputs and outputs in multiples of this."""
LEAST_CAPABILITY = (8, 9)
"""NVIDIA GPUs multiply float8 from Ada (L4, L40, RTX 40) and Hopper (H100) on."""

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [tokens, width] as float8 and each token's scale [tokens, 1] in float32, with x ≈ float8 · scale."""
    scale = (x.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


class Float8Linear(nn.Module):
    """A linear layer, or a convolution of single pixels as one."""

    def __init__(self, plain: nn.Linear | nn.Conv2d, quantize: Quantize = quantized) -> None:
        super().__init__()
        self.codes: Tensor
        self.scale: Tensor
        self._quantize = quantize
        self._dtype, self._shape = plain.weight.dtype, plain.weight.shape
        codes, scale = quantized(plain.weight.detach().flatten(1))
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.bias = plain.bias

    @property
    def weight(self) -> Tensor:
        """Return what the layer computes with, in the number type that it was loaded in."""
        return (self.codes.float() * self.scale).to(self._dtype).view(self._shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [..., in] times the weights, in x's own number type."""
        codes, scale = self._quantize(x.flatten(0, -2))
        multiply = self._emulate if x.device.type == "cpu" else self._multiply
        return multiply(codes, scale, x.dtype).view(*x.shape[:-1], -1)

    def _multiply(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        by_row = F.ScalingType.RowWise  # newer than the oldest torch that the rest of the engine runs on
        return F.scaled_mm(
            codes, self.codes.t(), scale, by_row, self.scale.t(), by_row,
            bias=self.bias, output_dtype=dtype, use_fast_accum=True,
        )  # fmt: skip

    def _emulate(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the same in float32, in which products of two float8 are exact."""
        y = linear_of(codes.device)(codes.float(), self.codes.float(), None) * scale * self.scale.t()
        return (y if self.bias is None else y + self.bias.float()).to(dtype)


def to_float8(lanes: Sequence[Component], names: Sequence[str], options: EngineOptions) -> None:
    """Turn these linear layers of a denoiser into float8, but those whose sides tensor cores do not take.

    Raises ValueError where the device cannot compute with float8.
    """
    refuse_without_float8(torch_device(options), torch_dtype(options))
    quantize = getattr(float8_kernels(options), "quantize", quantized)
    for name in names:
        layers = [layer for lane in lanes if isinstance(layer := lane.layers[name], LoRALinear)]
        if layers and layers[0].fan_in % DIVISOR == layers[0].fan_out % DIVISOR == 0:
            float8 = Float8Linear(layers[0].base, quantize)
            for layer in layers:
                layer.use(float8)


def refuse_without_float8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError, with what would help, for a device that does not multiply float8; a CPU emulates it."""
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise ValueError(
            f"precision: {FP8} needs an NVIDIA GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} or "
            f"later, and {device} is none: leave `precision` out"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"precision: {FP8} goes with bfloat16, not {dtype}: leave the engine's `dtype` out")
