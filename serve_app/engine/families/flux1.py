"""FLUX.1 dev, schnell and what has their shapes: a transformer that is told its guidance, a T5 and a CLIP.

The T5 reads a prompt for the blocks' attention. The CLIP makes one vector of it, which with the time sets the blocks'
factors.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from serve_app.domain.guidance import WHOLE
from serve_app.engine.device import upload
from serve_app.engine.families.dit import MAX_TOKENS, PATCH, TransformerFamily, read_characters, refuse_wrong_vae
from serve_app.engine.families.family import Pause, no_pause
from serve_app.engine.families.flux1_transformer import Flux1Transformer
from serve_app.engine.families.flux2_transformer import FUSED_END
from serve_app.engine.families.unet import encoder_component
from serve_app.engine.lanes import Component
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest

FEW_STEPS_TOKENS = 256
"""A model that is not told its guidance, as schnell, reads this many tokens of a prompt, as in the original code."""
NO_GUIDANCE = 1.0
CHANNELS = 64
OTHER_CHANNELS = {384: "FLUX.1 Fill", 128: "FLUX.1 Depth or Canny"}
"""Models of these shapes take further channels beside an image's own, of a mask or of a control image."""
T5_PREFIXES = ("lora_te3_", "lora_te2_", "t5xxl.", "text_encoders.t5xxl.transformer.")

_NAMES = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
_QKV, _ADDED_QKV = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_DOUBLE: dict[str, Sequence[str]] = {
    "img_mod.lin": ["norm1.linear"],
    "txt_mod.lin": ["norm1_context.linear"],
    "img_attn.qkv": _QKV,
    "txt_attn.qkv": _ADDED_QKV,
    "img_attn.proj": ["attn.to_out.0"],
    "txt_attn.proj": ["attn.to_add_out"],
    "img_mlp.0": ["ff.net.0.proj"],
    "img_mlp.2": ["ff.net.2"],
    "txt_mlp.0": ["ff_context.net.0.proj"],
    "txt_mlp.2": ["ff_context.net.2"],
}
_SINGLE: dict[str, Sequence[str]] = {
    "modulation.lin": ["norm.linear"],
    "linear1": [*_QKV, "proj_mlp"],
    "linear2": ["proj_out"],
}
"""Layers as the original code writes them, and diffusers' in the order of their outputs: those outside blocks, and of
blocks."""
_NORMS = {
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}
_BY_ADAPTERS: dict[str, Sequence[str]] = {
    "qkv_lora1": _QKV,
    "qkv_lora2": _ADDED_QKV,
    "proj_lora1": ["attn.to_out.0"],
    "proj_lora2": ["attn.to_add_out"],
    "attn.to_qkv": _QKV,
    "attn.to_added_qkv": _ADDED_QKV,
}
_BY_ADAPTERS_SINGLE: dict[str, Sequence[str]] = {
    "qkv": _QKV,
    "proj": ["proj_out"],
    "linear1_qkv": _QKV,
    "attn.to_qkv": _QKV,
}
"""Further names of adapters: XLabs' processors, what ComfyUI makes of them, and projections that diffusers fused."""
_BLOCKS = {
    "double_blocks": ("transformer_blocks", _DOUBLE, _BY_ADAPTERS),
    "single_blocks": ("single_transformer_blocks", _SINGLE, _BY_ADAPTERS_SINGLE),
}


