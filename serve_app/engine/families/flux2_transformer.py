"""FLUX.2's transformer over rows; it has diffusers' layers, and fewer operators.

A row's sequence is its caption's tokens, then its image's. Double blocks have layers of their own for each of the two
and one attention over both; single blocks have one layer into attention and feed forward, and one out of both. Three
layers make the factors of all blocks out of the time's embedding.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.families.dit import MAX_TOKENS, AttendsByPlace, normed, turned
from serve_app.engine.lora_layers import apply_together

REFERENCE_TIME = 10
"""The time of an image that is looked at, where that of the image that is drawn is 0."""
LARGEST_HALF = 65504
"""diffusers keeps what a block returns within float16's range."""


class Modulation(NamedTuple):
    """The factors that the time gives one branch of the blocks, each [rows, 1, width]."""

    shift: Tensor
    scale: Tensor
    """It multiplies what is normalized."""
    gate: Tensor


class Flux2Transformer(nn.Module):
    """Takes over the layers of diffusers' `Flux2Transformer2DModel`, under their names but for `norm_out`'s."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.pos_embed = plain.config, plain.pos_embed
        self.time_guidance_embed = plain.time_guidance_embed
        self.double_stream_modulation_img = plain.double_stream_modulation_img
        self.double_stream_modulation_txt = plain.double_stream_modulation_txt
        self.single_stream_modulation = plain.single_stream_modulation
        self.norm_out: Any = Halves(plain.norm_out.linear)
        self.x_embedder, self.context_embedder = plain.x_embedder, plain.context_embedder
        self.transformer_blocks = nn.ModuleList(
            DoubleBlock(each, FeedForward(each.ff), FeedForward(each.ff_context), each.norm1.eps)
            for each in plain.transformer_blocks
        )
        self.single_transformer_blocks = nn.ModuleList(map(SingleBlock, plain.single_transformer_blocks))
        self.proj_out = plain.proj_out

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, rope: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width], of which each cell is a token.

        The time [rows] runs from 1 for noise to 0; `context` [rows, tokens, width] has passed `context_embedder`, and
        `rope` is that of `places`. After the first `MAX_TOKENS` of the context come those of an image that is looked
        at, which has passed `x_embedder`.
        """
        of_image, of_text, (of_both,), (scale, shift) = self._modulations(self.time_guidance_embed(time * 1000, None))
        image, text = self.x_embedder(latents.flatten(2).transpose(1, 2)), context[:, :MAX_TOKENS]
        drawn = image.shape[1]
        if context.shape[1] > MAX_TOKENS:
            image = torch.cat([image, context[:, MAX_TOKENS:]], 1)
        for block in self.transformer_blocks:
            text, image = block(text, image, of_text, of_image, rope)
        x = torch.cat([text, image], 1)
        for block in self.single_transformer_blocks:
            x = block(x, of_both, rope)
        x = modulated(x[:, text.shape[1] : text.shape[1] + drawn], shift, scale, self.config.eps)
        return self.proj_out(x).transpose(1, 2).unflatten(2, latents.shape[2:])

    def places(self, height: int, width: int, text: int, seen_height: int, seen_width: int) -> tuple[Tensor]:
        """Return `rope` of a caption, an image and one that is seen, [1, tokens, 1, half of a head], on the host.

        Its complex numbers turn pairs of a head: a fourth of them each by time, height, width and place in the caption.
        """
        ids = torch.zeros(text + height * width + seen_height * seen_width, 4)
        ids[:text, 3] = torch.arange(text)
        for time, down, along, rows in (
            (0, height, width, ids[text : text + height * width]),
            (REFERENCE_TIME, seen_height, seen_width, ids[text + height * width :]),
        ):
            rows[:, :3] = torch.cartesian_prod(torch.tensor([time]), torch.arange(down), torch.arange(along)).float()
        cosines, sines = (each[:, ::2].contiguous() for each in self.pos_embed(ids))  # each is there twice in a row
        return (torch.complex(cosines, sines)[None, :, None],)

    def _modulations(self, moment: Tensor) -> tuple[list[Modulation], list[Modulation], list[Modulation], list[Tensor]]:
        """Return the two of double blocks for the image and for the caption, that of single blocks, and the end's."""
        stacks = (self.double_stream_modulation_img, self.double_stream_modulation_txt, self.single_stream_modulation)
        layers = [*(stack.linear for stack in stacks), self.norm_out.scale, self.norm_out.shift]
        image, text, both, scale, shift = apply_together(F.silu(moment)[:, None], layers)
        made = [
            [Modulation(shift, scale + 1, gate) for shift, scale, gate in _in_threes(each.chunk(3 * branches, 2))]
            for each, branches in ((image, 2), (text, 2), (both, 1))
        ]
        return made[0], made[1], made[2], [scale + 1, shift]


FUSED_END: Mapping[str, Sequence[str]] = {
    "norm_out.linear": ("norm_out.scale", "norm_out.shift"),
    "final_layer.adaLN_modulation.1": ("norm_out.shift", "norm_out.scale"),
}
"""What diffusers and the original code call both `Halves`, in the order of their outputs."""


