"""What the tests of a transformer family know of it: how a tiny one is written, and how diffusers draws with it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from serve_app.engine import RunRequest
from tests.engine import tiny_flux2_klein, tiny_qwen_image21, tiny_z_image
from tests.engine.diffusers_reference import PeftReference
from tests.engine.tiny_models import ATTENTION, diffusers, transformers


class ZImageReference(PeftReference):
    """diffusers' pipeline, which counts guidance from 0 and takes only the sizes that it makes."""

    def caption(self, prompt: str) -> Tensor:
        return self.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0][0]

    def _call(self, request: RunRequest, output: str) -> Any:
        sides = {"width": _multiple_of_16(request.width), "height": _multiple_of_16(request.height)}
        return super()._call(replace(request, adapter=None, guidance=request.guidance - 1, **sides), output)


class Flux2KleinReference(PeftReference):
    """diffusers' pipeline with a negative prompt, which it takes encoded alone, and latents of its own shape."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._encoded = cache(lambda prompt: self.pipeline.encode_prompt(prompt)[0])

    def caption(self, prompt: str) -> Tensor:
        return self._encoded(prompt)[0]

    def scale(self, scale: float) -> None:
        super().scale(scale)
        self._encoded.cache_clear()

    def latents(self, request: RunRequest) -> Tensor:
        self._call(request, "latent")
        return self.trace[-1]

    def _asked(self, request: RunRequest) -> dict[str, Any]:
        """Return the pipeline's own arguments for a request, whose negative prompt is None where nothing guides."""
        return {
            "image": None if request.image is None else Image.fromarray(request.image),
            "prompt_embeds": self._encoded(request.prompt),
            "negative_prompt_embeds": self._encoded(request.negative_prompt) if request.guidance > 1 else None,
            "guidance_scale": request.guidance,
        }

    def _sides(self, request: RunRequest) -> tuple[int, int]:
        return _multiple_of_16(request.height), _multiple_of_16(request.width)

    def _call(self, request: RunRequest, output: str) -> Any:
        self.trace: list[Tensor] = []
        self._kept: Callable[[Tensor], Tensor] = lambda latents: latents
        """What latents [channels, height, width] go on as after a step."""
        height, width = self._sides(request)

        def keep(_pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            self.trace.append(self._kept(tensors["latents"][0].T.unflatten(1, (height // 16, width // 16)).clone()))
            return {"latents": self.trace[-1].flatten(1).T[None]}

        outputs: list[Any] = []

        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            outputs.append(output)
            return outputs[-2] if not len(outputs) % 2 and not self.acts(request, self.pipeline) else output

        asked = {"generator": torch.Generator().manual_seed(request.seed), **self._asked(request)}
        is_guided = asked["negative_prompt_embeds"] is not None
        guided = self.pipeline.transformer.register_forward_hook(hook) if is_guided else None
        made = self.pipeline(
            **asked,
            num_inference_steps=request.steps,
            height=height,
            width=width,
            output_type=output,
            callback_on_step_end=keep,
        ).images
        if guided is not None:
            guided.remove()
        return made


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

    def _sides(self, request: RunRequest) -> tuple[int, int]:
        return -(-request.height // 32) * 32, -(-request.width // 32) * 32

    def _asked(self, request: RunRequest) -> dict[str, Any]:
        guided = request.guidance > 1 and request.negative_prompt
        asked = {
            "prompt_embeds": self._encoded(request.prompt),
            "negative_prompt_embeds": self._encoded(request.negative_prompt) if guided else None,
            "true_cfg_scale": request.guidance,
        }
        if (levels := self.pipeline.config.sample_sigmas) and request.steps < len(levels):
            asked["sigmas"] = levels[:: len(levels) // request.steps]
        return asked if request.image is None else asked | self._begun(request)

    def acts(self, request: RunRequest, pipeline: Any) -> bool:
        return super().acts(replace(request, steps=pipeline.num_timesteps), pipeline)

    def _begun(self, request: RunRequest) -> dict[str, Any]:
        """Return the generator, the levels and the latents of a run that begins from its image, of a size of 32."""
        assert request.image is not None
        generator, vae = torch.Generator().manual_seed(request.seed), self.pipeline.vae
        pixels = torch.tensor(np.asarray(Image.fromarray(request.image).convert("RGBA"))).permute(2, 0, 1)
        mean, deviation = (torch.tensor(vae.config[f"latents_{name}"])[:, None, None] for name in ("mean", "std"))
        encoded = vae.encode(pixels[None, :, None] / 127.5 - 1).latent_dist.sample(generator)[0, :, 0]
        clean, noise = (encoded - mean) / deviation, torch.randn(1, *encoded.shape, generator=generator)[0]
        scheduler, few, many = self.pipeline.scheduler, 256, 4096
        low, high = scheduler.config.base_shift, scheduler.config.max_shift
        levels = np.linspace(1.0, 1 / request.steps, request.steps)[int(request.steps * (1 - request.strength)) :]
        mu = low + (high - low) * (encoded[0].numel() - few) / (many - few)
        scheduler.set_timesteps(sigmas=levels, mu=mu)
        shifted = scheduler.sigmas.clone()

        def noised(step: int) -> Tensor:
            return (1 - shifted[step]) * clean + shifted[step] * noise

        mask = np.full((request.height, request.width), 255) if request.mask is None else request.mask
        drawn = (torch.tensor(mask) >= 128).float()[::16, ::16]
        self._kept = lambda latents: torch.where(drawn > 0, latents, noised(len(self.trace) + 1))
        begun = noise if request.mask is not None and request.strength == 1 else noised(0)
        return {"generator": generator, "sigmas": levels, "latents": begun.flatten(1).T[None]}


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
    sees_pictures: bool = False
    guides_always: bool = True
    """Whether guidance needs no negative prompt."""

    def __str__(self) -> str:
        return self.name

    def original_weights(self, folder: Path, prefix: str = "") -> dict[str, Tensor]:
        """Return the weights of a folder's transformer under the original code's names."""
        return self.original_names(load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors"), prefix)


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
)  # fmt: skip
"""A base model, which is guided, and a distilled one, which is not."""

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
    guides_always=False,
)  # fmt: skip
"""One whose captions have the time 0, and one whose author chose the levels of noise."""

TINY_TRANSFORMERS = (Z_IMAGE, FLUX2_KLEIN, QWEN_IMAGE21)
