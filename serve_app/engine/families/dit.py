"""What families of diffusion transformers share: a Qwen3 that reads prompts, flow matching, and operators of blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.domain.jobs import Unread
from serve_app.domain.samplers import Sampler, parse_sampler
from serve_app.engine.attention import Attends
from serve_app.engine.device import torch_device, torch_dtype, upload
from serve_app.engine.families.autoencoder import Autoencoder
from serve_app.engine.families.checkpoint import (
    DIT_PARTS,
    Source,
    as_checkpoint,
    language_model,
    load_dit_pipeline,
    make_part,
)
from serve_app.engine.families.family import Placement, latent_rgb, limit_decoding
from serve_app.engine.families.qwen_vae import of_images
from serve_app.engine.families.single_file import Convert
from serve_app.engine.kernels import transformer_kernels
from serve_app.engine.lanes import Component, lanes_over
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import Conditioning, RunRequest
from serve_app.engine.sampler import MAX_SCHEDULES, Schedule, make_schedule, make_scheduler
from serve_app.engine_options import EngineOptions

PATCH = 2
"""Cells of the VAE's latents per side of a token."""
MAX_TOKENS = 512
"""A prompt in its chat template is cut at this many tokens, as diffusers' pipelines do."""
CAPTION_BUCKETS = (64, 128, 256, MAX_TOKENS)
"""Runs share forward passes where the longer of their two captions fits the same of these counts of tokens."""
MAX_PLACES = 32
"""How many places of tokens are kept, one for each image size and caption length: 2.5 MB each for 1024²."""
Turn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
USUAL_STEPS = 8
"""A schedule of this many steps is made at load, so that a scheduler that cannot be drawn is refused there."""


