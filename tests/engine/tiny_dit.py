"""A second model family: a tiny random diffusion transformer of Flux's architecture, flow matching.

Its latents are packed into tokens with positional ids, its schedule depends on the image size, its text has masked
padding, and its guidance is either an input of the denoiser (one row) or classifier-free (two rows).
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.domain.prompt_weights import literal
from serve_app.domain.samplers import Sampler
from serve_app.engine.component import Component
from serve_app.engine.device import torch_device, torch_dtype
from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import Source
from serve_app.engine.families.clip_text import TextEncoder, clip_aliases, encode_prompt, tokenize
from serve_app.engine.families.family import LatentRGB, Pause, Placement, no_pause
from serve_app.engine.lanes import lanes_over
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import Schedule, make_schedule
from serve_app.engine_options import EngineOptions
from tests.engine.tiny_models import diffusers, tiny_clip, tiny_vae, transformers

PIPELINE_CLASS = "TinyDiTPipeline"
PATCH = 2
"""Latent cells per side of a token."""


def write_dit(folder: Path, *, embeds_guidance: bool, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    encoder, tokenizer = tiny_clip(folder / "vocabulary")
    parts = {
        "transformer": diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * PATCH**2,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            guidance_embeds=embeds_guidance,
            axes_dims_rope=(4, 4, 8),
        ),
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "vae": tiny_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE_CLASS}))
    return folder


def image_shift(tokens: int) -> float:
    """Flux's mu: a larger image is noised more (Esser et al. 2024, section 5.3.2)."""
    return 0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256)


def noise_levels(steps: int) -> list[float]:
    return np.linspace(1.0, 1 / steps, steps).tolist()


class TinyDiTFamily:
    denoiser, begins_from_images = "transformer", True

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        self.device, self.dtype = torch_device(options), torch_dtype(options)

        def module(kind: Any, name: str) -> Any:
            return kind.from_pretrained(folder / name).to(self.device, self.dtype).eval().requires_grad_(False)

        self.transformer = module(diffusers.FluxTransformer2DModel, "transformer")
        self.vae = module(diffusers.AutoencoderKL, "vae")
        self.autoencoder = Autoencoder(self.vae, factor=self.vae.config.scaling_factor)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer")
        encoder = TextEncoder(
            tokenizer, module(transformers.CLIPTextModelWithProjection, "text_encoder"), penultimate=False
        )
        self.encoder = encoder
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        layers, text_layers = wrap_layers(self.transformer), wrap_layers(encoder.model)
        self.components = {
            "transformer": Component(self.transformer, layers, {}, ("lora_transformer_",)),
            "text_encoder": Component(encoder.model, text_layers, clip_aliases(text_layers), ("lora_te1_",)),
        }
        self.lanes = lanes_over(self.components["transformer"], options)
        self.latent_rgb: LatentRGB | None = None
        self.common_targets: Sequence[str] = [name for name in layers if ".attn." in name]

    @classmethod
    def load(cls, source: Source, options: EngineOptions, _: Placement | None) -> "TinyDiTFamily":
        assert isinstance(source, Path)
        return cls(source, options)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return [self.transformer, self.vae, self.encoder.model]

    def encode(self, request: RunRequest, adapter_id: str, pause: Pause = no_pause) -> Conditioning:
        embedded = self.transformer.config.guidance_embeds
        is_guided = request.guidance > 1 and not embedded
        prompts = [request.negative_prompt, request.prompt] if is_guided else [request.prompt]
        encoded = [encode_prompt([self.encoder], literal(prompt)) for prompt in prompts]
        added = {
            "pooled": torch.cat([one.pooled for one in encoded if one.pooled is not None]),
            "tokens": torch.tensor([token_count(self.encoder, prompt) for prompt in prompts], device=self.device),
        }
        if embedded:
            added["guidance"] = torch.full((1,), request.guidance, device=self.device)
        return Conditioning(torch.cat([one.chunks[:1] for one in encoded]), added)

    def prepare(self, conditioning: Conditioning) -> Conditioning:
        return conditioning

    def schedule(self, request: RunRequest) -> Schedule:
        if request.sampler not in (None, Sampler.FLOW_EULER):
            raise ValueError(f"sampler {request.sampler}: this base model uses flow-euler")
        _, height, width = self.latent_shape(request)
        levels = noise_levels(request.steps)
        mu = image_shift(height * width // PATCH**2)
        return make_schedule(self.scheduler, request.steps, sigmas=levels, mu=mu).to(self.device)

    def latent_shape(self, request: RunRequest) -> tuple[int, ...]:
        side = 8 * PATCH
        return 4, PATCH * math.ceil(request.height / side), PATCH * math.ceil(request.width / side)

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        height, width = latents.shape[2:]
        context, added = conditioning.context, conditioning.added
        masked = context * (torch.arange(context.shape[1], device=self.device) < added["tokens"][:, None])[..., None]
        velocity = self.lanes[lane].module(
            hidden_states=pack(latents.to(self.dtype)),
            timestep=timesteps / 1000,
            guidance=added.get("guidance"),
            pooled_projections=added["pooled"],
            encoder_hidden_states=masked,
            txt_ids=torch.zeros(context.shape[1], 3, device=self.device),
            img_ids=position_ids(height, width).to(self.device),
            return_dict=False,
        )[0]
        return unpack(velocity, height, width).float()


def token_count(encoder: TextEncoder, prompt: str) -> int:
    """Tokens of a prompt's first window up to its end token; the rest is padding."""
    ids = tokenize(encoder, literal(prompt))[0].ids
    return ids.index(encoder.tokenizer.eos_token_id) + 1


def pack(latents: Tensor) -> Tensor:
    """[rows, channels, height, width] as tokens [rows, height · width / 4, channels · 4]."""
    rows, channels, height, width = latents.shape
    patches = latents.view(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(rows, -1, channels * PATCH**2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    rows, _, size = tokens.shape
    patches = tokens.view(rows, height // PATCH, width // PATCH, size // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)


def position_ids(height: int, width: int) -> Tensor:
    """Row and column of every token, [tokens, 3]."""
    rows, columns = torch.meshgrid(torch.arange(height // PATCH), torch.arange(width // PATCH), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()
