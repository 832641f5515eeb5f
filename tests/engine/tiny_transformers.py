"""What the tests of a transformer family know of it: how a tiny one is written, and how diffusers draws with it."""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.guiders.classifier_free_guidance import ClassifierFreeGuidance
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from serve_app.engine import RunRequest
from tests.engine import tiny_anima, tiny_flux1, tiny_flux2_klein, tiny_krea2, tiny_qwen_image21, tiny_z_image
from tests.engine.diffusers_reference import DiffusersReference, PeftReference
from tests.engine.original_checkpoint import original_vae
from tests.engine.tiny_models import ATTENTION, diffusers, transformers
from tests.engine.tiny_qwen_vae import wan_names


class ZImageReference(PeftReference):
    """diffusers' pipeline, which counts guidance from 0 and takes only the sizes that it makes."""

    def caption(self, prompt: str) -> Tensor:
        return self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0][0]

    def _call(self, request: RunRequest, output: str) -> Any:
        sides = {"width": _multiple_of_16(request.width), "height": _multiple_of_16(request.height)}
        return super()._call(replace(request, adapter=None, guidance=request.guidance - 1, **sides), output)


class TwoPassReference(PeftReference):
    """A pipeline that computes the negative prompt in a pass of its own, with latents of its own shape."""

    patch = 1
    """Cells of an image's latents per side of a token."""

    def latents(self, request: RunRequest) -> Tensor:
        self._call(request, "latent")
        return self.trace[-1]

    def unpacked(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Return latents [tokens, channels] of an image in the shape that the engine has them in."""
        return torch.pixel_shuffle(latents.T.unflatten(1, (height // 16, width // 16)), self.patch).clone()

    def packed(self, latents: Tensor) -> Tensor:
        """Return latents as the pipeline has them."""
        return torch.pixel_unshuffle(latents, self.patch).flatten(1).T

    def arguments(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        """Return the pipeline that draws the request, and what it takes besides what all requests have."""
        raise NotImplementedError

    def _call(self, request: RunRequest, output: str) -> Any:
        self.trace: list[Tensor] = []
        self.kept: Callable[[Tensor], Tensor] = lambda latents: latents
        """What latents [tokens, channels] go on as after a step."""
        height, width = self.sides(request)
        pipeline, arguments = self.arguments(request)

        def keep(_pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            latents = self.kept(tensors["latents"][0])
            self.trace.append(self.unpacked(latents, height, width))
            return {"latents": latents[None]}

        with second_output_replaced(self, request, pipeline, is_guided=self.is_guided(request)):
            return pipeline(
                num_inference_steps=request.steps,
                height=height,
                width=width,
                output_type=output,
                callback_on_step_end=keep,
                **{"generator": torch.Generator().manual_seed(request.seed), **arguments},
            ).images

    def begun(self, request: RunRequest, kind: str) -> dict[str, Any]:
        """Return the generator, levels and latents of a run that begins from its image, of a size that needs no edges.

        It is for a pipeline that has no class of its own for that; `kind` is of the pixels that its VAE takes.
        """
        assert request.image is not None
        generator, vae = torch.Generator().manual_seed(request.seed), self.pipeline.vae
        pixels = torch.tensor(np.asarray(Image.fromarray(request.image).convert(kind))).permute(2, 0, 1)
        mean, deviation = (torch.tensor(vae.config[f"latents_{name}"])[:, None, None] for name in ("mean", "std"))
        encoded = vae.encode(pixels[None, :, None] / 127.5 - 1).latent_dist.sample(generator)[0, :, 0]
        clean, noise = (encoded - mean) / deviation, torch.randn(1, *encoded.shape, generator=generator)[0]
        scheduler, side = self.pipeline.scheduler, request.height // clean.shape[1]
        few, many = scheduler.config.base_image_seq_len, scheduler.config.max_image_seq_len
        low, high = scheduler.config.base_shift, scheduler.config.max_shift
        levels = np.linspace(1.0, 1 / request.steps, request.steps)[int(request.steps * (1 - request.strength)) :]
        mu = low + (high - low) * (clean[0].numel() / self.patch**2 - few) / (many - few)
        scheduler.set_timesteps(sigmas=levels, mu=mu)
        mask = np.full((request.height, request.width), 255) if request.mask is None else request.mask
        drawn = (torch.tensor(mask) >= 128)[::side, ::side]

        def noised() -> Tensor:
            """Return what the scheduler makes of the image before the first step, and then before its next one."""
            return scheduler.scale_noise(clean, scheduler.timesteps[:1], noise)

        self.kept = lambda latents: self.packed(
            torch.where(drawn, self.unpacked(latents, request.height, request.width), noised())
        )
        return {"generator": generator, "sigmas": levels, "latents": self.packed(noised())[None]}

    def acts(self, request: RunRequest, pipeline: Any) -> bool:
        return super().acts(replace(request, steps=pipeline.num_timesteps), pipeline)

    def is_guided(self, request: RunRequest) -> bool:
        return request.guidance > 1

    def sides(self, request: RunRequest) -> tuple[int, int]:
        return _multiple_of_16(request.height), _multiple_of_16(request.width)


class Flux2KleinReference(TwoPassReference):
    """diffusers' pipeline with a negative prompt, which it takes encoded alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._encoded = cache(lambda prompt: self.pipeline.encode_prompt(prompt)[0])

    def caption(self, prompt: str) -> Tensor:
        return self._encoded(prompt)[0]

    def scale(self, scale: float) -> None:
        super().scale(scale)
        self._encoded.cache_clear()

    def arguments(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        return self.pipeline, {
            "image": None if request.image is None else Image.fromarray(request.image),
            "prompt_embeds": self._encoded(request.prompt),
            "negative_prompt_embeds": self._encoded(request.negative_prompt) if request.guidance > 1 else None,
            "guidance_scale": request.guidance,
        }


class Flux1Reference(TwoPassReference):
    """diffusers' pipeline, which is told no guidance where a negative prompt guides it truly."""

    patch = 2

    @property
    def tokens(self) -> int:
        """How many tokens of a prompt the original code reads, of dev and of schnell."""
        return 512 if self.pipeline.transformer.config.guidance_embeds else 256

    def caption(self, prompt: str) -> Tensor:
        return self.pipeline.encode_prompt(prompt, max_sequence_length=self.tokens)[0][0]

    def arguments(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        guided = self.is_guided(request)
        pipeline, begins = self.begins(request)
        return pipeline, {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt if guided else None,
            "true_cfg_scale": request.guidance if guided else 1.0,
            "guidance_scale": 1.0 if guided else request.guidance,
            "max_sequence_length": self.tokens,
            **{name: given for name, given in begins.items() if name not in ("height", "width")},
        }

    def is_guided(self, request: RunRequest) -> bool:
        return request.guidance > 1 and request.negative_prompt != ""


class Krea2Reference(TwoPassReference):
    """diffusers' pipeline, which counts guidance from 0."""

    patch = 2

    def caption(self, prompt: str) -> Tensor:
        states, is_read = self.pipeline.encode_prompt(prompt)
        return states[0, is_read[0]].flatten(1)

    def arguments(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        asked = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
        begun = {} if request.image is None else self.begun(request, "RGB")
        return self.pipeline, {**asked, "guidance_scale": request.guidance - 1, **begun}


class AnimaReference(PeftReference):
    """diffusers' modular pipeline, which takes only the sizes that it makes, and knows no masks."""

    def __init__(self, folder: Path) -> None:
        self.pipeline: Any = diffusers.AnimaAutoBlocks().init_pipeline(str(folder))
        self.pipeline.load_components()
        self.pipeline.set_progress_bar_config(disable=True)

    @torch.inference_mode()
    def caption(self, prompt: str) -> Tensor:
        step = self.pipeline.blocks.sub_blocks["text_encoder"]
        encoded = step.encode_prompt(self.pipeline, prompt, prepare_unconditional_embeds=False)
        words, masks = encoded["t5_input_ids"], (encoded["t5_attention_mask"], encoded["qwen_attention_mask"])
        return self.pipeline.text_conditioner(encoded["qwen_prompt_embeds"], words, *masks)[0]

    def latents(self, request: RunRequest) -> Tensor:
        self._call(request, "np")
        return self.trace[-1]

    def _call(self, request: RunRequest, output: str) -> Any:
        self.trace: list[Tensor] = []
        scheduler, guider = (
            self.pipeline.scheduler,
            ClassifierFreeGuidance(
                guidance_scale=request.guidance, start=request.guidance_start, stop=request.guidance_end
            ),
        )
        step = type(scheduler).step.__get__(scheduler)

        def keep(*args: Any, **options: Any) -> Any:
            made = step(*args, **options)
            self.trace.append(made[0][0, :, 0].clone())
            return made

        scheduler.step = keep
        self.pipeline.update_components(guider=guider)
        begun = {} if request.image is None else {"image": Image.fromarray(request.image), "strength": request.strength}
        return self.pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            generator=torch.Generator().manual_seed(request.seed),
            num_inference_steps=request.steps,
            height=_multiple_of_16(request.height),
            width=_multiple_of_16(request.width),
            output_type=output,
            output="images",
            **begun,
        )


@contextmanager
def second_output_replaced(
    reference: DiffusersReference, request: RunRequest, pipeline: Any, *, is_guided: bool
) -> Generator[None]:
    """Put the prompt's output, the first of each two, in the negative one's place where guidance does not act."""
    outputs: list[Any] = []

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        outputs.append(output)
        return outputs[-2] if not len(outputs) % 2 and not reference.acts(request, pipeline) else output

    guided = reference.pipeline.transformer.register_forward_hook(hook) if is_guided else None
    yield
    if guided is not None:
        guided.remove()


class QwenImage21Reference(Flux2KleinReference):
    """diffusers' pipeline, which begins from an image only where it is given the levels and the latents."""

    def __init__(self, folder: Path) -> None:
        def part(kind: Any, name: str) -> Any:
            return kind.from_pretrained(folder / name, local_files_only=True)

        self.pipeline = diffusers.QwenImage21Pipeline(
            part(diffusers.FlowMatchEulerDiscreteScheduler, "scheduler"),
            part(diffusers.AutoencoderKLQwenImage21, "vae"),
            part(transformers.Qwen3VLForConditionalGeneration, "text_encoder"),
            tiny_qwen_image21.Words(part(transformers.AutoTokenizer, "processor")),
            part(diffusers.QwenImage21Transformer2DModel, "transformer"),
            sample_sigmas=json.loads((folder / "model_index.json").read_text())["sample_sigmas"],
        )
        self.pipeline.set_progress_bar_config(disable=True)
        self._encoded = cache(lambda prompt: self.pipeline.encode_prompt(prompt)[0])

    def image(self, request: RunRequest) -> np.ndarray:
        (drawn,) = self._call(request, "pil")
        return np.asarray(Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn).convert("RGB"))

    def sides(self, request: RunRequest) -> tuple[int, int]:
        return -(-request.height // 32) * 32, -(-request.width // 32) * 32

    def is_guided(self, request: RunRequest) -> bool:
        return request.guidance > 1 and request.negative_prompt != ""

    def arguments(self, request: RunRequest) -> tuple[Any, dict[str, Any]]:
        asked = {
            "prompt_embeds": self._encoded(request.prompt),
            "negative_prompt_embeds": self._encoded(request.negative_prompt) if self.is_guided(request) else None,
            "true_cfg_scale": request.guidance,
        }
        if levels := self.pipeline.config.sample_sigmas:  # of which other steps take what lies between
            places = np.arange(request.steps) * len(levels) / request.steps
            asked["sigmas"] = np.interp(places, range(len(levels) + 1), [*levels, 0.0])
        return self.pipeline, asked if request.image is None else asked | self.begun(request, "RGBA")


def _multiple_of_16(side: int) -> int:
    return -(-side // 16) * 16


@dataclass(frozen=True, eq=False)
class TinyTransformer:
    """A family with tiny random weights of its true architecture."""

    name: str
    write: Callable[..., Path]
    variants: Mapping[str, Mapping[str, Any]]
    """Options of `write` for models of other shapes, the first of which is the one that files are made of."""
    reference: Callable[[Path], Any]
    original_names: Callable[..., dict[str, Tensor]]
    """Puts a transformer's weights under the original code's names, behind a prefix."""
    linears: Sequence[str]
    """Ends of the names of all linears of the transformer."""
    some_linears: Sequence[Sequence[str]]
    """Targets of adapters that change only a few of them."""
    unread: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Weights that its files hold and nothing reads."""
    unguided: Sequence[str] = ()
    """Variants that have no guidance."""
    needs_negative: bool = False
    """Whether guidance takes a row of its own only with a negative prompt."""
    sees_pictures: bool = False
    encoders: Mapping[str, str] = field(
        default_factory=lambda: {"text_encoder": "text_encoders.qwen3_4b.transformer.model."}
    )
    """How names of what reads texts begin in files that hold all parts, by text encoder."""
    vae_names: Callable[[Any], Mapping[str, Tensor]] | None = original_vae
    """Puts a VAE's weights under the names that they have there; None where such files hold none."""
    mixed: str = "base"
    """The variant whose runs are mixed."""
    held: Sequence[str] = ("transformer",)
    """The parts that its files hold."""

    def __str__(self) -> str:
        return self.name

    def whole_file(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights of a folder as ComfyUI saves them in one file, heads of the text encoders too."""
        made = self.original_weights(folder, "model.diffusion_model.")
        for part, prefix in self.encoders.items():
            whole = prefix.removesuffix("model.")
            made |= {f"{whole}lm_head.weight": torch.ones(4, 4), f"{whole}logit_scale": torch.ones(1)}
            for name, weight in load_file(folder / part / "model.safetensors").items():
                bare = re.sub(r"^(model\.)?(language_model\.)?", "", name)
                made[(whole if bare.startswith(("visual.", "lm_head.")) else prefix) + bare] = weight
        if self.vae_names is not None:
            named = self.vae_names(diffusers.AutoModel.from_pretrained(str(folder / "vae")))
            made |= {f"vae.{name}": weight for name, weight in named.items()}
        return {name: weight.contiguous() for name, weight in made.items()}

    def is_guided(self, variant: str, one: RunRequest) -> bool:
        takes_negative = bool(one.negative_prompt) or not self.needs_negative
        return one.guidance > 1 and takes_negative and variant not in self.unguided

    def original_weights(self, folder: Path, prefix: str = "") -> dict[str, Tensor]:
        """Return the weights that a file of a folder's transformer holds under the original code's names."""
        whole, *beside = (load_file(folder / part / "diffusion_pytorch_model.safetensors") for part in self.held)
        made = self.original_names(whole, prefix)
        return made | {f"{prefix}llm_adapter.{name}": weight for each in beside for name, weight in each.items()}


Z_IMAGE = TinyTransformer(
    "z_image",
    tiny_z_image.write_z_image,
    {"turbo": {}, "base": {"shift": None, "dim": 48, "heads": 3, "seed": 1}},
    ZImageReference,
    tiny_z_image.original_names,
    linears=(
        "to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "adaLN_modulation.0", "adaLN_modulation.1",
        "x_embedder.2-1", "linear", "mlp.0", "mlp.2", "cap_embedder.1",
    ),
    some_linears=(ATTENTION, ("w1", "w3"), ("cap_embedder.1",)),
    unread={"norm_final.weight": torch.ones(4)},
)  # fmt: skip
"""Z-Image-Turbo, whose schedule is the same for all sizes, and Z-Image, with a head of another width."""

FLUX2_KLEIN = TinyTransformer(
    "flux2_klein",
    tiny_flux2_klein.write_flux2_klein,
    {"base": {}, "distilled": {"distilled": True, "heads": 3, "blocks": 2, "seed": 1}},
    Flux2KleinReference,
    tiny_flux2_klein.original_names,
    linears=(
        *tiny_flux2_klein.BLOCK_LINEARS, "x_embedder", "context_embedder", "linear_1", "linear_2",
        "modulation_img.linear", "modulation_txt.linear", "stream_modulation.linear", "norm_out.linear", "proj_out",
    ),
    some_linears=(("to_q", "to_k", "to_v"), ("to_qkv_mlp_proj",), ("context_embedder",)),
    unguided=("distilled",),
    sees_pictures=True,
    vae_names=None,
)  # fmt: skip
"""A base model, which is guided, and a distilled one, which is not."""

FLUX1 = TinyTransformer(
    "flux1",
    tiny_flux1.write_flux1,
    {"dev": {}, "schnell": {"is_told": False, "heads": 3, "blocks": 2, "seed": 1}},
    Flux1Reference,
    tiny_flux1.original_names,
    linears=(
        *tiny_flux1.BLOCK_LINEARS, "x_embedder", "context_embedder", "linear_1", "linear_2", "norm_out.linear",
    ),
    some_linears=(("to_q", "to_k", "to_v"), ("proj_mlp", "norm.linear"), ("context_embedder",)),
    needs_negative=True,
    encoders={
        "text_encoder": "text_encoders.clip_l.transformer.", "text_encoder_2": "text_encoders.t5xxl.transformer.",
    },
    mixed="dev",
)  # fmt: skip
"""dev, which is told its guidance, and schnell, which is not; only a negative prompt takes a row of its own."""

KREA_2 = TinyTransformer(
    "krea2",
    tiny_krea2.write_krea2,
    {"base": {}, "turbo": {"distilled": True, "heads": 6, "blocks": 1, "seed": 1}},
    Krea2Reference,
    tiny_krea2.original_names,
    linears=(
        *tiny_krea2.BLOCK_LINEARS, "img_in", "linear_1", "linear_2", "time_mod_proj", "projector", "final_layer.linear",
    ),
    some_linears=(("to_q", "to_k", "to_v"), ("ff.gate", "ff.up"), ("projector", "txt_in.linear_1")),
    encoders={"text_encoder": "text_encoders.qwen3vl_4b.transformer.model."},
    vae_names=wan_names,
)  # fmt: skip
"""Raw, whose schedule depends on the size, and Turbo, whose does not."""

ANIMA = TinyTransformer(
    "anima",
    tiny_anima.write_anima,
    {"base": {}, "other": {"heads": 3, "blocks": 1, "shift": 1.0, "seed": 1}},
    AnimaReference,
    tiny_anima.original_names,
    linears=(*tiny_anima.BLOCK_LINEARS, "linear_1", "linear_2", "patch_embed.proj", "proj_out"),
    some_linears=(ATTENTION, ("ff.net.0.proj", "ff.net.2"), ("norm2.linear_1", "norm2.linear_2")),
    encoders={"text_encoder": "text_encoders.qwen3_06b.transformer.model."},
    vae_names=wan_names,
    held=("transformer", "text_conditioner"),
)
"""Anima, and one of other sizes with another shift."""

QWEN_IMAGE21 = TinyTransformer(
    "qwen_image21",
    tiny_qwen_image21.write_qwen_image21,
    {"base": {}, "levels": {"heads": 3, "layers": 1, "causal": False, "sigmas": True, "seed": 1}},
    QwenImage21Reference,
    tiny_qwen_image21.original_names,
    linears=(
        "to_q", "to_k", "to_v", "to_out.0", "gate_layer", "proj", "img_mlp.out", "img_in", "in_layer", "out_layer",
        "linear_1", "linear_2", "modulation.1", "norm_out.linear", "proj_out",
    ),
    some_linears=(ATTENTION, ("gate_layer",), ("in_layer",)),
    needs_negative=True,
    encoders={"text_encoder": "text_encoders.qwen3vl_8b.transformer.model."},
    vae_names=tiny_qwen_image21.wan_names,
)  # fmt: skip
"""One whose captions have the time 0, and one whose author chose the levels of noise."""

TINY_TRANSFORMERS = (Z_IMAGE, FLUX2_KLEIN, FLUX1, KREA_2, ANIMA, QWEN_IMAGE21)
