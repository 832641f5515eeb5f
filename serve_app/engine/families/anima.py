"""Anima: Cosmos Predict2's transformer, captions that a conditioner makes of a Qwen3's states, and Qwen's VAE."""

from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers
from torch import Tensor, nn

from serve_app.engine.families.anima_transformer import AnimaTransformer
from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import DIT_PARTS, make_part
from serve_app.engine.families.dit import (
    MAX_TOKENS,
    PATCH,
    TransformerFamily,
    original_names,
    read_characters,
    refuse_wrong_vae,
)
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.qwen_vae import normalized
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine_options import EngineOptions

_ORIGINAL_NAMES = {
    "transformer_blocks.": "blocks.",
    ".norm1.linear_": ".adaln_modulation_self_attn.",
    ".norm2.linear_": ".adaln_modulation_cross_attn.",
    ".norm3.linear_": ".adaln_modulation_mlp.",
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".to_q": ".q_proj",
    ".to_k": ".k_proj",
    ".to_v": ".v_proj",
    ".to_out.0": ".output_proj",
    ".ff.net.0.proj": ".mlp.layer1",
    ".ff.net.2": ".mlp.layer2",
    "norm_out.linear_": "final_layer.adaln_modulation.",
    "proj_out": "final_layer.linear",
    "time_embed.t_embedder.": "t_embedder.1.",
    "patch_embed.proj": "x_embedder.proj.1",
}
"""Parts of the transformer's layer names as diffusers and as the original code write them."""
_PREFIXES = ("", "diffusion_model.", "model.diffusion_model.", "lora_unet_", "lora_transformer_", "lycoris_")
"""What adapter files may write before the conditioner's name in the original code, where it is of the transformer."""


def conditioner_component(conditioner: Any) -> Component:
    layers = wrap_layers(conditioner)
    return Component(conditioner, layers, {}, [f"{prefix}llm_adapter{mark}" for prefix in _PREFIXES for mark in "._"])


class AnimaFamily(TransformerFamily):
    """One loaded base model of the family; see `Family`.

    A caption is what the conditioner makes of a prompt's T5 tokens, which look at what the Qwen3 makes of its own; the
    transformer attends to all `MAX_TOKENS` of it, those of zeros too that fill it up.
    """

    parts = (*DIT_PARTS, "text_conditioner", "t5_tokenizer")
    convert = staticmethod(convert_cosmos_transformer_checkpoint_to_diffusers)

    def __init__(self, pipeline: Any, options: EngineOptions, **given: Any) -> None:
        super().__init__(pipeline, options, **given)
        conditioner = pipeline.text_conditioner.to(self.text_encoder.device).eval().requires_grad_(False)
        self.components["text_conditioner"] = conditioner_component(conditioner)
        self._conditioner, self._t5_tokenizer = conditioner, pipeline.t5_tokenizer

    @classmethod
    def meta_components(cls, folder: Path) -> dict[str, Component]:
        conditioner = conditioner_component(make_part(folder, "text_conditioner"))
        return super().meta_components(folder) | {"text_conditioner": conditioner}

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = AnimaTransformer(plain)
        layers = wrap_layers(transformer)
        aliases = original_names(layers, _ORIGINAL_NAMES)
        return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"))

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        transformer, conditioner = pipeline.transformer.config, pipeline.text_conditioner.config
        plain = not (transformer.extra_pos_embed_type or transformer.use_crossattn_projection)
        if not plain or not transformer.concat_padding_mask or list(transformer.patch_size) != [1, PATCH, PATCH]:
            raise ValueError("the transformer is of a Cosmos that draws videos, which this service does not run")
        refuse_wrong_vae(pipeline, transformer.in_channels)
        if not pipeline.vae.config.get("latents_mean"):
            raise ValueError("the VAE is not Qwen's, which knows its latents' mean: name Qwen's as `vae:`")
        encoder = pipeline.text_encoder.config
        widths = (conditioner.source_dim, encoder.hidden_size), (transformer.text_embed_dim, conditioner.target_dim)
        if any(taken != made for taken, made in widths):
            raise ValueError(
                f"the text conditioner takes states {conditioner.source_dim} wide and makes captions "
                f"{conditioner.target_dim} wide; the text encoder makes {encoder.hidden_size}, and the transformer "
                f"takes {transformer.text_embed_dim}: name the Qwen3 that it was trained with as `text_encoder:`"
            )
        if conditioner.min_sequence_length != MAX_TOKENS:
            tokens = conditioner.min_sequence_length
            raise ValueError(f"the text conditioner fills captions to {tokens} tokens, not {MAX_TOKENS}")
        kind, tokens, words = type(pipeline.tokenizer).__name__, len(pipeline.tokenizer), len(pipeline.t5_tokenizer)
        if "Qwen2" not in kind or tokens > encoder.vocab_size:
            raise ValueError(
                f"the tokenizer is a {kind} of {tokens} tokens, and the text encoder a Qwen3 that knows "
                f"{encoder.vocab_size}: name the text encoder's own as `tokenizer:`"
            )
        if words > conditioner.target_vocab_size:
            raise ValueError(
                f"the t5_tokenizer has {words} tokens, and the conditioner knows {conditioner.target_vocab_size}: put "
                "T5's own into the folder"
            )

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return any(part in layer for part in (".attn1.", ".attn2.", ".ff."))

    def shift(self, tokens: int, steps: int) -> None:
        """Return None: the schedule's shift is the same for all sizes."""
        del tokens, steps

    @property
    def modules(self) -> list[nn.Module]:
        return [*super().modules, self._conditioner]

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        del pause  # a text has at most `MAX_TOKENS`
        prompts = [request.negative_prompt, request.prompt] if request.guidance > 1 else [request.prompt]
        captions = torch.stack(self.captions(prompts, request, adapter_id))
        (rope,) = self.places(*self.tokens(request))
        return Conditioning(captions, {"rope": rope.expand(len(prompts), *rope.shape[1:])})

    def _unread(self, prompt: str) -> int:
        """Return how many characters are beyond the tokens of both tokenizers."""
        both = (self.tokenizer, self._t5_tokenizer)
        return len(prompt) - max(read_characters(tokenizer, prompt, MAX_TOKENS) for tokenizer in both)

    def hidden_states(self, prompt: str) -> Tensor:
        """Return the `MAX_TOKENS` tokens of a caption; no prompt has one state of zeros, as in diffusers."""
        ids, words = (
            tokenizer(prompt, truncation=True, max_length=MAX_TOKENS).input_ids
            for tokenizer in (self.tokenizer, self._t5_tokenizer)
        )
        states = self.states(ids)[-1] if ids else torch.zeros_like(self.states([0])[-1])
        return self._conditioner(states, torch.tensor([words], device=states.device))[0]

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        return conditioning

    # -- noise, steps and pixels -----------------------------------------------------------------------------------

    def make_autoencoder(self) -> Autoencoder:
        return normalized(self.vae, sure=True)
