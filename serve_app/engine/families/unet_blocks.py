"""The blocks of Stable Diffusion's UNet, with fewer operators than diffusers' own, whose layers they take over.

They hold nothing that belongs to a batch. Channels stay last in memory from block to block, and nothing is divided by
1. What is constant over a run, the keys and values of its text and the embedding of its text and size, is computed once
by `run_constants` and given to every pass.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.attention import Attends
from serve_app.engine.lora_layers import apply_together

_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UNetMidBlock2DCrossAttn", "CrossAttnUpBlock2D", "UpBlock2D", None}
_OPTIONS = {
    "act_fn": "silu",
    "attention_type": "default",
    "cross_attention_norm": None,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "mid_block_only_cross_attention": None,
    "mid_block_scale_factor": 1,
    "resnet_out_scale_factor": 1,
    "resnet_skip_time_act": False,
    "resnet_time_scale_shift": "default",
    "time_embedding_act_fn": None,
}
"""With these options a UNet's blocks compute what this module's do: Stable Diffusion 1, 2 and XL have them."""


class Kernels(NamedTuple):
    """Functions of `unet_kernels`, where a device runs them."""

    group_norm: Callable[[Tensor, Tensor, Tensor, int, float, bool], Tensor]
    geglu: Callable[[Tensor], Tensor]


def use_kernels(module: Any, kernels: Kernels | None) -> None:
    """Let a UNet's or an autoencoder's group norms, and products of GEGLU, be computed by kernels."""
    if kernels is None:
        return
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.GroupNorm and child.affine:
                setattr(parent, name, GroupNorm(child, kernels.group_norm))
            elif type(child).__name__ == "GEGLU":
                setattr(parent, name, GatedGELU(child.get_submodule("proj"), kernels.geglu))


class GroupNorm(nn.GroupNorm):
    """torch's, computed by a kernel where the channels of the input lie last in memory."""

    def __init__(
        self, plain: nn.GroupNorm, kernel: Callable[[Tensor, Tensor, Tensor, int, float, bool], Tensor]
    ) -> None:
        super().__init__(plain.num_groups, plain.num_channels, plain.eps, device="meta")
        self.weight, self.bias, self._kernel = plain.weight, plain.bias, kernel

    def forward(self, input: Tensor) -> Tensor:
        return self._by_kernel(input, silu=False) if _is_last(input) else super().forward(input)

    def with_silu(self, x: Tensor) -> Tensor:
        return self._by_kernel(x, silu=True) if _is_last(x) else F.silu(super().forward(x), inplace=True)

    def _by_kernel(self, x: Tensor, *, silu: bool) -> Tensor:
        return self._kernel(x, self.weight, self.bias, self.num_groups, self.eps, silu)


def _is_last(x: Tensor) -> bool:
    """Return whether the channels of x [rows, channels, …] lie last in memory."""
    return x.movedim(1, -1).is_contiguous()


