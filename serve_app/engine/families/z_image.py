"""Z-Image and Z-Image-Turbo: a diffusion transformer over image and caption tokens, a Qwen3 text encoder and a VAE."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from torch import Tensor, nn

from serve_app.engine.device import torch_device, torch_dtype, upload
from serve_app.engine.families.checkpoint import Source, as_checkpoint, load_dit_pipeline, make_part
from serve_app.engine.families.family import Component, finished_pixels, latent_rgb
from serve_app.engine.families.z_image_transformer import PATCH, ZImageTransformer, padded_length
from serve_app.engine.lanes import forwards_over, lanes_over
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import Schedule, make_schedule, make_scheduler
from serve_app.engine_options import EngineOptions, Sampler, parse_sampler

CAPTION_BUCKETS = (64, 128, 256, 512)
"""Runs share forward passes where the longer of their two captions, padded, fits the same of these counts of tokens."""
MAX_ENCODED_PROMPTS = 128
"""How many encoded prompts are kept for further runs; what was used longest ago goes first. The longest takes 2.6 MB."""
MAX_PLACES = 32
"""How many combinations of size, caption length and bucket have their places kept: 2.5 MB each for 1024²."""
USUAL_STEPS = 8
"""A schedule of so many steps is made at load, so that a scheduler that cannot be drawn is refused there."""
_ORIGINAL_NAMES = {
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
    "attention.to_out.0": "attention.out",
}
"""Parts of the transformer's layer names as diffusers and as the original code write them."""