class Halves(nn.Module):
    """The last modulation's layer as two, because diffusers' names and the original ones have them in another order."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        biases = (None, None) if plain.bias is None else plain.bias.chunk(2)
        self.scale, self.shift = map(_linear, plain.weight.chunk(2), biases)


class DoubleBlock(nn.Module):
    """Attention of image and caption to both, then a feed-forward layer for each."""

    def __init__(self, plain: Any, ff: nn.Module, ff_context: nn.Module, eps: float) -> None:
        super().__init__()
        self.attn, self.eps = JointAttention(plain.attn), eps
        self.ff, self.ff_context = ff, ff_context

    def forward(
        self, text: Tensor, image: Tensor, of_text: Sequence[Modulation], of_image: Sequence[Modulation], rope: Tensor
    ) -> tuple[Tensor, Tensor]:
        changed = self.attn(self._normed(text, of_text[0]), self._normed(image, of_image[0]), rope)
        text = torch.addcmul(text, of_text[0].gate, changed[0])
        image = torch.addcmul(image, of_image[0].gate, changed[1])
        image = image.addcmul_(of_image[1].gate, self.ff(self._normed(image, of_image[1])))
        text = text.addcmul_(of_text[1].gate, self.ff_context(self._normed(text, of_text[1])))
        return within_range(text), image

    def _normed(self, x: Tensor, by: Modulation) -> Tensor:
        return modulated(x, by.shift, by.scale, self.eps)


class JointAttention(AttendsByPlace):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.width: int = plain.head_dim
        self.to_q, self.to_k, self.to_v = plain.to_q, plain.to_k, plain.to_v
        self.add_q_proj, self.add_k_proj, self.add_v_proj = plain.add_q_proj, plain.add_k_proj, plain.add_v_proj
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k
        self.norm_added_q, self.norm_added_k = plain.norm_added_q, plain.norm_added_k
        self.to_out, self.to_add_out = plain.to_out, plain.to_add_out

    def forward(self, text: Tensor, image: Tensor, rope: Tensor) -> Sequence[Tensor]:
        of_text = self._heads(text, (self.add_q_proj, self.add_k_proj, self.add_v_proj))
        of_image = self._heads(image, (self.to_q, self.to_k, self.to_v))
        q = self._joined(of_text[0], of_image[0], (self.norm_added_q, self.norm_q), rope)
        k = self._joined(of_text[1], of_image[1], (self.norm_added_k, self.norm_k), rope)
        made = self.attended(q, k, torch.cat([of_text[2], of_image[2]], 1))
        text, image = made.split([text.shape[1], image.shape[1]], 1)
        return self.to_add_out(text), self.to_out[0](image)

    def _joined(self, text: Tensor, image: Tensor, norms: tuple[Any, Any], rope: Tensor) -> Tensor:
        """Return the caption's heads and the image's after them, normalized and turned."""
        if self.turn is None:
            return turned(torch.cat([normed(norms[0], text), normed(norms[1], image)], 1), rope)
        of_text, of_image = rope.split([text.shape[1], image.shape[1]], 1)
        return torch.cat([self.placed(norms[0], text, of_text), self.placed(norms[1], image, of_image)], 1)

    def _heads(self, x: Tensor, layers: Sequence[Any]) -> Sequence[Tensor]:
        """Return queries, keys and values [rows, tokens, heads, width]."""
        return [each.unflatten(2, (-1, self.width)) for each in apply_together(x, layers)]


class FeedForward(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.linear_in, self.linear_out = plain.linear_in, plain.linear_out

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_in(x).chunk(2, 2)
        return self.linear_out(F.silu(gate).mul_(up))


class SingleBlock(nn.Module):
    """Attention and feed forward in parallel."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.attn, self.eps = ParallelAttention(plain.attn), plain.norm.eps

    def forward(self, x: Tensor, by: Modulation, rope: Tensor) -> Tensor:
        changed = self.attn(modulated(x, by.shift, by.scale, self.eps), rope)
        return within_range(torch.addcmul(x, by.gate, changed))


class ParallelAttention(AttendsByPlace):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.width: int = plain.head_dim
        self.parts = [*[plain.inner_dim] * 3, *[plain.mlp_hidden_dim] * 2]
        self.to_qkv_mlp_proj, self.to_out = plain.to_qkv_mlp_proj, plain.to_out
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        *heads, gate, up = self.to_qkv_mlp_proj(x).split(self.parts, 2)
        q, k, v = (each.unflatten(2, (-1, self.width)) for each in heads)
        made = self.attended(self.placed(self.norm_q, q, rope), self.placed(self.norm_k, k, rope), v)
        return self.to_out(torch.cat([made, F.silu(gate).mul_(up)], 2))


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    return torch.addcmul(shift, F.layer_norm(x, x.shape[2:], eps=eps), scale)


def within_range(x: Tensor) -> Tensor:
    return x.clip_(-LARGEST_HALF, LARGEST_HALF) if x.dtype == torch.float16 else x


def _in_threes(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(tensors[i], tensors[i + 1], tensors[i + 2]) for i in range(0, len(tensors), 3)]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # pyright: ignore
    return layer