class GatedGELU(nn.Module):
    def __init__(self, proj: nn.Module, kernel: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.proj, self._kernel = proj, kernel

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(self.proj(x))


def use_blocks(unet: Any) -> "list[CrossAttention]":
    """Put these blocks in the place of diffusers' own; return their cross attentions in order.

    A UNet of another kind stays as it is, and the list is empty.
    """
    config = unet.config
    blocks = {*config.down_block_types, config.mid_block_type, *config.up_block_types}
    cross_only = config.only_cross_attention
    is_plain = not (any(cross_only) if isinstance(cross_only, Sequence) else cross_only)
    if not (is_plain and blocks <= _BLOCKS and all(config[name] == value for name, value in _OPTIONS.items())):
        return []
    unet.time_embed_act = nn.SiLU()  # computed once for all residual blocks
    unet.get_aug_embed = _given_embedding
    crosses: list[CrossAttention] = []
    for block in filter(None, (*unet.down_blocks, unet.mid_block, *unet.up_blocks)):
        block.resnets = nn.ModuleList(map(Residual, block.resnets))
        if hasattr(block, "attentions"):
            block.attentions = nn.ModuleList(map(SpatialTransformer, block.attentions))
            crosses += [layer for layer in block.attentions.modules() if isinstance(layer, CrossAttention)]
    for before, cross in pairwise(crosses):
        cross.first = before.first + 2 * before.width
    return crosses


@torch.inference_mode()
def run_constants(
    unet: Any, crosses: Sequence["CrossAttention"], context: Tensor, added: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what every pass of a run takes of its text [rows, tokens, width], by name, each [rows, …].

    The run's adapter must be bound to one row. All is computed at the run's own shape, whatever else is being drawn.
    """
    rows = context.shape[0]
    together = context.flatten(0, 1)[None]
    parts = [layer(together).view(rows, -1) for cross in crosses for layer in (cross.to_k, cross.to_v)]
    embedded = [
        type(unet).get_aug_embed(unet, row, row, {name: tensor[i : i + 1] for name, tensor in added.items()})
        for i, row in enumerate(context.split(1))
    ]
    constants = {"keys_values": torch.cat(parts, 1)}
    return constants if embedded[0] is None else constants | {"embedded": torch.cat(embedded)}


def _given_embedding(*, added_cond_kwargs: Mapping[str, Tensor] | None, **_: object) -> Tensor | None:
    return (added_cond_kwargs or {}).get("embedded")


class Attention(Attends):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.heads: int = plain.heads
        self.to_q, self.to_k, self.to_v, self.to_out = plain.to_q, plain.to_k, plain.to_v, plain.to_out

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)) for each in (queries, keys, values))
        return self.to_out[0](self.attended(q, k, v))


class SelfAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*apply_together(x, (self.to_q, self.to_k, self.to_v)))


class CrossAttention(Attention):
    """Attention to a text, whose keys and values are given."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain)
        self.width: int = plain.to_k.out_features
        self.first = 0
        """How many numbers per token stand before this layer's keys in a row of keys and values."""

    def forward(self, x: Tensor, tokens: int, keys_values: Tensor) -> Tensor:
        own = keys_values[:, self.first * tokens : (self.first + 2 * self.width) * tokens]
        return self.attend(self.to_q(x), *own.unflatten(1, (2, tokens, self.width)).unbind(1))


class TransformerBlock(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm1, self.attn1 = plain.norm1, SelfAttention(plain.attn1)
        self.norm2, self.attn2 = plain.norm2, CrossAttention(plain.attn2)
        self.norm3, self.ff = plain.norm3, plain.ff

    def forward(self, x: Tensor, tokens: int, keys_values: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x)).add_(x)
        x = self.attn2(self.norm2(x), tokens, keys_values).add_(x)
        return self.ff(self.norm3(x)).add_(x)


class SpatialTransformer(nn.Module):
    """Transformer blocks over the pixels of an image; called by diffusers' UNet."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm, self.proj_in = plain.norm, plain.proj_in
        self.transformer_blocks = nn.ModuleList(map(TransformerBlock, plain.transformer_blocks))
        self.proj_out = plain.proj_out

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        cross_attention_kwargs: Mapping[str, Tensor],
        **_: object,
    ) -> tuple[Tensor]:
        tokens, size = encoder_hidden_states.shape[1], hidden_states.shape[2:]
        x = _project(self.proj_in, _pixels(self.norm(hidden_states)), size)
        for block in self.transformer_blocks:
            x = block(x, tokens, cross_attention_kwargs["keys_values"])
        return (_image(_project(self.proj_out, x, size), size).add_(hidden_states),)


def _pixels(image: Tensor) -> Tensor:
    """View [rows, channels, height, width], channels last in memory, as [rows, pixels, channels]."""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def _image(pixels: Tensor, size: torch.Size) -> Tensor:
    return pixels.unflatten(1, size).permute(0, 3, 1, 2)


def _project(layer: Any, pixels: Tensor, size: torch.Size) -> Tensor:
    """Apply a linear layer, or a convolution of one pixel."""
    return layer(pixels) if len(layer.shape) == 2 else _pixels(layer(_image(pixels, size)))


class Residual(nn.Module):
    """Two convolutions with the time's embedding between them, and a shortcut around both."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm1, self.conv1, self.time_emb_proj = plain.norm1, plain.conv1, plain.time_emb_proj
        self.norm2, self.conv2, self.conv_shortcut = plain.norm2, plain.conv2, plain.conv_shortcut

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(_silu_of(self.norm1, x))
        y += self.time_emb_proj(time)[:, :, None, None]
        y = self.conv2(_silu_of(self.norm2, y))
        return y.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))


def _silu_of(norm: nn.Module, x: Tensor) -> Tensor:
    return norm.with_silu(x) if isinstance(norm, GroupNorm) else F.silu(norm(x), inplace=True)
