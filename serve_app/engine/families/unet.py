"""Stable Diffusion 1.x, 2.x and XL: a UNet with cross attention, CLIP text encoders and a VAE.

The only place that meets diffusers' and transformers' untyped objects, besides `checkpoint.py`, `sampler.py` and `text.py`.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from serve_app.engine.adapters_file import LayerTable
from serve_app.engine.families.checkpoint import Source, load_pipeline
from serve_app.engine.families.sgm import sgm_aliases
from serve_app.engine.layers import wrap_layers
from serve_app.engine.lora import SlotBank
from serve_app.engine.options import EngineOptions
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import Sampler, Schedule, make_schedule, sampler_of
from serve_app.engine.text import Encoded, TextEncoder, encode_prompt, pad_chunks

ENCODED_PROMPTS_KEPT = 256
GRAPHS = 1024
"""Compiled forward shapes kept: batch keys (latent shape, prompt length) times row counts."""


class UNetFamily:
    """One loaded base model. Rows of every batch it is given keep to themselves."""

    def __init__(self, pipeline: Any, options: EngineOptions) -> None:
        self.device, self.dtype = options.torch_device, options.torch_dtype
        self.unet = pipeline.unet.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        self.vae = pipeline.vae.to(self.device, memory_format=torch.channels_last).eval().requires_grad_(False)
        if self.vae.dtype != self._vae_dtype(self.vae):
            self.vae.to(self._vae_dtype(self.vae))
        self.encoders = self._encoders(pipeline)
        self._scheduler_config = dict(pipeline.scheduler.config)
        self.sampler = Sampler(options.sampler) if options.sampler else self._own_sampler(pipeline.scheduler)
        self._zero_negative = bool(pipeline.config.get("force_zeros_for_empty_prompt", False))
        self._schedules: dict[tuple[Sampler, int], Schedule] = {}
        self._encoded: OrderedDict[tuple[str, str, float], Encoded] = OrderedDict()
        modules: dict[str, nn.Module] = {"unet": self.unet} | {
            name: encoder.model
            for name, encoder in zip(("text_encoder", "text_encoder_2"), self.encoders, strict=False)
        }
        self.layers = {name: wrap_layers(module) for name, module in modules.items()}
        self._denoiser = _compiled(self.unet, options.compile) if options.compile else self.unet
        self.table = LayerTable(self.layers, sgm_aliases(self.layers["unet"], self.unet.config.layers_per_block))

    @classmethod
    def load(cls, source: Source, options: EngineOptions) -> "UNetFamily":
        return cls(load_pipeline(source, options.torch_dtype), options)

    # -- prompts ---------------------------------------------------------------------------------------------------

    def encode(self, request: RunRequest, banks: Mapping[str, SlotBank], slot: int, adapter_id: str) -> Conditioning:
        """What the denoiser is told for this run. `adapter_id` is empty where the adapter leaves the text encoders alone."""
        for name, bank in banks.items():
            if name != "unet":
                bank.bind([slot], [request.weight])

        def encoded(text: str) -> Encoded:
            return self._encode_cached(text, adapter_id, request.weight)

        positive = encoded(request.prompt)
        if not self.guided(request):
            return self._conditioning([positive], request)
        if self._zero_negative and not request.negative_prompt:
            pooled = None if positive.pooled is None else torch.zeros_like(positive.pooled)
            return self._conditioning([Encoded(torch.zeros_like(positive.chunks), pooled), positive], request)
        negative = encoded(request.negative_prompt)
        chunks = max(len(positive.chunks), len(negative.chunks))
        both = [pad_chunks(side, chunks, lambda: encoded("")) for side in (negative, positive)]
        return self._conditioning(both, request)

    def guided(self, request: RunRequest) -> bool:
        """Whether a run takes two rows. A distilled UNet is told its guidance instead (Meng et al. 2023)."""
        return request.guidance > 1 and self.unet.config.time_cond_proj_dim is None

    def _encode_cached(self, text: str, adapter_id: str, weight: float) -> Encoded:
        key = (text, adapter_id, weight if adapter_id else 0.0)
        if key not in self._encoded:
            self._encoded[key] = encode_prompt(self.encoders, text)
        self._encoded.move_to_end(key)
        while len(self._encoded) > ENCODED_PROMPTS_KEPT:
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
            added["timestep_cond"] = guidance_embedding(request.guidance - 1, self.unet.config.time_cond_proj_dim)
            added["timestep_cond"] = added["timestep_cond"].expand(len(sides), -1).to(self.device, self.dtype)
        return Conditioning(context, added)

    @property
    def usual_targets(self) -> list[str]:
        """The UNet's layers that most adapters change: those of the transformer blocks."""
        return [name for name in self.layers["unet"] if ".attentions." in name]

    # -- noise and steps -------------------------------------------------------------------------------------------

    @property
    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        """Channels, height, width; a size that the factor does not divide is made one up, and cropped after decoding."""
        factor = self.pixels_per_latent
        return self.unet.config.in_channels, math.ceil(request.height / factor), math.ceil(request.width / factor)

    def schedule(self, name: str | None, steps: int) -> Schedule:
        """Raises ValueError on an unknown sampler, or one that this model's schedule cannot drive."""
        sampler = Sampler(name) if name else self.sampler
        if (sampler, steps) not in self._schedules:
            made = make_schedule(sampler, self._scheduler_config, steps)
            self._schedules[sampler, steps] = made._replace(
                table=made.table.to(self.device), timesteps=made.timesteps.to(self.device)
            )
        return self._schedules[sampler, steps]

    def denoise(self, latents: Tensor, timesteps: Tensor, context: Tensor, added: dict[str, Tensor]) -> Tensor:
        """The UNet's answer, float32: latents [rows, channels, height, width], timesteps [rows], context [rows, tokens, width]."""
        extra = {name: tensor for name, tensor in added.items() if name != "timestep_cond"}
        answer = self._denoiser(
            latents.to(self.dtype, memory_format=torch.channels_last),
            timesteps,
            context,
            timestep_cond=added.get("timestep_cond"),
            added_cond_kwargs=extra or None,
            return_dict=False,
        )
        return answer[0].float()

    # -- pixels ----------------------------------------------------------------------------------------------------

    def decode(self, latents: Tensor, width: int, height: int) -> np.ndarray:
        """uint8 [height, width, 3] of latents [channels, …]. One image a call: its bits are the same in any company.

        Raises FloatingPointError when the decoder overflows: clamped, its numbers would be a black image.
        """
        scaled = latents[None] / self.vae.config.scaling_factor
        mean, std = getattr(self.vae.config, "latents_mean", None), getattr(self.vae.config, "latents_std", None)
        if mean is not None and std is not None:
            scaled = scaled * latents.new_tensor(std).view(1, -1, 1, 1) + latents.new_tensor(mean).view(1, -1, 1, 1)
        pixels = self.vae.decode(scaled.to(self.vae.dtype), return_dict=False)[0][0].float()
        if not bool(pixels.isfinite().all()):
            raise FloatingPointError("the decoded image has numbers that are not finite")
        eight_bit = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        top, left = (eight_bit.shape[0] - height) // 2, (eight_bit.shape[1] - width) // 2
        return np.ascontiguousarray(eight_bit[top : top + height, left : left + width])

    # -- loading ---------------------------------------------------------------------------------------------------

    def _vae_dtype(self, vae: Any) -> torch.dtype:
        """SDXL's VAE overflows in float16, and says so in its config."""
        return (
            torch.float32 if self.dtype == torch.float16 and getattr(vae.config, "force_upcast", False) else self.dtype
        )

    def _encoders(self, pipeline: Any) -> list[TextEncoder]:
        pairs = [(pipeline.tokenizer, pipeline.text_encoder)]
        if hasattr(pipeline, "text_encoder_2"):
            pairs.append((pipeline.tokenizer_2, pipeline.text_encoder_2))
        is_xl = len(pairs) == 2
        ready = (
            (tokenizer, model.to(self.device).eval().requires_grad_(False))
            for tokenizer, model in pairs
            if model is not None
        )
        return [TextEncoder(tokenizer, model, penultimate=is_xl) for tokenizer, model in ready]

    @staticmethod
    def _own_sampler(scheduler: Any) -> Sampler:
        """The folder's own where we have it; DPM++ 2M for the multistep schedulers of old folders (PNDM, LMS)."""
        return sampler_of(type(scheduler).__name__) or Sampler.DPMPP_2M


def _compiled(unet: nn.Module, backend: str) -> Any:
    """One graph for every shape: by default torch gives up after eight and goes on without, and says so only in its log."""
    limits = torch._dynamo.config  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage, reportAttributeAccessIssue]
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, GRAPHS)
    return torch.compile(unet, backend=backend, dynamic=False)


def guidance_embedding(guidance: float, width: int) -> Tensor:
    """Sinusoids of 1000·guidance, [1, width] (Meng et al. 2023; diffusers' `get_guidance_scale_embedding`)."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(10000.0) / (half - 1)))
    angles = 1000.0 * guidance * frequencies[None]
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))
