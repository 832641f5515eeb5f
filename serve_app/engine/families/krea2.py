"""Krea 2, Raw and Turbo: a transformer over caption and image tokens, a Qwen3-VL text encoder, and Qwen's VAE.

Turbo is distilled: it is drawn in eight steps without guidance. Raw is guided as all others are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers
from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift
from torch import Tensor

from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import language_model
from serve_app.engine.families.dit import (
    MAX_TOKENS,
    PATCH,
    TransformerFamily,
    bucket_of,
    filled,
    original_names,
    refuse_wrong_text_parts,
    refuse_wrong_vae,
)
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.krea2_transformer import Krea2Transformer
from serve_app.engine.families.qwen_vae import normalized
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine_options import EngineOptions

BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
"""What the text encoder reads before and after a prompt."""
UNSEEN = 34
"""The transformer does not take the states of the first tokens, which are those of `BEFORE`."""
DISTILLED_SHIFT = 1.15
_ORIGINAL_NAMES = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "final_layer.linear": "last.linear",
}
_ORIGINAL_PARTS = {
    "transformer_blocks.": "blocks.",
    "text_fusion.": "txtfusion.",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "attn.to_": "attn.w",
    "ff.": "mlp.",
}
"""The layers outside blocks, and parts of the names of others, as the original code writes them."""


class Krea2Family(TransformerFamily):
    """One loaded base model of the family; see `Family`.

    A request's guidance w is g + 1 of diffusers' pipeline, which adds g times the difference to the prompt's velocity:
    either way 1 means none.
    """

    convert = staticmethod(convert_krea2_transformer_checkpoint_to_diffusers)
    max_encoded_prompts = 16
    """Each encoded prompt takes 61 KB a token in 16 bits, so 31 MB at most."""

    def __init__(self, pipeline: Any, options: EngineOptions, **given: Any) -> None:
        self.is_distilled = bool(pipeline.config.is_distilled)
        self.text_layers: Sequence[int] = pipeline.text_encoder_select_layers
        self._after = pipeline.tokenizer(AFTER).input_ids
        self.room = UNSEEN + MAX_TOKENS - len(self._after)
        super().__init__(pipeline, options, **given)

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = Krea2Transformer(plain)
        layers = wrap_layers(transformer)
        aliases = {theirs: ours for ours, theirs in _ORIGINAL_NAMES.items()}
        aliases |= original_names(layers.keys() - _ORIGINAL_NAMES.keys(), _ORIGINAL_PARTS)
        blocks = [layer.removesuffix(".to_q") for layer in layers if layer.endswith(".to_q")]
        fused = {f"{block}.to_qkv": [f"{block}.to_{part}" for part in "qkv"] for block in blocks}
        return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"), fused)

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        transformer, encoder = pipeline.transformer.config, language_model(pipeline.text_encoder).config
        refuse_wrong_vae(pipeline, transformer.in_channels // PATCH**2)
        refuse_wrong_text_parts(pipeline, transformer.text_hidden_dim, with_template=False)
        chosen = pipeline.text_encoder_select_layers
        if encoder.num_hidden_layers < max(chosen) or len(chosen) != transformer.num_text_layers:
            raise ValueError(
                f"the text encoder has {encoder.num_hidden_layers} layers, and the transformer reads "
                f"{transformer.num_text_layers} of them, {', '.join(map(str, chosen))}: name the Qwen3-VL that it was "
                "trained with as `text_encoder:`"
            )
        if (tokens := len(pipeline.tokenizer(BEFORE).input_ids)) != UNSEEN:
            raise ValueError(
                f"the tokenizer makes {tokens} tokens of what stands before a prompt instead of {UNSEEN}: name that of "
                "Qwen3-VL as `tokenizer:`"
            )

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return layer.startswith("transformer_blocks.")

    def shift(self, tokens: int, steps: int) -> float:
        """Return the schedule's shift: larger images are noised more, but by the distilled model."""
        del steps
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        usual = (256, 6400, 0.5, 1.15)
        given = (self.scheduler.config.get(*each) for each in zip(names, usual, strict=True))
        return DISTILLED_SHIFT if self.is_distilled else calculate_shift(tokens, *given)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        del pause  # a text has at most `MAX_TOKENS`
        prompts = [request.negative_prompt, request.prompt] if request.guidance > 1 else [request.prompt]
        captions = self.captions(prompts, request, adapter_id)
        lengths = [len(caption) for caption in captions]
        return self.in_bucket(request, captions, lengths, bucket_of(lengths))

    def templated(self, prompt: str) -> str:
        return BEFORE + prompt

    def hidden_states(self, prompt: str) -> Tensor:
        """Return the states of some layers for each token, side by side.

        diffusers pads between the prompt and what follows it, and masks the pads; no token sees a later one, so that
        the same comes of it without them.
        """
        ids = self.tokenizer(self.templated(prompt), truncation=True, max_length=self.room).input_ids
        states = self.states([*ids, *self._after])
        return torch.cat([states[layer][0, UNSEEN:] for layer in self.text_layers], 1)

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Fuse the states of each caption alone at its own length."""
        context, added = conditioning.context, conditioning.added
        chosen = (len(self.text_layers), -1)
        fused = [
            self.transformer.fuse(row[None, :tokens].unflatten(2, chosen))[0]
            for row, tokens in zip(context, added["tokens"].tolist(), strict=True)
        ]
        kept = {name: added[name] for name in ("rope", "masked")}
        return conditioning._replace(context=filled(fused, context.shape[1]), added=kept)

    # -- noise, steps and pixels -----------------------------------------------------------------------------------

    def make_autoencoder(self) -> Autoencoder:
        return normalized(self.vae)

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        context, added = conditioning.context, conditioning.added
        time = (timesteps / 1000).to(self.dtype)
        velocity = self.lanes[lane].module(latents.to(self.dtype), time, context, added["rope"], added["masked"])
        return velocity.float()
