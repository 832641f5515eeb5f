"""FLUX.1's transformer over rows; it has diffusers' layers, and fewer operators.

Its sequence and its double blocks are FLUX.2's. Each block has layers of its own that make its factors out of the
moment, which is the embedded time, guidance and whole caption; those of all blocks are computed together. A single
block has one layer for each of queries, keys, values and feed forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.families.dit import PATCH, AttendsByPlace
from serve_app.engine.families.flux2_transformer import DoubleBlock, Halves, Modulation, modulated, within_range
from serve_app.engine.lora_layers import apply_together

EPS = 1e-6
"""What every norm adds to the variance."""


class Flux1Transformer(nn.Module):
    """Takes over the layers of diffusers' `FluxTransformer2DModel`, under their names but for `norm_out`'s."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.config, self.pos_embed = plain.config, plain.pos_embed
        self.time_text_embed = plain.time_text_embed
        self.norm_out: Any = Halves(plain.norm_out.linear)
        self.x_embedder, self.context_embedder = plain.x_embedder, plain.context_embedder
        self.transformer_blocks: Any = nn.ModuleList(map(ModulatedDoubleBlock, plain.transformer_blocks))
        self.single_transformer_blocks: Any = nn.ModuleList(map(SingleBlock, plain.single_transformer_blocks))
        self.proj_out = plain.proj_out

    def forward(self, latents: Tensor, time: Tensor, context: Tensor, constant: Tensor, rope: Tensor) -> Tensor:
        """Return the velocity of latents [rows, channels, height, width], whose squares of cells are tokens.

        The time [rows] runs from 1 for noise to 0; `context` [rows, tokens, width] has passed `context_embedder`,
        `constant` [rows, width] is that of `embedded`, and `rope` that of `places`.
        """
        embed = self.time_text_embed
        moment = embed.timestep_embedder(embed.time_proj(time * 1000).to(latents.dtype)) + constant
        made, (shift, scale) = self._modulations(moment)
        factors = iter(made)
        tokens = F.pixel_unshuffle(latents, PATCH)
        text, image = context, self.x_embedder(tokens.flatten(2).transpose(1, 2))
        for block in self.transformer_blocks:
            of_image, of_text = [[next(factors), next(factors)] for _ in range(2)]
            text, image = block(text, image, of_text, of_image, rope)
        x = torch.cat([text, image], 1)
        for block in self.single_transformer_blocks:
            x = block(x, next(factors), rope)
        x = self.proj_out(modulated(x[:, text.shape[1] :], shift, scale, EPS))
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, tokens.shape[2:]), PATCH)

    def embedded(self, pooled: Tensor, guidance: Tensor | None) -> Tensor:
        """Return what the moment has of a caption's pooled vector [rows, width] and of guidance.

        The guidance [rows, 256] has passed `time_proj`; a model that is not told it takes none.
        """
        constant = self.time_text_embed.text_embedder(pooled)
        return constant if guidance is None else constant + self.time_text_embed.guidance_embedder(guidance)

    def places(self, height: int, width: int, text: int) -> tuple[Tensor]:
        """Return `rope` of a caption and an image, [1, tokens, 1, half of a head], on the host.

        Its complex numbers turn pairs of a head by height and width; captions' tokens have no place.
        """
        ids = torch.zeros(text + height * width, 3)
        ids[text:, 1:] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).float()
        cosines, sines = (each[:, ::2].contiguous() for each in self.pos_embed(ids))  # each is there twice in a row
        return (torch.complex(cosines, sines)[None, :, None],)

    def _modulations(self, moment: Tensor) -> tuple[list[Modulation], Sequence[Tensor]]:
        """Return each block's factors in turn, a double block's two for the image first, and the end's two."""
        norms = [norm for block in self.transformer_blocks for norm in (block.norm1, block.norm1_context)]
        norms += [block.norm for block in self.single_transformer_blocks]
        layers = [*(norm.linear for norm in norms), self.norm_out.shift, self.norm_out.scale]
        made = torch.cat(apply_together(F.silu(moment)[:, None], layers), 2)
        vectors = made.unflatten(2, (-1, moment.shape[1]))
        vectors[:, :, 1::3] += 1  # shifts, scales and gates take turns
        *of_blocks, shift, scale = vectors.unbind(2)
        return [Modulation(*of_blocks[i : i + 3]) for i in range(0, len(of_blocks), 3)], (shift, scale)


class ModulatedDoubleBlock(DoubleBlock):
    """A double block with the layers that make its factors."""

    def __init__(self, plain: Any) -> None:
        super().__init__(plain, plain.ff, plain.ff_context, EPS)
        self.norm1, self.norm1_context = plain.norm1, plain.norm1_context


class SingleBlock(AttendsByPlace):
    """Attention and feed forward in parallel."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.width: int = plain.attn.head_dim
        self.norm, self.attn = plain.norm, plain.attn
        self.proj_mlp, self.proj_out = plain.proj_mlp, plain.proj_out  # layers with one input lie side by side in slots

    def forward(self, x: Tensor, by: Modulation, rope: Tensor) -> Tensor:
        attn, inputs = self.attn, modulated(x, by.shift, by.scale, EPS)
        *heads, up = apply_together(inputs, (attn.to_q, attn.to_k, attn.to_v, self.proj_mlp))
        q, k, v = (each.unflatten(2, (-1, self.width)) for each in heads)
        made = self.attended(self.placed(attn.norm_q, q, rope), self.placed(attn.norm_k, k, rope), v)
        changed = self.proj_out(torch.cat([made, F.gelu(up, approximate="tanh")], 2))
        return within_range(torch.addcmul(x, by.gate, changed))
