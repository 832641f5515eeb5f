"""Chooses the operator by which a base model attends, once at its load, so that nothing chooses another in between.

torch's own function picks one anew at each call, by shapes, alignment and switches of the whole process: a row might be
summed by another kernel than its neighbour was. So on a GPU the first of `CANDIDATES` that takes the model's shapes is
called by name in all places. The order is fixed, since two generators that measured speed might choose differently; it is
torch's own, which is that of speed on cards since Hopper. All passes have the same shape there (`batch_invariance.py`).
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

Operator = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Queries, keys and values [rows, heads, tokens, width], and what is added to their products or None → the same."""
OF_TORCH = "torch's choice"
aten: Any = torch.ops.aten


def of_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, _whole(bias, q, k), False)[0]


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        raise NotImplementedError("flash attention takes no mask")
    return aten._scaled_dot_product_flash_attention(q, k, v)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, _whole(bias, q, k), False)[0]


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return aten._scaled_dot_product_attention_math(q, k, v, bias)[0]


def _whole(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q.shape[:3], k.shape[2])


CANDIDATES: Mapping[str, Mapping[str, Operator]] = {
    "cuda": {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}
}
"""Operators by the kind of device. On a CPU torch has one kernel to choose, and goes on choosing it."""


class Attends(nn.Module):
    """A layer that attends by the operator of its base model."""

    operator: Operator = staticmethod(of_torch)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what heads [rows, tokens, heads, width] attend to, as [rows, tokens, heads · width]."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.operator(q, k, v, bias).transpose(1, 2).flatten(2)


def choose(denoiser: nn.Module, compute: Callable[[], object], device: torch.device) -> str:
    """Let the denoiser's layers attend by the first candidate that computes what torch does; return its name.

    `compute` computes a pass, whose calls are tried with random numbers. torch goes on choosing where there is none, and
    for shapes that the chosen one refuses later.
    """
    candidates = CANDIDATES.get(device.type, {})
    if not candidates:
        return OF_TORCH
    with _recorded(denoiser) as calls:
        compute()
    for name, operator in candidates.items():
        if all(_is_right(operator, call) for call in calls):
            _use(denoiser, partial(_or_of_torch, operator))
            return name
    log.warning("no operator of attention computes what torch's choice does")
    _use(denoiser, of_torch)
    return OF_TORCH


def _or_of_torch(operator: Operator, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attend by the operator, and by torch's choice where it does not take the shape."""
    try:
        return operator(q, k, v, bias)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except RuntimeError:
        return of_torch(q, k, v, bias)


class Call(NamedTuple):
    """What a layer gave the operator in a pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None

    def resembling(self) -> "Call":
        """Return random numbers; the bias, which has a meaning, stays."""
        return Call(_resembling(self.q), _resembling(self.k), _resembling(self.v), self.bias)


@contextmanager
def _recorded(denoiser: nn.Module) -> Generator[Sequence[Call]]:
    """Record one call of each shape."""
    seen: dict[object, Call] = {}

    def operator(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        shape = tuple((each.shape[1:], each.stride()) for each in (q, k, v)), bias is None
        seen.setdefault(shape, Call(q, k, v, bias))
        return of_torch(q, k, v, bias)

    calls: list[Call] = []
    _use(denoiser, operator)
    try:
        yield calls
    finally:
        _use(denoiser, of_torch)
        calls += seen.values()


def _resembling(tensor: Tensor) -> Tensor:
    """Return random numbers that lie in memory as those of `tensor`."""
    numbers = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return numbers.normal_(generator=torch.Generator(tensor.device).manual_seed(0))


def _is_right(operator: Operator, call: Call) -> bool:
    """Whether the operator takes the call and computes what torch does."""
    given = call.resembling()
    try:
        return torch.allclose(operator(*given), of_torch(*given), rtol=0.05, atol=0.02)
    except RuntimeError as error:
        log.debug("an operator of attention is not for this card or shape: %s", error)
        return False


def _use(denoiser: nn.Module, operator: Operator) -> None:
    for layer in denoiser.modules():
        if isinstance(layer, Attends):
            layer.operator = operator