class TransformerFamily(ABC):
    """A transformer over tokens of an image and of its caption, trained by flow matching; see `Family`.

    It serves any architecture whose pipeline of diffusers has a Qwen3 as its only text encoder, unless a subclass names
    others. A subclass has what is particular to one.
    """

    denoiser = "transformer"

    begins_from_images = True
    parts: Sequence[str] = DIT_PARTS
    """The parts of its pipeline that are loaded."""
    convert: Convert
    """The function from the names in single files to diffusers'."""
    thinking = True
    """Whether the chat template asks for an answer that begins with thoughts."""
    room = MAX_TOKENS
    """How many tokens are read of a prompt and what stands around it."""
    max_encoded_prompts = 128
    """How many encoded prompts are kept for further runs; what was used longest ago goes first. Z-Image's longest takes
    2.6 MB."""

    def __init__(
        self, pipeline: Any, options: EngineOptions, *, sampler: str = "", placement: Placement | None = None
    ) -> None:
        placement = placement or Placement()
        self.device, self.dtype = torch_device(options), torch_dtype(options)
        encoder_device = torch.device("cpu") if placement.encoders_on_host else self.device
        self.components = {
            "transformer": self.component(_on_device(pipeline.transformer, self.device)),
            **self.encoders(lambda name: _on_device(language_model(getattr(pipeline, name)), encoder_device)),
        }
        self.transformer: Any = self.components["transformer"].module
        kernels = transformer_kernels(options)
        for layer in self.transformer.modules():
            if isinstance(layer, AttendsByPlace) and kernels is not None:
                layer.turn = kernels.turn
        self.text_encoder: Any = self.components["text_encoder"].module
        self.vae = _on_device(of_images(pipeline.vae), self.device)
        if self.dtype == torch.float16 and self.vae.config.get("force_upcast", False):
            self.vae.to(torch.float32)
        limit_decoding(self.vae, placement.decoding_bytes)
        self.autoencoder = self.make_autoencoder()
        self.tokenizer, self.scheduler = pipeline.tokenizer, pipeline.scheduler
        self.sampler = sampler or options.sampler
        self._schedule = lru_cache(MAX_SCHEDULES)(self._made_schedule)
        self._schedule(self.sampler, USUAL_STEPS, 0, 4096)
        self.encoded = lru_cache(self.max_encoded_prompts)(self._encoded)
        self.places = lru_cache(MAX_PLACES)(self._places)
        self.latent_rgb = latent_rgb(type(pipeline.vae).__name__, self.vae.config.latent_channels, is_xl=False)
        self.common_targets: Sequence[str] = [
            name for name in self.components["transformer"].layers if self.is_common_target(name)
        ]
        self.lanes = lanes_over(self.components["transformer"], options)

    @classmethod
    def load(cls, source: Source, options: EngineOptions, placement: Placement | None = None) -> Self:
        checkpoint = as_checkpoint(source)
        if checkpoint.clip_skip:
            raise ValueError("clip_skip: is for CLIP's text encoders, and this base model has none; leave it out")
        pipeline = load_dit_pipeline(source, torch_dtype(options), cls.convert, cls.parts)
        try:
            cls.refuse_wrong_pairs(pipeline)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from error
        return cls(pipeline, options, sampler=checkpoint.sampler, placement=placement)

    @classmethod
    def meta_components(cls, folder: Path) -> dict[str, Component]:
        """Return the components of a base model that a diffusers folder describes, without weights."""
        return {
            "transformer": cls.component(make_part(folder, "transformer")),
            **cls.encoders(partial(make_part, folder)),
        }

    # -- what each architecture says of itself -----------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def component(plain: Any) -> Component:
        """Return the component over the layers of diffusers' transformer, which may be on the meta device."""

    @staticmethod
    def encoders(part: Callable[[str], Any]) -> dict[str, Component]:
        """Return the components of the text encoders by the pipeline's names of them, of which `part` gives each."""
        return {"text_encoder": qwen_component(part("text_encoder"))}

    @staticmethod
    @abstractmethod
    def refuse_wrong_pairs(pipeline: Any) -> None:
        """Raise ValueError on parts that do not fit the transformer."""

    @staticmethod
    @abstractmethod
    def is_common_target(layer: str) -> bool:
        """Return whether most adapters change a layer of the transformer."""

    def shift(self, tokens: int, steps: int) -> float | None:
        """Return the schedule's shift for an image of `tokens` tokens; None where it is the same for all.

        Larger images are noised more (Esser et al. 2024), whatever the steps.
        """
        del steps
        config = self.scheduler.config
        few, many = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        return low + (high - low) * (tokens - few) / (many - few)

    def noise_levels(self, steps: int) -> Sequence[float]:
        """Return the noise levels of so many steps, before the scheduler shifts them."""
        return torch.linspace(1.0, 1 / steps, steps).tolist()

    def make_autoencoder(self) -> Autoencoder:
        """Return the VAE with this family's scaling."""
        config = self.vae.config
        return Autoencoder(self.vae, factor=config.scaling_factor, mean=config.shift_factor or 0.0)

    @abstractmethod
    def hidden_states(self, prompt: str) -> Tensor:
        """Return what the transformer takes of a prompt, [tokens, width]."""

    # -- prompts and places ------------------------------------------------------------------------------------------

    def _encoded(self, prompt: str, adapter_id: str, scale: float) -> Tensor:
        del adapter_id, scale  # the cache tells encodings apart by them
        return self.hidden_states(prompt).to(self.device, self.dtype)

    def captions(self, prompts: Sequence[str], request: RunRequest, adapter_id: str) -> list[Tensor]:
        """Return the hidden states [tokens, width] of each prompt; those used last are kept.

        Raises ValueError for weighted prompts.
        """
        if request.prompt_weights:
            raise ValueError("prompt_weights: are for CLIP's text encoders, and this base model has none; leave it out")
        return [self.encoded(prompt, adapter_id, request.scale if adapter_id else 0.0) for prompt in prompts]

    def in_bucket(
        self, request: RunRequest, captions: Sequence[Tensor], lengths: Sequence[int], bucket: int
    ) -> Conditioning:
        """Return captions [tokens, width] as rows that zeros fill to the bucket, with places of their own lengths."""
        places = [self.places(*self.tokens(request), length, bucket) for length in lengths]
        rope, masked = (torch.cat(each) for each in zip(*places, strict=True))
        tokens = torch.tensor([len(caption) for caption in captions])  # on the host, where `prepare` reads it
        return Conditioning(filled(captions, bucket), {"rope": rope, "masked": masked, "tokens": tokens})

    def templated(self, prompt: str) -> str:
        """Return the text whose first `room` tokens are read; the chat template asks for an answer."""
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=self.thinking,
        )

    def read(self, prompt: str, *, padded: bool = False) -> Sequence[Tensor]:
        """Return a prompt's hidden states, first those before all layers, each [1, tokens, width].

        Padding is up to `room`.
        """
        padding = "max_length" if padded else False
        tokens = self.tokenizer(self.templated(prompt), truncation=True, max_length=self.room, padding=padding)
        return self.states(tokens.input_ids, tokens.attention_mask if padded else None)

    def unread(self, request: RunRequest) -> Unread:
        prompts = (request.prompt, request.negative_prompt if request.guidance > 1 else "")
        return Unread(*map(self._unread, prompts))

    def _unread(self, prompt: str) -> int:
        """Return how many characters at a prompt's end are beyond the tokens that are read."""
        text = self.templated(prompt)
        return max(0, text.find(prompt) + len(prompt) - read_characters(self.tokenizer, text, self.room))

    def states(self, ids: Sequence[int], mask: Sequence[int] | None = None) -> Sequence[Tensor]:
        """Return the hidden states of tokens, first those before all layers, each [1, tokens, width]."""
        given = torch.tensor([[each] for each in (ids, mask) if each is not None], device=self.text_encoder.device)
        return self.text_encoder(*given, output_hidden_states=True, use_cache=False).hidden_states

    def _places(self, *key: int) -> tuple[Tensor, ...]:
        return tuple(upload(each.numpy(), self.device) for each in self.transformer.places(*key))

    # -- noise and steps ---------------------------------------------------------------------------------------------

    @property
    def modules(self) -> Sequence[nn.Module]:
        encoders = [component.module for name, component in self.components.items() if name != self.denoiser]
        return [self.transformer, self.vae, *encoders]

    def tokens(self, request: RunRequest) -> tuple[int, int]:
        """Return the image's height and width in tokens, rounded up."""
        side = PATCH * 2 ** (len(self.vae.config.block_out_channels) - 1)
        return -(-request.height // side), -(-request.width // side)

    def latent_shape(self, request: RunRequest) -> tuple[int, int, int]:
        height, width = self.tokens(request)
        return self.vae.config.latent_channels, PATCH * height, PATCH * width

    def denoise(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, *, lane: int = 0) -> Tensor:
        time, context = timesteps.to(self.dtype) / 1000, conditioning.context
        return self.lanes[lane].module(latents.to(self.dtype), time, context, **conditioning.added).float()

    def schedule(self, request: RunRequest) -> Schedule:
        height, width = self.tokens(request)
        begins_late = request.image is not None and self.begins_from_images
        skipped = 0 if not begins_late else int(request.steps - request.steps * request.strength)
        tokens = height * width if self.scheduler.config.use_dynamic_shifting else 0
        return self._schedule(request.sampler or self.sampler, request.steps, skipped, tokens)

    def _made_schedule(self, sampler: str, steps: int, skipped: int, tokens: int) -> Schedule:
        """Return a schedule for an image of `tokens` tokens. Raises ValueError with the choices."""
        if sampler and parse_sampler(sampler)[0] is not Sampler.FLOW_EULER:
            raise ValueError(f"sampler {sampler}: is for another family; sampler: may be {Sampler.FLOW_EULER}")
        scheduler, levels = make_scheduler(sampler, self.scheduler), self.noise_levels(steps)
        mu = self.shift(tokens, steps)
        if steps == 1 and scheduler.config.get("shift_terminal"):  # the last level that it sets is the first one here
            scheduler = type(scheduler).from_config(scheduler.config, shift_terminal=None)
        return make_schedule(scheduler, steps, skipped=skipped, sigmas=levels, mu=mu).to(self.device)


def read_characters(tokenizer: Any, text: str, room: int) -> int:
    """Return how many characters at a text's beginning the first `room` tokens are of, marks of its end among them."""
    if len(tokenizer(text).input_ids) <= room:
        return len(text)
    read = tokenizer(text, truncation=True, max_length=room, return_offsets_mapping=True)
    return max(end for _, end in read.offset_mapping)


def bucket_of(lengths: Sequence[int], buckets: Sequence[int] = CAPTION_BUCKETS) -> int:
    return next(bucket for bucket in buckets if bucket >= max(lengths))


def filled(captions: Sequence[Tensor], bucket: int) -> Tensor:
    """Return captions [tokens, width] as rows [rows, bucket, width], filled with zeros."""
    return torch.stack([F.pad(caption, (0, 0, 0, bucket - len(caption))) for caption in captions])


def refuse_wrong_text_parts(pipeline: Any, width: int, *, with_template: bool = True) -> None:
    """Raise ValueError on a text encoder that does not make hidden states of this width, or on another's tokenizer."""
    encoder, tokenizer = language_model(pipeline.text_encoder).config, pipeline.tokenizer
    if encoder.hidden_size != width:
        raise ValueError(
            f"the transformer takes captions {width} wide and the text encoder makes {encoder.hidden_size}: name the "
            "Qwen3 that it was trained with as `text_encoder:`"
        )
    if (with_template and not tokenizer.chat_template) or len(tokenizer) > encoder.vocab_size:
        template = "a" if tokenizer.chat_template else "no"
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and {template} chat template, and the text encoder knows "
            f"{encoder.vocab_size}: name the text encoder's own as `tokenizer:`"
        )