def of_diffusers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a single file's weights under diffusers' names; a name that it does not know stays as it is.

    Raises ValueError for a model that takes further channels.
    """
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        plain, _, kind = name.removeprefix("model.diffusion_model.").rpartition(".")
        if plain == "img_in" and kind == "weight":
            refuse_further_channels(weight.shape[-1])
        theirs, _, rest = plain.partition(".")
        index, _, part = rest.partition(".")
        ours, parts, _ = _BLOCKS.get(theirs, ("", {}, {}))
        if kind == "scale" and ours and part in _NORMS:
            made[f"{ours}.{index}.{_NORMS[part]}.weight"] = weight
        elif part in parts:
            layers = [f"{ours}.{index}.{layer}.{kind}" for layer in parts[part]]
            own = len(weight) // (3 if len(layers) == 3 else 7)  # a feed forward is four times as wide as the model
            sizes = [own] * (len(layers) - 1)
            made |= zip(layers, weight.split([*sizes, len(weight) - sum(sizes)]), strict=True)
        elif plain == "final_layer.adaLN_modulation.1":
            made[f"norm_out.linear.{kind}"] = torch.cat(weight.chunk(2)[::-1])
        else:
            made[f"{_NAMES[plain]}.{kind}" if plain in _NAMES else name] = weight
    return made


def refuse_further_channels(channels: int) -> None:
    if channels in OTHER_CHANNELS:
        raise ValueError(
            f"the transformer takes {channels} channels instead of {CHANNELS}: it is {OTHER_CHANNELS[channels]}, which does "
            "not draw from a prompt alone; give dev, schnell or a model made from them"
        )


class Flux1Family(TransformerFamily):
    """One loaded base model of the family; see `Family`.

    dev was distilled with guidance and is told a request's at every step. With a negative prompt, guidance is that of
    other models instead, in two rows, and dev is told that it has none. schnell is never told any.
    """

    convert = staticmethod(of_diffusers)
    max_encoded_prompts = 64
    """Each encoded prompt takes 4.2 MB in 16 bits."""

    def __init__(self, pipeline: Any, *options: Any, **given: Any) -> None:
        self.is_told_guidance = bool(pipeline.transformer.config.guidance_embeds)
        self.max_tokens = MAX_TOKENS if self.is_told_guidance else FEW_STEPS_TOKENS
        self._tokenizer_2 = pipeline.tokenizer_2
        super().__init__(pipeline, *options, **given)
        self.text_encoder_2: Any = self.components["text_encoder_2"].module
        self.pooled = lru_cache(self.max_encoded_prompts)(self._pooled)

    @staticmethod
    def component(plain: Any) -> Component:
        transformer = Flux1Transformer(plain)
        layers = wrap_layers(transformer)
        aliases = {theirs: ours for theirs, ours in _NAMES.items() if ours in layers}
        fused: dict[str, Sequence[str]] = dict(FUSED_END)
        for theirs, (ours, parts, of_adapters) in _BLOCKS.items():
            for i in range(len(getattr(transformer, ours))):
                for part, own in (*parts.items(), *of_adapters.items()):
                    names = [f"{ours}.{i}.{layer}" for layer in own]
                    spelled = f"{ours}.{i}.{part}" if part.startswith("attn.") else f"{theirs}.{i}.{part}"
                    if len(names) == 1:
                        aliases[spelled] = names[0]
                    else:
                        fused[spelled] = names
        return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"), fused)

    @staticmethod
    def encoders(part: Callable[[str], Any]) -> dict[str, Component]:
        t5 = part("text_encoder_2")
        return {
            "text_encoder": encoder_component("text_encoder", part("text_encoder")),
            "text_encoder_2": Component(t5, wrap_layers(t5), {}, T5_PREFIXES),
        }

    @staticmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        config = pipeline.transformer.config
        refuse_further_channels(config.in_channels)
        refuse_wrong_vae(pipeline, config.in_channels // PATCH**2)
        for name, width, made, kind in (
            ("text_encoder", config.pooled_projection_dim, pipeline.text_encoder.config.hidden_size, "CLIP"),
            ("text_encoder_2", config.joint_attention_dim, pipeline.text_encoder_2.config.d_model, "T5"),
        ):
            tokenizer = getattr(pipeline, name.replace("text_encoder", "tokenizer"))
            known = getattr(pipeline, name).config.vocab_size
            if made != width or len(tokenizer) > known:
                raise ValueError(
                    f"the transformer takes captions {width} wide of a {kind}, and {name} makes {made} of {known} "
                    f"tokens, of which the tokenizer has {len(tokenizer)}: name the folder of a pipeline that has the "
                    "two that it was trained with as `text_encoder:` and `tokenizer:`"
                )

    @staticmethod
    def is_common_target(layer: str) -> bool:
        return "transformer_blocks." in layer and ".norm" not in layer

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        is_guided = request.guidance > 1 and bool(request.negative_prompt)
        is_told = self.is_told_guidance and request.guidance > 1 and not is_guided
        if is_told and (request.guidance_start, request.guidance_end) != WHOLE:
            raise ValueError(
                "guidance_start: without a negative prompt, this base model is told its guidance at every step; leave "
                "it out, or send one"
            )
        prompts = [request.negative_prompt, request.prompt] if is_guided else [request.prompt]
        captions = torch.stack(self.captions(prompts, request, adapter_id))
        pause()
        scale = request.scale if adapter_id else 0.0
        added = {"pooled": torch.cat([self.pooled(prompt, adapter_id, scale) for prompt in prompts])}
        (rope,) = self.places(*self.tokens(request), self.max_tokens)
        added["rope"] = rope.expand(len(prompts), *rope.shape[1:])
        if self.is_told_guidance:
            told = torch.tensor([NO_GUIDANCE if is_guided else request.guidance] * len(prompts)).to(self.dtype) * 1000
            added["guidance"] = upload(self.transformer.time_text_embed.time_proj(told).numpy(), self.device)
        return Conditioning(captions, added)

    def _unread(self, prompt: str) -> int:
        """Return how many characters are beyond the T5's tokens; CLIP's window is short for every prompt."""
        return len(prompt) - read_characters(self._tokenizer_2, prompt, self.max_tokens)

    def hidden_states(self, prompt: str) -> Tensor:
        """Return the T5's states of every token to `max_tokens`, those of padding too, as it was trained to be read."""
        return self.text_encoder_2(self._ids(self._tokenizer_2, prompt, self.max_tokens))[0][0]

    def _pooled(self, prompt: str, adapter_id: str, scale: float) -> Tensor:
        """Return the vector [1, width] that CLIP makes of a prompt, of which it reads no more than its window."""
        del adapter_id, scale  # the cache tells encodings apart by them
        ids = self._ids(self.tokenizer, prompt, self.tokenizer.model_max_length)
        return self.text_encoder(ids).pooler_output.to(self.device, self.dtype)

    def _ids(self, tokenizer: Any, prompt: str, length: int) -> Tensor:
        read = tokenizer(prompt, padding="max_length", max_length=length, truncation=True)
        return torch.tensor([read.input_ids], device=self.text_encoder.device)

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Embed each caption, its vector and the guidance, with which the adapter's one row begins every step."""
        transformer, added, dtype = self.transformer, conditioning.added, self.dtype
        guidances = added["guidance"].to(dtype).split(1) if "guidance" in added else [None] * conditioning.rows
        constants = map(transformer.embedded, added["pooled"].split(1), guidances)
        context = torch.cat([transformer.context_embedder(caption) for caption in conditioning.context.split(1)])
        return conditioning._replace(
            context=context, added={"constant": torch.cat([*constants]), "rope": added["rope"]}
        )
