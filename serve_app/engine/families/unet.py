"""Stable Diffusion 1.x, 2.x and XL: a UNet with cross attention, CLIP text encoders and a VAE.

The families, `checkpoint.py`, `single_file.py`, `clip_text.py` and `sampler.py` alone meet the untyped objects of
diffusers and transformers.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from serve_app.domain.families import UNET_SAMPLERS
from serve_app.domain.guidance import WHOLE
from serve_app.domain.jobs import ALL_READ, Unread
from serve_app.domain.prompt_weights import Part, literal, weighted
from serve_app.domain.samplers import parse_sampler
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import Source, as_checkpoint, load_pipeline, make_part
from serve_app.engine.families.clip_text import Encoded, TextEncoder, clip_aliases, encode_prompt, pad_chunks
from serve_app.engine.families.family import Pause, Placement, latent_rgb, limit_decoding, no_pause
from serve_app.engine.families.unet_blocks import run_constants, use_blocks, use_kernels
from serve_app.engine.kernels import unet_kernels
from serve_app.engine.lanes import Component, lanes_over
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import MAX_SCHEDULES, NoSteps, Schedule, make_schedule, make_scheduler
from serve_app.engine_options import EngineOptions

PREFIXES = {
    "unet": ("lora_unet_",),
    "text_encoder": ("lora_te_", "lora_te1_", "clip_l.", "text_encoders.clip_l.transformer."),
    "text_encoder_2": ("lora_te2_", "clip_g.", "text_encoders.clip_g.transformer."),
}
"""kohya, OneTrainer and ComfyUI write these before the names of a component's layers."""
USUAL_STEPS = 30
"""A schedule of this many steps is made at load, so that a scheduler that cannot be drawn is refused there."""
MAX_ENCODED_CHUNKS = 512
"""Encoded prompts of at most this many chunks are kept for further runs, 160 MB for SDXL. What was used longest ago
goes first."""


