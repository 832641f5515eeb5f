"""Z-Image's transformer over rows with captions of their own lengths; it has diffusers' layers, and fewer operators.

A row's sequence is its image's tokens, padded to a multiple of 32 by a learnt token, its caption's, padded likewise, and
what fills the batch's caption bucket, which is masked. So the shapes depend on size and bucket alone, and a row's
numbers on no other row. What depends on the caption alone is computed once a run, by `refine`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.families.dit import PATCH, AttendsByPlace, normed
from serve_app.engine.lora_layers import apply_together

MULTIPLE = 32
"""The tokens of an image, and of a caption, are padded to a multiple of this."""
_PATCH_NAME = f"{PATCH}-1"
"""The name of the first and the last layer for this patch size and a single frame."""


class Modulation(NamedTuple):
    """The factors of a block's branches, attention and feed forward, each [rows, 1, width]."""

    scales: tuple[Tensor, ...]
    gates: tuple[Tensor, ...]


class ZImageTransformer(nn.Module):
    """Takes over the layers of diffusers' `ZImageTransformer2DModel`, under their names."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.rope_embedder = plain.config, plain.rope_embedder
        self.all_x_embedder, self.all_final_layer = plain.all_x_embedder, plain.all_final_layer
        self.noise_refiner: Any = nn.ModuleList(map(Block, plain.noise_refiner))
        self.context_refiner = nn.ModuleList(map(Block, plain.context_refiner))
        self.t_embedder, self.cap_embedder = plain.t_embedder, plain.cap_embedder
        self.x_pad_token, self.cap_pad_token = plain.x_pad_token, plain.cap_pad_token
        self.layers: Any = nn.ModuleList(map(Block, plain.layers))

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, rope: Tensor, masked: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width].

        The time [rows] runs from 0 for noise to 1; `context` [rows, bucket, width] is refined and filled up; `rope` and
        `masked` are those of `places` for each row.
        """
        moment = self.t_embedder(time * self.config.t_scale).to(latents.dtype)
        modulations = self._modulations(moment)
        tokens = self.all_x_embedder[_PATCH_NAME](_patches(latents))
        x = _padded(tokens, self.x_pad_token)
        for block in self.noise_refiner:
            x = block(x, rope[:, : x.shape[1]], None, next(modulations))
        bias = torch.zeros_like(masked, dtype=latents.dtype).masked_fill_(masked, -torch.inf)
        x = torch.cat([x, context], 1)
        for block in self.layers:
            x = block(x, rope, bias, next(modulations))
        made = self.all_final_layer[_PATCH_NAME](x[:, : tokens.shape[1]], c=moment)
        return _image(made, latents.shape)

    def refine(self, caption: Tensor, rope: Tensor) -> Tensor:
        """Return hidden states of one caption [1, tokens, width] as context [1, padded tokens, width].

        `rope` [1, padded tokens, …] turns them by their places.
        """
        x = _padded(self.cap_embedder(caption), self.cap_pad_token)
        for block in self.context_refiner:
            x = block(x, rope, None, None)
        return x

    def places(self, height: int, width: int, caption: int, bucket: int) -> tuple[Tensor, Tensor]:
        """Return `rope` and `masked` of a row with these tokens, each with rows first, on the host.

        `rope` [1, tokens, 1, half of a head] holds the complex numbers that turn pairs of a head (Su et al. 2021);
        `masked` [1, 1, 1, tokens] is true for tokens that none may attend to. A caption counts with its padding.
        """
        down, along = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        ids = torch.zeros(padded_length(height * width) + bucket, 3, dtype=torch.int32)
        ids[: height * width] = torch.stack([torch.full_like(down, caption + 1), down, along], 2).flatten(0, 1)
        start = len(ids) - bucket
        ids[start : start + caption, 0] = torch.arange(1, caption + 1)
        masked = torch.arange(len(ids)) >= start + caption
        return self.rope_embedder(ids)[None, :, None], masked[None, None, None]

    def _modulations(self, moment: Tensor) -> Iterator[Modulation]:
        """Yield the factors that the embedded time [rows, width] gives each block, computed for all together."""
        layers = [block.adaLN_modulation[0] for block in (*self.noise_refiner, *self.layers)]
        made = torch.stack(apply_together(moment[:, None], layers))
        scales, gates = made.unflatten(3, (2, 2, -1)).unbind(4)
        for scale, gate in zip((scales + 1).unbind(0), gates.tanh().unbind(0), strict=True):
            yield Modulation(scale.unbind(2), gate.unbind(2))


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each normalized before and after."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(plain.attention), FeedForward(plain.feed_forward)
        self.attention_norm1, self.attention_norm2 = plain.attention_norm1, plain.attention_norm2
        self.ffn_norm1, self.ffn_norm2 = plain.ffn_norm1, plain.ffn_norm2
        if plain.modulation:
            self.adaLN_modulation: Any = plain.adaLN_modulation

    def forward(self, x: Tensor, rope: Tensor, bias: Tensor | None, modulation: Modulation | None) -> Tensor:
        if modulation is None:
            x = normed(self.attention_norm2, self.attention(normed(self.attention_norm1, x), rope, bias)).add_(x)
            return normed(self.ffn_norm2, self.feed_forward(normed(self.ffn_norm1, x))).add_(x)
        (attention, feed_forward), gates = modulation
        changed = self.attention(normed(self.attention_norm1, x).mul_(attention), rope, bias)
        x = torch.addcmul(x, gates[0], normed(self.attention_norm2, changed))
        changed = self.feed_forward(normed(self.ffn_norm1, x).mul_(feed_forward))
        return x.addcmul_(gates[1], normed(self.ffn_norm2, changed))


class Attention(AttendsByPlace):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.heads: int = plain.heads
        self.to_q, self.to_k, self.to_v, self.to_out = plain.to_q, plain.to_k, plain.to_v, plain.to_out
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k

    def forward(self, x: Tensor, rope: Tensor, bias: Tensor | None) -> Tensor:
        made = apply_together(x, (self.to_q, self.to_k, self.to_v))
        q, k, v = (each.unflatten(2, (self.heads, -1)) for each in made)
        q, k = self.placed(self.norm_q, q, rope), self.placed(self.norm_k, k, rope)
        return self.to_out[0](self.attended(q, k, v, bias))


class FeedForward(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = plain.w1, plain.w3, plain.w2  # layers with one input lie side by side in slots

    def forward(self, x: Tensor) -> Tensor:
        gate, up = apply_together(x, (self.w1, self.w3))
        return self.w2(F.silu(gate, inplace=True).mul_(up))


def padded_length(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _padded(x: Tensor, token: Tensor) -> Tensor:
    rows, tokens, width = x.shape
    missing = padded_length(tokens) - tokens
    return torch.cat([x, token.expand(rows, missing, width)], 1) if missing else x


def _patches(latents: Tensor) -> Tensor:
    """View latents [rows, channels, height, width] as tokens [rows, tokens, PATCH² · channels]."""
    rows, channels, height, width = latents.shape
    cells = latents.view(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(rows, -1, PATCH * PATCH * channels)


def _image(tokens: Tensor, shape: torch.Size) -> Tensor:
    rows, channels, height, width = shape
    cells = tokens.view(rows, height // PATCH, width // PATCH, PATCH, PATCH, channels)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(shape)