class ZImageFamily:
    """One loaded base model of the family; see `Family`.

    A request's guidance w is g + 1 of diffusers' pipeline, which adds g times the difference to the prompt's velocity:
    either way 1 means none.
    """

    denoiser = "transformer"

    def __init__(self, pipeline: Any, options: EngineOptions, *, sampler: str = "") -> None:
        self.device, self.dtype = torch_device(options), torch_dtype(options)
        self.components = {
            "transformer": z_image_component(_on_device(pipeline.transformer, self.device)),
            "text_encoder": qwen_component(_on_device(pipeline.text_encoder, self.device)),
        }
        self.transformer: Any = self.components["transformer"].module
        self.text_encoder: Any = self.components["text_encoder"].module
        self.vae = _on_device(pipeline.vae, self.device)
        if self.dtype == torch.float16 and self.vae.config.force_upcast:
            self.vae.to(torch.float32)
        self._tokenizer, self._scheduler = pipeline.tokenizer, pipeline.scheduler
        self.sampler = sampler or options.sampler
        self._schedules: dict[tuple[str, int, int], Schedule] = {}
        self._schedule(self.sampler, USUAL_STEPS, tokens=4096)
        self._encoded: OrderedDict[tuple[str, str, float], Tensor] = OrderedDict()
        self._places: OrderedDict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = OrderedDict()
        self.latent_rgb = latent_rgb(type(self.vae).__name__, self.vae.config.latent_channels, is_xl=False)
        self.common_targets: Sequence[str] = [
            name for name in self.components["transformer"].layers if ".attention." in name or ".feed_forward." in name
        ]
        self.lanes = lanes_over(self.components["transformer"], options)
        self._forwards = forwards_over(self.lanes, options)

    @classmethod
    def load(cls, source: Source, options: EngineOptions) -> "ZImageFamily":
        checkpoint = as_checkpoint(source)
        if checkpoint.clip_skip:
            raise ValueError("clip_skip: is for CLIP's text encoders, and this base model has none; leave it out")
        convert = convert_z_image_transformer_checkpoint_to_diffusers
        pipeline = load_dit_pipeline(source, torch_dtype(options), convert)
        try:
            _refuse_wrong_pairs(pipeline)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
        return cls(pipeline, options, sampler=checkpoint.sampler)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self.transformer, self.vae, self.text_encoder]

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str) -> Conditioning:
        prompts = [request.negative_prompt, request.prompt] if request.guidance > 1 else [request.prompt]
        captions = [self._encode_cached(prompt, adapter_id, request.scale) for prompt in prompts]
        lengths = [padded_length(len(caption)) for caption in captions]
        bucket = next(bucket for bucket in CAPTION_BUCKETS if bucket >= max(lengths))
        context = captions[0].new_zeros(len(captions), bucket, captions[0].shape[1])
        for row, caption in zip(context, captions, strict=True):
            row[: len(caption)] = caption
        _, height, width = self.latent_shape(request)
        places = [self._places_of(height // PATCH, width // PATCH, length, bucket) for length in lengths]
        rope, masked = (torch.cat(each) for each in zip(*places, strict=True))
        tokens = torch.tensor([len(caption) for caption in captions])  # on the host, where `prepare` reads it
        return Conditioning(context, {"rope": rope, "masked": masked, "tokens": tokens})

    def _encode_cached(self, prompt: str, adapter_id: str, scale: float) -> Tensor:
        key = (prompt, adapter_id, scale if adapter_id else 0.0)
        if key not in self._encoded:
            self._encoded[key] = self._encode(prompt)
        _use(self._encoded, key, MAX_ENCODED_PROMPTS)
        return self._encoded[key]

    def _encode(self, prompt: str) -> Tensor:
        """Return a prompt's hidden states [tokens, width] before the last layer; beyond 512 tokens it is cut."""
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        tokens = self._tokenizer(text, truncation=True, max_length=CAPTION_BUCKETS[-1]).input_ids
        ids = torch.tensor([tokens], device=self.device)
        return self.text_encoder(ids, output_hidden_states=True, use_cache=False).hidden_states[-2][0].to(self.dtype)

    def _places_of(self, height: int, width: int, caption: int, bucket: int) -> tuple[Tensor, Tensor]:
        key = (height, width, caption, bucket)
        if key not in self._places:
            rope, masked = (upload(each.numpy(), self.device) for each in self.transformer.places(*key))
            self._places[key] = rope, masked
        _use(self._places, key, MAX_PLACES)
        return self._places[key]

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        """Refine each caption alone at its own length, as diffusers does for it alone."""
        context, added = conditioning
        rows, bucket, _ = context.shape
        refined = context.new_zeros(rows, bucket, self.transformer.config.dim)
        for row, tokens in enumerate(added["tokens"].tolist()):
            own = padded_length(tokens)
            places = added["rope"][row : row + 1, -bucket:][:, :own]
            refined[row, :own] = self.transformer.refine(context[row : row + 1, :tokens], places)[0]
        return Conditioning(refined, {name: added[name] for name in ("rope", "masked")})

    # -- noise and steps -------------------------------------------------------------------------------------------

    @property
    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        """Return the latents' channels, height and width; the sides are rounded up to whole tokens."""
        side = PATCH * self.pixels_per_latent
        height, width = (PATCH * -(-pixels // side) for pixels in (request.height, request.width))
        return self.transformer.config.in_channels, height, width

    def schedule(self, request: RunRequest) -> Schedule:
        _, height, width = self.latent_shape(request)
        return self._schedule(request.sampler or self.sampler, request.steps, tokens=height * width // PATCH**2)

    def _schedule(self, sampler: str, steps: int, *, tokens: int) -> Schedule:
        """Return a schedule for an image of so many tokens. Raises ValueError with the choices."""
        if sampler and parse_sampler(sampler)[0] is not Sampler.FLOW_EULER:
            raise ValueError(f"sampler {sampler}: is for another family; sampler: may be {Sampler.FLOW_EULER}")
        config = self._scheduler.config
        key = sampler, steps, tokens if config.use_dynamic_shifting else 0
        if key not in self._schedules:
            noise_levels = torch.linspace(1.0, 1 / steps, steps).tolist()
            scheduler = make_scheduler(sampler, self._scheduler)
            made = make_schedule(scheduler, steps, sigmas=noise_levels, mu=_shift(config, tokens))
            self._schedules[key] = made.to(self.device)
        return self._schedules[key]

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        context, added = conditioning
        velocity = self._forwards[lane](
            latents.to(self.dtype), (1000 - timesteps) / 1000, context, added["rope"], added["masked"]
        )
        return -velocity.float()

    # -- pixels ----------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, request: RunRequest) -> np.ndarray:
        """Decode one image a call, so that its bits never depend on other images."""
        scaled = latents[None] / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)
        return finished_pixels(self.vae.decode(scaled.to(self.vae.dtype), return_dict=False)[0][0], request)


def _refuse_wrong_pairs(pipeline: Any) -> None:
    """Raise ValueError on parts that do not fit the transformer."""
    transformer, encoder, tokenizer = pipeline.transformer.config, pipeline.text_encoder.config, pipeline.tokenizer
    if transformer.get("siglip_feat_dim") is not None or list(transformer.all_patch_size) != [PATCH]:
        raise ValueError("the transformer is of another Z-Image, such as Omni, which this service does not run")
    if (latent := getattr(pipeline.vae.config, "latent_channels", 4)) != transformer.in_channels:
        raise ValueError(
            f"the transformer takes {transformer.in_channels} channels and the VAE makes {latent}: name the VAE that it "
            "was trained with as `vae:`"
        )
    if encoder.hidden_size != transformer.cap_feat_dim:
        raise ValueError(
            f"the transformer takes captions {transformer.cap_feat_dim} wide and the text encoder makes "
            f"{encoder.hidden_size}: name the Qwen3 that it was trained with as `text_encoder:`"
        )
    if not tokenizer.chat_template or len(tokenizer) > encoder.vocab_size:
        template = "a" if tokenizer.chat_template else "no"
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and {template} chat template, and the text encoder knows "
            f"{encoder.vocab_size}: name the text encoder's own as `tokenizer:`"
        )


def _shift(config: Any, tokens: int) -> float:
    """Return the schedule's shift for an image of so many tokens: larger ones are noised more (Esser et al. 2024)."""
    few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return low + (high - low) * (tokens - few) / (many - few)


def _use(kept: OrderedDict[Any, Any], key: object, most: int) -> None:
    """Mark a key as used last, and drop those used longest ago beyond `most`."""
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _on_device(module: Any, device: torch.device) -> Any:
    return module.to(device).eval().requires_grad_(False)


def z_image_components(folder: Path) -> dict[str, Component]:
    """Return the components of a base model that a diffusers folder describes, without weights."""
    return {
        "transformer": z_image_component(make_part(folder, "transformer")),
        "text_encoder": qwen_component(make_part(folder, "text_encoder")),
    }


def z_image_component(plain: Any) -> Component:
    """Return the component over the layers of diffusers' transformer."""
    transformer = ZImageTransformer(plain)
    layers = wrap_layers(transformer)
    aliases: dict[str, str] = {}
    for layer in layers:
        for ours, original in _ORIGINAL_NAMES.items():
            if ours in layer:
                aliases[layer.replace(ours, original)] = layer
    blocks = [layer.removesuffix(".to_q") for layer in layers if layer.endswith(".to_q")]
    fused = {f"{block}.qkv": [f"{block}.to_{part}" for part in "qkv"] for block in blocks}
    return Component(transformer, layers, aliases, ("lora_unet_", "lora_transformer_"), fused)


def qwen_component(encoder: Any) -> Component:
    """Return the component of a Qwen3 language model without its head, which encodes nothing."""
    encoder = getattr(encoder, "model", encoder)
    layers = wrap_layers(encoder)
    prefixes = ("lora_te_", "lora_te1_", "text_encoders.qwen3_4b.transformer.", "text_encoders.qwen3_4b.")
    return Component(encoder, layers, {f"model.{layer}": layer for layer in layers}, prefixes)