class UNetFamily:
    """One loaded base model of the family; see `Family`."""

    denoiser, begins_from_images = "unet", True

    def __init__(
        self,
        pipeline: Any,
        options: EngineOptions,
        *,
        sampler: str = "",
        clip_skip: int = 0,
        placement: Placement | None = None,
    ) -> None:
        placement = placement or Placement()
        self.device, self.dtype = torch_device(options), torch_dtype(options)
        self.unet = pipeline.unet.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        self.vae = pipeline.vae.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        if self.vae.dtype != self._vae_dtype(self.vae):
            self.vae.to(self._vae_dtype(self.vae))
        limit_decoding(self.vae, placement.decoding_bytes)
        mean, deviation = self._latent_statistics(self.vae.config)
        self.autoencoder = Autoencoder(self.vae, factor=self.vae.config.scaling_factor, deviation=deviation, mean=mean)
        self.encoders = self._load_encoders(
            pipeline, torch.device("cpu") if placement.encoders_on_host else self.device
        )
        self._scheduler = pipeline.scheduler
        self._embed_guidance = pipeline.get_guidance_scale_embedding
        self.sampler = sampler or options.sampler
        self._clip_skip = self._checked_skip(clip_skip)
        self._zero_negative = bool(pipeline.config.get("force_zeros_for_empty_prompt", False))
        self._schedule = lru_cache(MAX_SCHEDULES)(self._made_schedule)
        self._schedule(self.sampler, USUAL_STEPS, 0)
        self._encoded: OrderedDict[tuple[tuple[Part, ...], str, float, int], Encoded] = OrderedDict()
        self.latent_rgb = latent_rgb(
            type(self.vae).__name__, self.unet.config.in_channels, is_xl="text_encoder_2" in self.encoders
        )
        kernels = unet_kernels(options)
        use_kernels(self.unet, kernels)
        use_kernels(self.vae, kernels)
        self._crosses = use_blocks(self.unet)
        self.components = {"unet": unet_component(self.unet)}
        self.components |= {name: encoder_component(name, encoder.model) for name, encoder in self.encoders.items()}
        self.common_targets = [name for name in self.components["unet"].layers if ".attentions." in name]
        self.lanes = lanes_over(self.components["unet"], options)

    @classmethod
    def load(cls, source: Source, options: EngineOptions, placement: Placement | None = None) -> Self:
        told, pipeline = as_checkpoint(source), load_pipeline(source, torch_dtype(options))
        return cls(pipeline, options, sampler=told.sampler, clip_skip=told.clip_skip, placement=placement)

    @classmethod
    def meta_components(cls, folder: Path) -> dict[str, Component]:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        encoders = [name for name in ("text_encoder", "text_encoder_2") if index.get(name) and index[name][1]]
        return {
            "unet": unet_component(make_part(folder, "unet")),
            **{name: encoder_component(name, make_part(folder, name)) for name in encoders},
        }

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self.unet, self.vae, *(encoder.model for encoder in self.encoders.values())]

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        read = weighted if request.prompt_weights else literal

        def encoded(text: str, clip_skip: int = 0) -> Encoded:
            return self._encode_cached(read(text), adapter_id, request.scale, clip_skip, pause)

        positive = encoded(request.prompt, self._clip_skip)  # diffusers' pipelines skip none for negative prompts
        if not self._is_guided(request):
            return self._conditioning([positive], request)
        if self._zero_negative and not request.negative_prompt:
            pooled = None if positive.pooled is None else torch.zeros_like(positive.pooled)
            return self._conditioning([Encoded(torch.zeros_like(positive.chunks), pooled), positive], request)
        negative = encoded(request.negative_prompt)
        chunks = max(len(positive.chunks), len(negative.chunks))
        negative = pad_chunks(negative, chunks, lambda: encoded(""))
        positive = pad_chunks(positive, chunks, lambda: encoded("", self._clip_skip))
        return self._conditioning([negative, positive], request)

    def _is_guided(self, request: RunRequest) -> bool:
        """Return whether a run needs two rows.

        A distilled UNet takes its guidance as an input instead (Meng et al. 2023).
        """
        return request.guidance > 1 and self.unet.config.time_cond_proj_dim is None

    def _encode_cached(
        self, parts: tuple[Part, ...], adapter_id: str, scale: float, clip_skip: int, pause: Pause
    ) -> Encoded:
        key = (parts, adapter_id, scale if adapter_id else 0.0, clip_skip)
        if key not in self._encoded:
            made = encode_prompt(list(self.encoders.values()), parts, clip_skip, pause)
            self._encoded[key] = Encoded(
                made.chunks.to(self.device), None if made.pooled is None else made.pooled.to(self.device)
            )
        self._encoded.move_to_end(key)
        while len(self._encoded) > 1 and sum(len(each.chunks) for each in self._encoded.values()) > MAX_ENCODED_CHUNKS:
            self._encoded.popitem(last=False)
        return self._encoded[key]

    def _conditioning(self, sides: Sequence[Encoded], request: RunRequest) -> Conditioning:
        context = torch.stack([side.chunks.flatten(0, 1) for side in sides]).to(self.dtype)
        added: dict[str, Tensor] = {}
        if self.unet.config.addition_embed_type == "text_time":
            _, height, width = self.latent_shape(request)
            size = (height * self.pixels_per_latent, width * self.pixels_per_latent)
            added["text_embeds"] = torch.cat([side.pooled for side in sides if side.pooled is not None]).to(self.dtype)
            added["time_ids"] = torch.tensor([[*size, 0, 0, *size]] * len(sides), device=self.device, dtype=self.dtype)
        if self.unet.config.time_cond_proj_dim is not None:
            if (request.guidance_start, request.guidance_end) != WHOLE:
                raise ValueError("guidance_start: this base model is told its guidance at every step; leave it out")
            guidance = torch.tensor([request.guidance - 1] * len(sides))
            embedded = self._embed_guidance(guidance, self.unet.config.time_cond_proj_dim)
            added["timestep_cond"] = embedded.to(self.device, self.dtype)
        return Conditioning(context, added)

    def unread(self, request: RunRequest) -> Unread:
        del request  # CLIP reads texts of any length, chunk by chunk
        return ALL_READ

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        if not self._crosses:
            return conditioning
        context, added = conditioning.context, conditioning.added
        constants = run_constants(self.unet, self._crosses, context, added)
        kept = {name: added[name] for name in added if name == "timestep_cond"}
        return conditioning._replace(added=constants | kept)

    # -- noise and steps -------------------------------------------------------------------------------------------

    @property
    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        """Return the latents' channels, height and width; the sides are rounded up, and decoding crops the picture."""
        factor = self.pixels_per_latent
        return self.unet.config.in_channels, math.ceil(request.height / factor), math.ceil(request.width / factor)

    def schedule(self, request: RunRequest) -> Schedule:
        skipped = 0 if request.image is None else request.steps - int(request.steps * request.strength)
        return self._schedule(request.sampler or self.sampler, request.steps, skipped)

    def _made_schedule(self, sampler: str, steps: int, skipped: int) -> Schedule:
        """Return a schedule of the named sampler, or of the base model's own. Raises ValueError with the choices."""
        if sampler and hasattr(self._scheduler, "precondition_outputs"):
            raise ValueError(f"sampler {sampler}: an EDM model draws with its own scheduler only; leave `sampler:` out")
        try:
            if sampler and parse_sampler(sampler)[0] not in UNET_SAMPLERS:
                raise ValueError(f"sampler {sampler} is for another family")
            scheduler = make_scheduler(sampler, self._scheduler)
            return make_schedule(scheduler, steps, skipped=skipped).to(self.device)
        except NoSteps:
            raise
        except ValueError as error:
            raise ValueError(f"{error}; sampler: may be one of {', '.join(UNET_SAMPLERS)}") from error

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        added = dict(conditioning.added)
        timestep_cond, keys_values = added.pop("timestep_cond", None), added.pop("keys_values", None)
        answer = self.lanes[lane].module(
            latents.to(self.dtype, memory_format=torch.channels_last),
            timesteps,
            conditioning.context,
            timestep_cond=timestep_cond,
            cross_attention_kwargs=None if keys_values is None else {"keys_values": keys_values},
            added_cond_kwargs=added or None,
            return_dict=False,
        )
        return answer[0].float()

    # -- loading ---------------------------------------------------------------------------------------------------

    def _vae_dtype(self, vae: Any) -> torch.dtype:
        """SDXL's VAE overflows in float16, and its config says so."""
        return (
            torch.float32 if self.dtype == torch.float16 and getattr(vae.config, "force_upcast", False) else self.dtype
        )

    def _latent_statistics(self, config: Any) -> tuple[Tensor | float, Tensor | float]:
        """Return the mean and the deviation of the VAE's latents where its config tells both."""
        mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        if mean is None or deviation is None:
            return 0.0, 1.0
        mean, deviation = torch.tensor([mean, deviation], device=self.device)[..., None, None]
        return mean, deviation

    def _load_encoders(self, pipeline: Any, device: torch.device) -> dict[str, TextEncoder]:
        pairs = {"text_encoder": (pipeline.tokenizer, pipeline.text_encoder)}
        if hasattr(pipeline, "text_encoder_2"):
            pairs["text_encoder_2"] = (pipeline.tokenizer_2, pipeline.text_encoder_2)
        is_xl = len(pairs) == 2
        return {
            name: TextEncoder(tokenizer, model.to(device).eval().requires_grad_(False), penultimate=is_xl)
            for name, (tokenizer, model) in pairs.items()
        }

    def _checked_skip(self, clip_skip: int) -> int:
        layers = min(encoder.model.config.num_hidden_layers for encoder in self.encoders.values())
        if not 0 <= clip_skip < layers:
            raise ValueError(
                f"clip_skip: must be 0 to {layers - 1} for text encoders of {layers} layers, not {clip_skip}"
            )
        return clip_skip


