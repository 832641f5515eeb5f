"""FLUX.2 klein: a transformer of double and single blocks, a Qwen3 text encoder, and a VAE with normalized latents.

The distilled models draw in four steps and have no guidance; the base models are guided as all others are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.dit import (
    MAX_TOKENS,
    PATCH,
    TransformerFamily,
    refuse_wrong_text_parts,
    refuse_wrong_vae,
)
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.flux2_transformer import FUSED_END, Flux2Transformer
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine_options import EngineOptions

TEXT_LAYERS = (9, 18, 27)
"""A caption is what these layers of the text encoder make of it, side by side."""
_ORIGINAL_NAMES = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "proj_out": "final_layer.linear",
}
_ORIGINAL_PARTS = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
}
"""The layers outside blocks, and those of blocks, as the original code writes them."""
_FUSED_PARTS = {
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}


def of_diffusers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a single file's weights under diffusers' names; a name that it does not know stays as it is."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        try:
            made |= convert_flux2_transformer_checkpoint_to_diffusers({name: weight})
        except KeyError:
            made[name] = weight
    return made


class Flux2KleinFamily(TransformerFamily):
    """One loaded base model of the family; see `Family`.

    It looks at a request's image in every step, as it was trained to, and draws from noise whatever the strength. The
    image has a size of its own, as in diffusers' pipeline.
    """

    begins_from_images = False
    thinking = False
    convert = staticmethod(of_diffusers)
    max_encoded_prompts = 32
    """Each encoded prompt takes 7.9 MB in 16 bits with the 4B model, and 12.6 MB with the 9B."""

    def __init__(self, pipeline: Any, options: EngineOptions, **given: Any) -> None:
        super().__init__(pipeline, options, **given)
        self.is_distilled = bool(pipeline.config.is_distilled)

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = Flux2Transformer(plain)
        layers = wrap_layers(transformer)
        aliases = {theirs: ours for ours, theirs in _ORIGINAL_NAMES.items() if ours in layers}
        fused: dict[str, Sequence[str]] = dict(FUSED_END)
        for ours, theirs in (("transformer_blocks", "double_blocks"), ("single_transformer_blocks", "single_blocks")):
            for i in range(len(getattr(transformer, ours))):
                for part, original in _ORIGINAL_PARTS.items():
                    if (layer := f"{ours}.{i}.{part}") in layers:
                        aliases[f"{theirs}.{i}.{original}"] = layer
                for original, parts in _FUSED_PARTS.items():
                    if f"{ours}.{i}.{parts[0]}" in layers:
                        fused[f"{theirs}.{i}.{original}"] = [f"{ours}.{i}.{part}" for part in parts]
        return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"), fused)

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        transformer, encoder = pipeline.transformer.config, pipeline.text_encoder.config
        refuse_wrong_vae(pipeline, transformer.in_channels // PATCH**2)
        if not hasattr(pipeline.vae, "bn"):
            raise ValueError("the VAE is not FLUX.2's, which knows its latents' mean: name FLUX.2's as `vae:`")
        refuse_wrong_text_parts(pipeline, transformer.joint_attention_dim // len(TEXT_LAYERS))
        if encoder.num_hidden_layers < TEXT_LAYERS[-1]:
            raise ValueError(
                f"the text encoder has {encoder.num_hidden_layers} layers, and the transformer reads {TEXT_LAYERS[-1]}: "
                "name the Qwen3 that it was trained with as `text_encoder:`"
            )

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return "transformer_blocks." in layer

    def shift(self, tokens: int, steps: int) -> float:
        return compute_empirical_mu(tokens, steps)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        del pause  # a text has at most `MAX_TOKENS`
        if request.mask is not None:
            raise ValueError("mask: FLUX.2 klein looks at an image as a whole; SD, SDXL and Z-Image take a mask")
        is_guided = request.guidance > 1 and not self.is_distilled
        prompts = [request.negative_prompt, request.prompt] if is_guided else [request.prompt]
        captions = torch.stack(self.captions(prompts, request, adapter_id))
        seen = (0, 0) if request.image is None else self.tokens(request.of_its_image)
        (rope,) = self.places(*self.tokens(request), MAX_TOKENS, *seen)
        return Conditioning(captions, {"rope": rope.expand(len(prompts), *rope.shape[1:])})

    def hidden_states(self, prompt: str) -> Tensor:
        """Return the states of every token to `MAX_TOKENS`, those of padding too: the transformer attends to them."""
        states = self.read(prompt, padded=True)
        return torch.cat([states[layer] for layer in TEXT_LAYERS], 2)[0]

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Embed each caption, and the image that the run looks at, which the adapter's one row is for.

        The image's tokens follow the caption's, and the run itself begins from noise.
        """
        embedded = [self.transformer.context_embedder(caption) for caption in conditioning.context.split(1)]
        if conditioning.image is not None:
            tokens = conditioning.image.mean.flatten(1).T[None].to(self.dtype)
            reference = self.transformer.x_embedder(tokens)
            embedded = [torch.cat([caption, reference], 1) for caption in embedded]
        return Conditioning(torch.cat(embedded), conditioning.added)

    # -- noise, steps and pixels -----------------------------------------------------------------------------------

    def make_autoencoder(self) -> Autoencoder:
        norm = self.vae.bn
        deviation = (norm.running_var.float() + self.vae.config.batch_norm_eps).sqrt()[:, None, None]
        return Autoencoder(self.vae, deviation=deviation, mean=norm.running_mean.float()[:, None, None], patch=PATCH)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        return self.transformer.config.in_channels, *self.tokens(request)
