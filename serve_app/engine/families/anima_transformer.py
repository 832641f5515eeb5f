"""Anima's transformer over rows, which is that of Cosmos Predict2; it has diffusers' layers, and fewer operators.

A row's sequence is its image's tokens alone: each block attends to them, then to the caption, then feeds forward. The
time's embedding makes the factors of every branch of every block, through two layers of the branch's own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.attention import Attends
from serve_app.engine.families.dit import PATCH, normed
from serve_app.engine.lora_layers import apply_together, shrink_together


class Modulation(NamedTuple):
    """The factors of one branch, each [rows, 1, width]."""

    shift: Tensor
    scale: Tensor
    """It multiplies what is normalized."""
    gate: Tensor


class AnimaTransformer(nn.Module):
    """Takes over the layers of diffusers' `CosmosTransformer3DModel`, under their names."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.rope = plain.config, plain.rope
        self.patch_embed, self.time_embed = plain.patch_embed, plain.time_embed
        self.transformer_blocks: Any = nn.ModuleList(map(Block, plain.transformer_blocks))
        self.norm_out, self.proj_out = plain.norm_out, plain.proj_out

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, rope: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width].

        The time [rows] runs from 1 for noise to 0; `context` [rows, tokens, width] is the caption, of which every token
        is attended to, and `rope` is that of `places` for each row.
        """
        by, (shift, scale) = self._modulations(latents, time)
        unpadded = F.pad(latents, (0, 0, 0, 0, 0, 1))  # a channel of zeros says that no part of the image is padding
        x = self.patch_embed.proj(F.pixel_unshuffle(unpadded, PATCH).flatten(2).transpose(1, 2))
        for i, block in enumerate(self.transformer_blocks):
            x = block(x, context, by[3 * i : 3 * i + 3], rope)
        x = self.proj_out(_modulated(x, shift, scale, self.norm_out.norm.eps))
        cells = x.transpose(1, 2).unflatten(1, (PATCH**2, -1)).transpose(1, 2).flatten(1, 2)  # they came channels last
        return F.pixel_shuffle(cells.unflatten(2, [side // PATCH for side in latents.shape[2:]]), PATCH)

    def places(self, height: int, width: int) -> tuple[Tensor]:
        """Return `rope` of an image's tokens, [1, tokens, 2, width of a head], on the host.

        These are the cosines that multiply a head, and the sines that multiply its halves in the other order.
        """
        cosines, sines = self.rope(torch.empty(1, 1, 1, PATCH * height, PATCH * width))
        first, second = sines.chunk(2, 1)
        return (torch.stack([cosines, torch.cat([-first, second], 1)], 1)[None],)

    def _modulations(self, latents: Tensor, time: Tensor) -> tuple[list[Modulation], Sequence[Tensor]]:
        """Return the factors of each block's three branches, and the end's, computed for all together."""
        of_all, moment = self.time_embed(latents, time)
        norms = [norm for each in self.transformer_blocks for norm in (each.norm1, each.norm2, each.norm3)]
        norms.append(self.norm_out)
        x, of_all = F.silu(moment)[:, None], of_all[:, None]
        shrunk = shrink_together(x, [norm.linear_1 for norm in norms])
        *made, last = (norm.linear_2(norm.linear_1(x, each)) for norm, each in zip(norms, shrunk, strict=True))
        shifts, scales, gates = (torch.stack(made) + of_all).chunk(3, 3)
        shift, scale = (last + of_all[..., : last.shape[2]]).chunk(2, 2)
        factors = zip(shifts.unbind(), (scales + 1).unbind(), gates.unbind(), strict=True)
        return [Modulation(*each) for each in factors], (shift, scale + 1)


class Block(nn.Module):
    """Attention of the image to itself, attention to the caption, and a feed-forward layer."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = plain.norm1, plain.norm2, plain.norm3
        self.attn1, self.attn2, self.ff = SelfAttention(plain.attn1), CrossAttention(plain.attn2), plain.ff

    def forward(self, x: Tensor, context: Tensor, by: Sequence[Modulation], rope: Tensor) -> Tensor:
        x = x.addcmul_(by[0].gate, self.attn1(self._normed(x, by[0]), rope))
        x = x.addcmul_(by[1].gate, self.attn2(self._normed(x, by[1]), context))
        return x.addcmul_(by[2].gate, self.ff(self._normed(x, by[2])))

    def _normed(self, x: Tensor, by: Modulation) -> Tensor:
        return _modulated(x, by.shift, by.scale, self.norm1.norm.eps)


class Attention(Attends):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.heads: int = plain.heads
        self.to_q, self.to_k, self.to_v, self.to_out = plain.to_q, plain.to_k, plain.to_v, plain.to_out
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k

    def heads_of(self, x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        """Return what each layer makes of x, [rows, tokens, heads, width]."""
        return [each.unflatten(2, (self.heads, -1)) for each in apply_together(x, layers)]


class SelfAttention(Attention):
    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = self.heads_of(x, (self.to_q, self.to_k, self.to_v))
        q, k = _turned(torch.cat([normed(self.norm_q, q), normed(self.norm_k, k)], 2), rope).chunk(2, 2)
        return self.to_out[0](self.attended(q, k, v))


class CrossAttention(Attention):
    """Attention to the caption, whose keys and values are made in every step: kept, they would take 117 MB a row."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        (q,), (k, v) = self.heads_of(x, (self.to_q,)), self.heads_of(context, (self.to_k, self.to_v))
        return self.to_out[0](self.attended(normed(self.norm_q, q), normed(self.norm_k, k), v))


def _modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[2:], eps=eps), scale)


def _turned(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each head of x [rows, tokens, heads, width], whose halves are the pairs, in float32 (Su et al. 2021)."""
    cosines, sines = rope.split(1, 2)
    return torch.addcmul(x * cosines, x.roll(x.shape[3] // 2, 3), sines).to(x.dtype)