def refuse_wrong_vae(pipeline: Any, channels: int) -> None:
    """Raise ValueError on a VAE whose latents have another number of channels than `channels`."""
    config = pipeline.vae.config
    if (latent := config.get("latent_channels", config.get("z_dim", 4))) != channels:
        raise ValueError(
            f"the transformer takes {channels} channels and the VAE makes {latent}: name the VAE that it was trained "
            "with as `vae:`"
        )


def qwen_component(encoder: Any) -> Component:
    encoder = language_model(encoder)
    layers = wrap_layers(encoder)
    sizes = [f"text_encoders.qwen3_{size}." for size in ("06b", "4b", "8b")]
    sizes += [f"text_encoders.qwen3vl_{size}." for size in ("4b", "8b")]
    prefixes = ("lora_te_", "lora_te1_", "text_encoder.qwen3.", *(f"{size}transformer." for size in sizes), *sizes)
    wholes = ("model.", "language_model.", "model.language_model.")
    return Component(encoder, layers, {f"{whole}{layer}": layer for layer in layers for whole in wholes}, prefixes)


def original_names(layers: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Return layers by their names in the original code, which writes `parts` of them otherwise."""
    named: dict[str, str] = {}
    for layer in layers:
        original = layer
        for ours, theirs in parts.items():
            original = original.replace(ours, theirs)
        named[original] = layer
    return named


class AttendsByPlace(Attends):
    """A layer that attends by its operator, with queries and keys that are normalized and turned by their places."""

    turn: Turn | None = None
    """A kernel for it, `transformer_kernels.turn`, where the device has one."""

    def placed(self, norm: Any, x: Tensor, rope: Tensor) -> Tensor:
        """Return heads [rows, tokens, heads, width] normalized and turned."""
        if self.turn is None or norm is None:
            return turned(normed(norm, x), rope)
        return self.turn(x, norm.weight, rope, norm.eps)


def normed(norm: Any, x: Tensor) -> Tensor:
    """Return what an RMSNorm computes, diffusers' or torch's, by one operator; a model without this norm has None."""
    return x if norm is None else F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def turned(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the pairs of each head of x [rows, tokens, heads, width] in float32 (Su et al. 2021), as diffusers does.

    `rope` holds complex numbers [rows, tokens, 1, half of the width].
    """
    pairs = torch.view_as_complex(x.float().unflatten(3, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(3).to(x.dtype)


def _on_device(module: Any, device: torch.device) -> Any:
    return module.to(device).eval().requires_grad_(False)
