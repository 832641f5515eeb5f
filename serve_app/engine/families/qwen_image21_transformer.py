"""Qwen-Image 2.1's transformer over rows with captions of their own lengths; it has diffusers' layers, and fewer operators.

A row's sequence is its caption's tokens, what fills the batch's caption bucket, then its image's tokens. A caption's
token attends to those before it, and an image's to its own caption and to the whole image, so that what fills up is seen
by none. One layer makes the factors of all blocks, for captions from the time 0.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.families.dit import AttendsByPlace
from serve_app.engine.lora_layers import apply_together

TIME_WIDTH, LONGEST_PERIOD = 256, 10000
"""The time is embedded in this many numbers, cosines and then sines, of periods up to this."""
LARGEST_HALF = 65504
"""diffusers keeps what a block returns within float16's range."""


class Modulation(NamedTuple):
    """The factors of every block's branches, attention and feed forward: for the caption, then the image.

    Each is [rows, 2, width].
    """

    scales: tuple[Tensor, Tensor]
    """They multiply what is normalized."""
    gates: tuple[Tensor, Tensor]


class Sight(NamedTuple):
    """What turns the tokens by their places, and what each of them attends to."""

    rope: Tensor
    """[rows, tokens, 1, half of a head]"""
    causal: Tensor
    """[1, 1, caption's tokens, caption's tokens], added to the captions' products: −∞ for later tokens."""
    bias: Tensor
    """[rows, 1, 1, tokens], added to the images' products: −∞ for what fills up."""


class QwenImage21Transformer(nn.Module):
    """Takes over the layers of diffusers' `QwenImage21Transformer2DModel`, under their names."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.theta = plain.config, plain.pos_embed.theta
        self.time_text_embed, self.txt_in, self.img_in = plain.time_text_embed, plain.txt_in, plain.img_in
        self.modulation: Any = plain.modulation
        self.transformer_blocks = nn.ModuleList(map(Block, plain.transformer_blocks))
        self.norm_out, self.proj_out = plain.norm_out, plain.proj_out
        half = TIME_WIDTH // 2
        frequencies = torch.exp(
            -math.log(LONGEST_PERIOD) * torch.arange(half, dtype=torch.float32, device="cpu") / half
        )
        self.frequencies = nn.Buffer(frequencies.to(plain.img_in.weight.device), persistent=False)

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, rope: Tensor, masked: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width], of which each cell is a token.

        The time [rows] runs from 1 for noise to 0; `context` [rows, bucket, width] has passed `txt_in` and is filled up;
        `rope` and `masked` are those of `places` for each row.
        """
        text = context.shape[1]
        moments = self._moments(time, latents.dtype)
        by = self._modulation(moments)
        causal = latents.new_full((text, text), -torch.inf).triu_(1)[None, None]
        bias = torch.zeros_like(masked, dtype=latents.dtype).masked_fill_(masked, -torch.inf)
        x = torch.cat([context, self.img_in(latents.flatten(2).transpose(1, 2))], 1)
        for block in self.transformer_blocks:
            x = block(x, by, Sight(rope, causal, bias))
        scale = self.norm_out.linear(F.silu(moments[:, 1:])) + 1
        x = F.layer_norm(x[:, text:], x.shape[2:], eps=self.norm_out.norm.eps).mul_(scale)
        return self.proj_out(x).transpose(1, 2).unflatten(2, latents.shape[2:])

    def places(self, height: int, width: int, caption: int, bucket: int) -> tuple[Tensor, Tensor]:
        """Return `rope` and `masked` of a row with these tokens, each with rows first, on the host.

        The complex numbers of `rope` [1, tokens, 1, half of a head] turn pairs of a head by frame, height and width. A
        caption's token is at its place on all three; an image's frame is the length of its own caption, and its middle
        is 0. `masked` [1, 1, 1, tokens] is true for what fills the bucket.
        """
        down, along = (torch.arange(side) - (side - side // 2) for side in (height, width))
        image = torch.cartesian_prod(torch.tensor([caption]), down, along)
        ids = torch.cat([torch.arange(bucket)[:, None].expand(-1, 3), image])
        turns = [
            ids[:, axis, None] * (1.0 / torch.pow(self.theta, torch.arange(0, dim, 2) / dim))
            for axis, dim in enumerate(self.config.axes_dims_rope)
        ]
        angles = torch.cat(turns, 1)
        places = torch.arange(len(ids))
        masked = (places >= caption) & (places < bucket)
        return torch.polar(torch.ones_like(angles), angles)[None, :, None], masked[None, None, None]

    def _moments(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embedded times [rows, 2, width] of captions and images."""
        of_text = torch.zeros_like(time) if self.config.causal_condition else time
        turns = 1000 * torch.stack([of_text, time], 1).float()[:, :, None] * self.frequencies
        return self.time_text_embed.timestep_embedder(torch.cat([turns.cos(), turns.sin()], 2).to(dtype))

    def _modulation(self, moments: Tensor) -> Modulation:
        first, first_gate, second, second_gate = self.modulation(moments).chunk(4, 2)
        return Modulation((first + 1, second + 1), (first_gate.tanh(), second_gate.tanh()))


class Block(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.attn, self.img_mlp, self.eps = Attention(plain.attn), FeedForward(plain.img_mlp), plain.img_norm1.eps

    def forward(self, x: Tensor, by: Modulation, sight: Sight) -> Tensor:
        for branch, scale, gate in zip((self.attn, self.img_mlp), by.scales, by.gates, strict=True):
            text = sight.causal.shape[2]
            changed = F.layer_norm(x, x.shape[2:], eps=self.eps)
            for part, factor in zip(_parts(changed, text), scale.split(1, 1), strict=True):
                part.mul_(factor)
            changed = branch(changed, sight)
            for part, factor, change in zip(_parts(x, text), gate.split(1, 1), _parts(changed, text), strict=True):
                part.addcmul_(factor, change)
        return x.clip_(-LARGEST_HALF, LARGEST_HALF) if x.dtype == torch.float16 else x


class Attention(AttendsByPlace):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.heads: int = plain.heads
        self.to_q, self.to_k, self.to_v, self.to_out = plain.to_q, plain.to_k, plain.to_v, plain.to_out
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        made, text = apply_together(x, (self.to_q, self.to_k, self.to_v)), sight.causal.shape[2]
        q, k, v = (each.unflatten(2, (self.heads, -1)) for each in made)
        q, k = (self.placed(norm, each, sight.rope) for norm, each in ((self.norm_q, q), (self.norm_k, k)))
        of_text = self.attended(q[:, :text], k[:, :text], v[:, :text], sight.causal)
        return self.to_out[0](torch.cat([of_text, self.attended(q[:, text:], k, v, sight.bias)], 1))


class FeedForward(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate_layer, self.proj, self.out = plain.gate_layer, plain.proj, plain.out

    def forward(self, x: Tensor, _sight: Sight) -> Tensor:
        gate, up = apply_together(x, (self.gate_layer, self.proj))
        return self.out(F.silu(gate, inplace=True).mul_(up))


def _parts(x: Tensor, text: int) -> tuple[Tensor, ...]:
    """Return the captions' and the images' part of x [rows, tokens, width], over the same memory."""
    return x[:, :text], x[:, text:]