def unet_component(unet: Any) -> Component:
    layers = wrap_layers(unet)
    return Component(unet, layers, sgm_aliases(layers, unet.config.layers_per_block), PREFIXES["unet"])


def encoder_component(name: str, encoder: Any) -> Component:
    layers = wrap_layers(encoder)
    return Component(encoder, layers, clip_aliases(layers), PREFIXES[name])


RESNET_PARTS = {
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
TOP_LAYERS = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_BLOCK = re.compile(r"(down_blocks|up_blocks)\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.+)")
_MIDDLE = re.compile(r"mid_block\.(resnets|attentions)\.(\d+)\.(.+)")


def sgm_aliases(layers: Iterable[str], layers_per_block: int | list[int]) -> dict[str, str]:
    """Map names of the original code (SGM), which many SDXL files still use, to ours for every layer that has one."""
    if not isinstance(layers_per_block, int):
        if len(set(layers_per_block)) != 1:
            return {}
        layers_per_block = layers_per_block[0]
    names = list(layers)
    cross = {
        match[2]
        for name in names
        if (match := _BLOCK.match(name)) and match[1] == "up_blocks" and match[3] == "attentions"
    }
    aliases = {_sgm_name(name, layers_per_block, cross): name for name in names}
    aliases.pop("", None)
    return aliases


def _sgm_name(name: str, depth: int, up_blocks_with_attention: set[str]) -> str:
    if name in TOP_LAYERS:
        return TOP_LAYERS[name]
    if match := _MIDDLE.match(name):
        kind, index, rest = match.groups()
        is_resnet = kind == "resnets"
        return (
            f"middle_block.{2 * int(index) if is_resnet else 1}.{RESNET_PARTS.get(rest, rest) if is_resnet else rest}"
        )
    if not (match := _BLOCK.match(name)):
        return ""
    side, block, kind, index, rest = match.groups()
    first = int(block) * (depth + 1)
    where = f"input_blocks.{1 + first + int(index)}" if side == "down_blocks" else f"output_blocks.{first + int(index)}"
    match kind:
        case "resnets":
            return f"{where}.0.{RESNET_PARTS.get(rest, rest)}"
        case "attentions":
            return f"{where}.1.{rest}"
        case "downsamplers":
            return f"input_blocks.{1 + first + depth}.0.op"
        case _:
            return f"output_blocks.{first + depth}.{2 if block in up_blocks_with_attention else 1}.conv"
