"""Krea 2's transformer over rows with captions of their own lengths; it has diffusers' layers, and fewer operators.

A row's sequence is its caption's tokens, what fills the batch's bucket of captions, which is masked, and its image's. So
the shapes depend on size and bucket alone, and a row's numbers on no other row. The states of the text encoder's layers
are fused once a run, by `fuse`, because no time acts on them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.attention import Attends
from serve_app.engine.families.dit import PATCH, turned
from serve_app.engine.lora_layers import apply_together

PROJECTED_TOKENS = 64
"""The projector takes this many tokens at a time: an adapter of its one output is computed at a rank of 400."""


class Krea2Transformer(nn.Module):
    """Takes over the layers of diffusers' `Krea2Transformer2DModel`, under their names."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.rotary_emb = plain.config, plain.rotary_emb
        self.img_in, self.time_embed, self.time_mod_proj = plain.img_in, plain.time_embed, plain.time_mod_proj
        self.text_fusion: Any = TextFusion(plain.text_fusion)
        self.txt_in: Any = TextProjection(plain.txt_in)
        self.transformer_blocks = nn.ModuleList(map(Block, plain.transformer_blocks))
        self.final_layer: Any = FinalLayer(plain.final_layer)
        blocks = plain.transformer_blocks
        self.tables = _kept(torch.stack([block.scale_shift_table for block in blocks]))
        """What each block adds to the factors that the time gives all, [blocks, 6, width]."""
        self.norms = _kept(torch.stack([torch.stack([_scale(block.norm1), _scale(block.norm2)]) for block in blocks]))
        """The scales of each block's norms, [blocks, 2, width]: they multiply the factors, in float32 as diffusers has
        them."""

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, rope: Tensor, masked: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width].

        The time [rows] runs from 1 for noise to 0; `context` [rows, bucket, width] is fused and filled up; `rope` and
        `masked` are those of `places` for each row.
        """
        moment = self.time_embed(time, latents.dtype)
        of_time = self.time_mod_proj(F.gelu(moment, approximate="tanh"))
        factors = of_time.view(len(latents), 6, -1) + self.tables[:, None]
        scales = ((factors[:, :, 0::3] + 1) * self.norms[:, None]).to(factors.dtype)
        bias = torch.zeros_like(masked, dtype=latents.dtype).masked_fill_(masked, -torch.inf)
        image = self.img_in(F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2))
        x = torch.cat([context, image], 1)
        for i, block in enumerate(self.transformer_blocks):
            x = block(x, factors[i], scales[i], rope, bias)
        made = self.final_layer(x[:, context.shape[1] :], moment)
        sides = [side // PATCH for side in latents.shape[2:]]
        return F.pixel_shuffle(made.transpose(1, 2).unflatten(2, sides), PATCH)

    def fuse(self, states: Tensor) -> Tensor:
        """Return the context [1, tokens, width] of one caption's states [1, tokens, layers, width of the encoder]."""
        return self.txt_in(self.text_fusion(states))

    def places(self, height: int, width: int, caption: int, bucket: int) -> tuple[Tensor, Tensor]:
        """Return `rope` and `masked` of a row with these tokens, each with rows first, on the host.

        `rope` [1, tokens, 1, half of a head] holds the complex numbers that turn pairs of a head; captions have no
        places. `masked` [1, 1, 1, tokens] is true for tokens that none may attend to.
        """
        ids = torch.zeros(bucket + height * width, 3)
        ids[bucket:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
        cosines, sines = (each[:, ::2].contiguous() for each in self.rotary_emb(ids))  # each is there twice in a row
        tokens = torch.arange(len(ids))
        masked = (tokens >= caption) & (tokens < bucket)
        return torch.complex(cosines, sines)[None, :, None], masked[None, None, None]


class Block(nn.Module):
    """Attention and a gated feed-forward layer, whose inputs and outputs the time scales."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.attn, self.ff, self.eps = Attention(plain.attn), FeedForward(plain.ff), plain.norm1.eps

    def forward(self, x: Tensor, factors: Tensor, scales: Tensor, rope: Tensor, bias: Tensor) -> Tensor:
        """`factors` [rows, 6, width] are scale, shift and gate of each branch, `scales` [rows, 2, width] the whole
        scales."""
        _, shift, gate, _, feed_shift, feed_gate = factors[:, :, None].unbind(1)
        scale, feed_scale = scales[:, :, None].unbind(1)
        x = torch.addcmul(x, gate, self.attn(self._modulated(x, shift, scale), rope, bias))
        return x.addcmul_(feed_gate, self.ff(self._modulated(x, feed_shift, feed_scale)))

    def _modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(shift, F.rms_norm(x, x.shape[2:], eps=self.eps), scale)


class Attention(Attends):
    """Attention with fewer keys than queries, which a gate follows."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.width, self.shared = plain.head_dim, plain.num_heads // plain.num_kv_heads
        self.to_q, self.to_k, self.to_v, self.to_gate = plain.to_q, plain.to_k, plain.to_v, plain.to_gate
        self.to_out, self.norm_q, self.norm_k = plain.to_out, Norm(plain.norm_q), Norm(plain.norm_k)

    def forward(self, x: Tensor, rope: Tensor | None = None, bias: Tensor | None = None, *, sides: int = 1) -> Tensor:
        """x is [1, …] where each `sides` of its tokens attend to one another alone."""
        *heads, gate = apply_together(x, (self.to_q, self.to_k, self.to_v, self.to_gate))
        q, k, v = (each.unflatten(2, (-1, self.width)) for each in heads)
        q, k = self.norm_q(q), self.norm_k(k)
        if rope is not None:
            q, k = turned(q, rope), turned(k, rope)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.shared > 1:  # of torch's kernels few take fewer keys together with a mask
            k, v = (each.repeat_interleave(self.shared, 2) for each in (k, v))
        if sides > 1:
            q, k, v = (each.view(-1, sides, *each.shape[2:]) for each in (q, k, v))
        attended = self.attended(q, k, v, bias).view(*x.shape[:2], -1)
        return self.to_out[0](attended.mul_(gate.sigmoid_()))


class FeedForward(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = plain.gate, plain.up, plain.down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_together(x, (self.gate, self.up))
        return self.down(F.silu(gate, inplace=True).mul_(up))


class Norm(nn.Module):
    """Krea's RMSNorm, whose weight is what its scale has above 1; it gives float32."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.scale, self.eps = _kept(_scale(plain)), plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale, self.eps)


class TextFusion(nn.Module):
    """Lets the states of a token attend to one another, makes one of them, and lets these attend to one another."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.layerwise_blocks = nn.ModuleList(map(FusionBlock, plain.layerwise_blocks))
        self.projector = plain.projector
        self.refiner_blocks = nn.ModuleList(map(FusionBlock, plain.refiner_blocks))

    def forward(self, states: Tensor) -> Tensor:
        layers = states.shape[2]
        x = states.flatten(1, 2)
        for block in self.layerwise_blocks:
            x = block(x, layers)
        by_token = x.unflatten(1, (-1, layers)).transpose(2, 3)
        x = torch.cat([self.projector(some) for some in by_token.split(PROJECTED_TOKENS, 1)], 1).squeeze(3)
        for block in self.refiner_blocks:
            x = block(x, 1)
        return x


class FusionBlock(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.attn, self.ff = Attention(plain.attn), FeedForward(plain.ff)
        self.norm1, self.norm2 = Norm(plain.norm1), Norm(plain.norm2)

    def forward(self, x: Tensor, sides: int) -> Tensor:
        x = x + self.attn(self.norm1(x).to(x.dtype), sides=sides)
        return x + self.ff(self.norm2(x).to(x.dtype))


class TextProjection(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.norm, self.linear_1, self.linear_2 = Norm(plain.norm), plain.linear_1, plain.linear_2

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.norm(x).to(x.dtype)), approximate="tanh"))


class FinalLayer(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.table, self.linear, self.eps = _kept(plain.scale_shift_table), plain.linear, plain.norm.eps
        self.norm = _kept(_scale(plain.norm))

    def forward(self, x: Tensor, moment: Tensor) -> Tensor:
        scale, shift = (moment + self.table).chunk(2, 1)
        scale = ((scale + 1) * self.norm).to(x.dtype)
        return self.linear(torch.addcmul(shift, F.rms_norm(x, x.shape[2:], eps=self.eps), scale))


def _scale(norm: Any) -> Tensor:
    return norm.weight.float() + 1


def _kept(numbers: Tensor) -> nn.Parameter:
    return nn.Parameter(numbers.detach(), requires_grad=False)
