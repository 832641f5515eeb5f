"""Adapters of transformer families make what their writers make of the transformer and its text encoder.

A row is a writer, a format and a family. What the writer itself, or for a set of names the formula of its algorithm,
makes of the weights at every weight of the adapter is put in their place in diffusers' modules; ours has the adapter
bound to the same layers, read by the names and shapes alone. diffusers' converters of checkpoints tell which weights a
name of the original code means. Its converters of adapters are no reference: that of Z-Image leaves a fused `qkv` whole
and DoRA out, that of FLUX.2 leaves the last modulation's halves in the other order.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.nn.functional as F
from diffusers.loaders.single_file_utils import (
    convert_cosmos_transformer_checkpoint_to_diffusers,
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_krea2_transformer_checkpoint_to_diffusers,
    convert_qwen_image21_transformer_checkpoint_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from serve_app.engine import RunRequest
from serve_app.engine.adapter_slots import bind_alone
from serve_app.engine.adapters.explain import also_fits, base_name
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter
from serve_app.engine.families.flux1 import Flux1Family, of_diffusers
from serve_app.engine.families.flux2_klein import Flux2KleinFamily
from serve_app.engine.families.krea2 import Krea2Family
from serve_app.engine.families.qwen_image21 import QwenImage21Family
from serve_app.engine.families.registry import load_family
from serve_app.engine.families.z_image import ZImageFamily
from tests.engine import tiny_flux1
from tests.engine.format_table import documented, rows_of
from tests.engine.format_table import rows as format_rows
from tests.engine.latent_comparison import OPTIONS, require_equal
from tests.engine.test_adapter_formats import LYCORIS, converted_to_kohya, lycoris_network, randomize, renamed
from tests.engine.tiny_models import diffusers
from tests.engine.tiny_transformers import (
    ANIMA,
    FLUX1,
    FLUX2_KLEIN,
    KREA_2,
    QWEN_IMAGE21,
    TINY_TRANSFORMERS,
    Z_IMAGE,
    TinyTransformer,
)

pytestmark = pytest.mark.slow
PROMPT = "a red cat"
MUSUBI = Path(__file__).with_name("musubi_tuner")
Weights = Mapping[str, Tensor]
"""A module's weights by its own names."""


@dataclass(frozen=True)
class Reference:
    """How diffusers' own modules answer, and what the original code calls their layers."""

    latents: Tensor
    """[channels, height, width] of an image of 64 × 64."""
    answer: Callable[[Any, Any, Tensor], Tensor]
    """What a transformer makes of a pipeline's captions and the latents, with 0.7 of the noise left."""
    of_diffusers: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    blocks: Mapping[str, type[nn.Module]]
    """Classes named as those of the original code's blocks, among which LyCORIS looks for layers, by their list."""
    targets: tuple[str, str]
    """PEFT's targets in diffusers' modules, and in those of the original code."""


def z_image_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    (velocity,) = transformer([latents[:, None]], torch.tensor([0.3]), captions[0], return_dict=False)[0]
    return -velocity[:, 0]


def klein_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    ids = torch.zeros(512, 4), torch.zeros(16, 4)
    ids[0][:, 3] = torch.arange(512)
    ids[1][:, 1:3] = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    tokens = latents.flatten(1).T[None]
    (velocity,) = transformer(tokens, captions[0], torch.tensor([0.7]), ids[1], ids[0], return_dict=False)
    return velocity[0].T.unflatten(1, (4, 4))


def flux1_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    ids = torch.zeros(16, 3)
    ids[:, 1:] = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    tokens = torch.pixel_unshuffle(latents, 2).flatten(1).T[None]
    told, text = torch.tensor([0.7]), torch.zeros(captions[0].shape[1], 3)
    made = transformer(tokens, *captions, told, ids, text, guidance=torch.ones(1), return_dict=False)[0]
    return torch.pixel_shuffle(made[0].T.unflatten(1, (4, 4)), 2)


def numbered(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a column for each weight: a number for each of its rows, which no other has."""
    columns, end = dict[str, Tensor](), 0
    for name, weight in weights.items():
        columns[name] = torch.arange(end, end := end + len(weight))[:, None]
    return columns


def of_diffusers_flux1(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the first tiny model's layers have of weights under original names, row by row.

    diffusers' own converter takes models of the true width alone; it is compared with these names there.
    """
    plain = diffusers.FluxTransformer2DModel(**tiny_flux1.SHAPE).state_dict()
    places = {int(number): (name, i) for name, column in numbered(plain).items() for i, number in enumerate(column)}
    made: dict[str, dict[int, Tensor]] = {}
    for original, column in tiny_flux1.original_names(numbered(plain)).items():
        for number, row in zip(column.flatten().tolist(), weights.get(original, ()), strict=False):
            name, i = places[number]
            made.setdefault(name, {})[i] = row
    return {name: torch.stack([rows[i] for i in range(len(rows))]) for name, rows in made.items()}


def krea2_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    states, is_read = captions
    ids = diffusers.Krea2Pipeline.prepare_position_ids(states.shape[1], 4, 4, "cpu")
    tokens = F.pixel_unshuffle(latents[None], 2).flatten(2).transpose(1, 2)
    (velocity,) = transformer(tokens, states, torch.tensor([0.7]), ids, is_read, return_dict=False)
    return F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (4, 4)), 2)[0]


def anima_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, 64, 64)
    (velocity,) = transformer(
        latents[None, :, None], torch.tensor([0.7]), captions, padding_mask=mask, return_dict=False
    )
    return velocity[:, :, 0]


def qwen_image21_answer(transformer: Any, captions: Any, latents: Tensor) -> Tensor:
    slots = torch.arange(captions.shape[1] + 4)[None] >= captions.shape[1]  # each of four tokens of the image
    tokens = latents.flatten(1).T[None]
    (velocity,) = transformer(tokens, captions, torch.tensor([0.7]), [[(1, 4, 4)]], slots, return_dict=False)
    return velocity[0, -16:].T.unflatten(1, (4, 4))


REFERENCES: Mapping[TinyTransformer, Reference] = {
    Z_IMAGE: Reference(
        torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(7)),
        z_image_answer,
        convert_z_image_transformer_checkpoint_to_diffusers,
        dict.fromkeys(("layers", "noise_refiner", "context_refiner"), type("JointTransformerBlock", (nn.Module,), {})),
        (
            r"(layers|\w+_refiner)\..*\.(to_[qkv]|to_out\.0|w[123]|adaLN_modulation\.0)|.*_proj",
            r".*\.(qkv|out|w[123]|adaLN_modulation\.0)",
        ),
    ),
    FLUX2_KLEIN: Reference(
        torch.randn(32, 4, 4, generator=torch.Generator().manual_seed(7)),
        klein_answer,
        convert_flux2_transformer_checkpoint_to_diffusers,
        {f"{name}_blocks": type(f"{name.title()}StreamBlock", (nn.Module,), {}) for name in ("double", "single")},
        (
            r".*blocks.*\.(to_[qkv]\w*|to_out\.0|to_add_out|add_\w+|linear_\w+)|single.*to_out",
            r".*(qkv|proj|mlp\.[02]|linear[12])",
        ),
    ),
    FLUX1: Reference(
        torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(7)),
        flux1_answer,
        of_diffusers_flux1,
        {f"{name}_blocks": type(f"{name.title()}StreamBlock", (nn.Module,), {}) for name in ("double", "single")},
        (
            r".*blocks.*\.(to_[qkv]|to_out\.0|to_add_out|add_\w+|net\.0\.proj|net\.2|proj_\w+|linear)",
            r".*(qkv|proj|mlp\.[02]|linear[12]|lin)",
        ),
    ),
    KREA_2: Reference(
        torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(7)),
        krea2_answer,
        convert_krea2_transformer_checkpoint_to_diffusers,
        {"blocks": type("SingleStreamBlock", (nn.Module,), {})},
        (r".*(to_[qkv]|to_gate|to_out\.0|ff\.\w+|linear\w*|projector|img_in)", r".*(w[qkvo]|gate|up|down|first)"),
    ),
    ANIMA: Reference(
        torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(7)),
        anima_answer,
        convert_cosmos_transformer_checkpoint_to_diffusers,
        {"blocks": type("Block", (nn.Module,), {})},
        (r"transformer_blocks.*\.(to_[qkv]|to_out\.0|proj|net\.2|linear_[12])", r"blocks.*(proj|layer[12]|\.[12])"),
    ),
    QWEN_IMAGE21: Reference(
        torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(7)),
        qwen_image21_answer,
        convert_qwen_image21_transformer_checkpoint_to_diffusers,
        {"transformer_blocks": type("DoubleStreamBlock", (nn.Module,), {})},
        (
            r"transformer_blocks.*\.(to_[qkv]|to_out\.0|gate_layer|proj|out)|modulation\.1",
            r".*\.(to_[qkv]|to_out\.0|gate_up|out)",
        ),
    ),
}


class Base:
    """A base model in the engine and in diffusers' pipeline. An answer is the velocity of one step."""

    tolerance = 1e-5

    def __init__(self, tiny: TinyTransformer, folder: Path) -> None:
        self.tiny, self.reference = tiny, REFERENCES[tiny]
        self.family = load_family(folder, OPTIONS)
        self.table = LayerTable(self.family.components, self.family.denoiser)
        self.pipeline = tiny.reference(folder)
        pipeline = self.pipeline.pipeline
        self.modules: dict[str, Any] = {name: getattr(pipeline, name) for name in self.family.components}
        self.captions = self.encode(self.modules)
        self.plain = self.answer(self.modules)

    def original(self) -> nn.Module:
        """Return the linears of the transformer as the original code has them, which trainers of it see."""
        shell = nn.Module()
        for name, weight in self.tiny.original_names(self.modules["transformer"].state_dict()).items():
            if not name.endswith(".weight") or weight.dim() != 2:
                continue
            *path, leaf, _ = name.split(".")
            node, kind = shell, nn.Module
            for part in path:
                if not hasattr(node, part):
                    node.add_module(part, kind())
                node, kind = getattr(node, part), self.reference.blocks.get(part, nn.Module)
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            node.add_module(leaf, linear)
        return shell

    def trained(self, component: str, is_original: bool, *, fuses: bool = False) -> nn.Module:
        """Return a copy of a module for a trainer, with diffusers' names or the original code's.

        In one that `fuses`, diffusers has made one layer of queries, keys and values.
        """
        module = self.original() if is_original else copy.deepcopy(self.modules[component])
        for layer in list(module.modules()) if fuses else ():
            if hasattr(layer, "fuse_projections"):
                cast(Any, layer).fuse_projections()
                del layer.to_q, layer.to_k, layer.to_v
        return module

    @torch.inference_mode()
    def encode(self, modules: Mapping[str, Any]) -> Any:
        pipeline = self.pipeline.pipeline
        for name, module in modules.items():
            setattr(pipeline, name, module)
        if self.tiny is ANIMA:
            return self.pipeline.caption(PROMPT)[None]
        guided = {"do_classifier_free_guidance": False} if self.tiny is Z_IMAGE else {}
        made = pipeline.encode_prompt(PROMPT, **guided)
        return {FLUX1: made[:2], QWEN_IMAGE21: made[0]}.get(self.tiny, made)

    @torch.inference_mode()
    def answer(self, modules: Mapping[str, Any]) -> Tensor:
        reads = [modules[name] is module for name, module in self.modules.items() if name != "transformer"]
        captions = self.captions if all(reads) else self.encode(modules)
        return self.reference.answer(modules["transformer"], captions, self.reference.latents)

    def read(self, path: Path) -> AdapterWeights:
        return read_adapter(path, self.table, max_rank=OPTIONS.max_rank, dtype=torch.float32)

    @torch.inference_mode()
    def with_adapter(self, path: Path, weights: Sequence[float]) -> list[Tensor]:
        read = self.read(path)
        answers: list[Tensor] = []
        for weight in weights:
            for name, component in self.family.components.items():
                bind_alone(component.layers, read.get(name, {}), weight)
            request = RunRequest(run_id="", prompt=PROMPT, guidance=1, scale=weight, width=64, height=64)
            encoded = self.family.prepare(self.family.encode(request, str(path)))
            (velocity,) = self.family.denoise(self.reference.latents[None], torch.tensor([700.0]), encoded)
            answers.append(velocity)
        return answers

    def with_weights(self, changed: Mapping[str, Weights], *, is_original: bool) -> Tensor:
        """Return the pipeline's answer with these weights in place of the components' own."""
        modules = dict(self.modules)
        for component, weights in changed.items():
            modules[component] = copy.deepcopy(modules[component])
            named = is_original and component == "transformer"
            own = self.reference.of_diffusers(dict(weights)) if named else dict(weights)
            for name in [name for name in own if name.endswith("to_qkv.weight")]:
                layers = [name.replace("to_qkv", f"to_{part}") for part in "qkv"]
                shapes = [len(modules[component].get_parameter(layer)) for layer in layers]
                own |= dict(zip(layers, own.pop(name).split(shapes), strict=True))
            _, unknown = modules[component].load_state_dict(own, strict=False)
            assert not unknown
        return self.answer(modules)

    def changed_by(
        self, changes: Weights, component: str, *, is_original: bool, fuses: bool = False
    ) -> Callable[[float], Tensor]:
        """Return what answers with these changes, by the names of weights, at a weight of the adapter."""
        own = self.trained(component, is_original, fuses=fuses).state_dict()
        return lambda weight: self.with_weights(
            {component: {name: own[name] + each * weight for name, each in changes.items()}}, is_original=is_original
        )


Bases = Callable[[TinyTransformer], Base]


@pytest.fixture(scope="module")
def bases(written: Callable[[TinyTransformer, str], Path]) -> Bases:
    return cache(lambda tiny: Base(tiny, written(tiny, next(iter(tiny.variants)))))


@pytest.fixture
def base(tiny: TinyTransformer, bases: Bases) -> Base:
    """The family of a row."""
    return bases(tiny)


IN_FULL = ("kohya", "DoRA", "patterns", "patterns, fused", "locon DoRA", "locon DoRA per input, fused", "LoHa",
           "LoKr low-rank", "LoKr, kohya", "LoHa, both in one file")  # fmt: skip
"""Rows that are run at every weight each time: one of each kind."""
rows = partial(format_rows, in_full=IN_FULL)


# -- names -------------------------------------------------------------------------------------------------------------

KOHYA = (".lora_down.weight", ".lora_up.weight")


class Naming(NamedTuple):
    label: str
    prefix: str
    parts: tuple[str, str] = (".lora_A.weight", ".lora_B.weight")
    alpha: float | None = None
    is_original: bool = False
    """The names are those of the original code, where queries, keys and values are one layer."""
    is_flat: bool = False
    component: str = "transformer"
    metadata: Mapping[str, str] | None = None
    is_lokr: bool = False
    fuses: bool = False
    """Queries, keys and values are one layer under diffusers' names."""

    def spelled(self, layer: str) -> str:
        if self.prefix.startswith("text_encoders."):
            layer = layer.removeprefix("language_model.")
        return self.prefix + (layer.replace(".", "_") if self.is_flat else layer)


OF_BOTH = (
    Naming("diffusers, PEFT keys", "transformer."),
    Naming("diffusers, a named adapter", "", (".lora_A.default.weight", ".lora_B.default.weight")),
    Naming("VideoX-Fun", "lora_unet__", KOHYA, 2, is_flat=True),
    Naming("OneTrainer", "transformer.", KOHYA, 2),
    Naming("LyCORIS standalone", "lycoris_", KOHYA, 2, is_flat=True),
    Naming("alpha in the component's metadata", "transformer.", metadata={"transformer.lora_alpha": "2"}),
)
OF_Z_IMAGE = (
    Naming("diffusers, lora.down", "transformer.", (".lora.down.weight", ".lora.up.weight")),
    Naming("kohya", "lora_unet_", KOHYA, 2, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_flat=True),
    Naming("original names under kohya's prefix", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("ComfyUI diffusion_model", "diffusion_model.", is_original=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", alpha=2, is_original=True),
    Naming("ComfyUI diffusion_model, lora.down", "diffusion_model.", (".lora.down.weight", ".lora.up.weight"), 2, True),
    Naming("ai-toolkit", "diffusion_model."),
    Naming("ai-toolkit without a prefix", ""),
    Naming("alpha in flat metadata", "diffusion_model.", metadata={"lora_alpha": "2", "r": "4"}),
    Naming("alpha in metadata, fused", "diffusion_model.", is_original=True, metadata={"network_alpha": "2"}),
    Naming("text encoder, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("text encoder, kohya", "lora_te_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, lora_te1", "lora_te1_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, ComfyUI", "text_encoders.qwen3_4b.transformer.model.", component="text_encoder"),
)
OF_FLUX2_KLEIN = (
    Naming("kohya", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_original=True, is_flat=True),
    Naming("diffusers' names under kohya's prefix", "lora_transformer_", KOHYA, 2, is_flat=True),
    Naming("TheLastBen", "lora_unet_", ("_.lora_down.weight", "_.lora_up.weight"), is_original=True, is_flat=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", KOHYA, 2, is_original=True),
    Naming("ComfyUI diffusion_model, diffusers' names", "diffusion_model."),
    Naming("ai-toolkit", "diffusion_model.", is_original=True),
    Naming("ai-toolkit without a prefix", "", is_original=True),
    Naming("alpha in flat metadata", "diffusion_model.", is_original=True, metadata={"lora_alpha": "2", "r": "4"}),
    Naming("LoKr, kohya", "lora_unet_", is_original=True, is_flat=True, is_lokr=True),
    Naming("LoKr, ai-toolkit", "diffusion_model.", is_original=True, is_lokr=True),
    Naming("LoKr, SimpleTuner", "lycoris_", is_flat=True, is_lokr=True),
    Naming("LoKr, diffusers' names", "transformer.", is_lokr=True),
)
OF_FLUX1 = (
    Naming("kohya", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_original=True, is_flat=True),
    Naming("diffusers' names under kohya's prefix", "lora_transformer_", KOHYA, 2, is_flat=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", KOHYA, 2, is_original=True),
    Naming("ComfyUI diffusion_model, diffusers' names", "diffusion_model."),
    Naming("ai-toolkit", "diffusion_model.", is_original=True),
    Naming("ai-toolkit without a prefix", "", is_original=True),
    Naming("fal", "base_model.model.", is_original=True),
    Naming("alpha in flat metadata", "diffusion_model.", is_original=True, metadata={"lora_alpha": "2", "r": "4"}),
    Naming("LoKr, kohya", "lora_unet_", is_original=True, is_flat=True, is_lokr=True),
    Naming("LoKr, SimpleTuner", "lycoris_", is_flat=True, is_lokr=True),
    Naming("CLIP, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("CLIP, kohya", "lora_te1_text_model_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("CLIP, ComfyUI", "text_encoders.clip_l.transformer.text_model.", component="text_encoder"),
    Naming("T5, PEFT keys", "text_encoder_2.", component="text_encoder_2"),
    Naming("T5, kohya", "lora_te3_", KOHYA, 2, is_flat=True, component="text_encoder_2"),
    Naming("T5, ComfyUI", "text_encoders.t5xxl.transformer.", component="text_encoder_2"),
)
OF_KREA_2 = (
    Naming("kohya", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_original=True, is_flat=True),
    Naming("diffusers' names under kohya's prefix", "lora_transformer_", KOHYA, 2, is_flat=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", KOHYA, 2, is_original=True),
    Naming("ai-toolkit", "diffusion_model.", is_original=True),
    Naming("ai-toolkit, base_model", "base_model.model.", is_original=True),
    Naming("ai-toolkit without a prefix", "", is_original=True),
    Naming("LoKr, kohya", "lora_unet_", is_original=True, is_flat=True, is_lokr=True),
    Naming("LyCORIS, fused by diffusers", "lycoris_", KOHYA, 2, is_flat=True, fuses=True),
    Naming("LoKr, SimpleTuner, fused by diffusers", "lycoris_", is_flat=True, is_lokr=True, fuses=True),
    Naming("text encoder, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("text encoder, ComfyUI", "text_encoders.qwen3vl_4b.transformer.model.", component="text_encoder"),
)
OF_ANIMA = (
    Naming("ai-toolkit", "diffusion_model.", is_original=True),
    Naming("ai-toolkit without a prefix", "", is_original=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", alpha=2, is_original=True),
    Naming("kohya", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("LyCORIS standalone, original names", "lycoris_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("LoKr, kohya", "lora_unet_", is_original=True, is_flat=True, is_lokr=True),
    Naming("LoKr, diffusers' names", "transformer.", is_lokr=True),
    Naming("text conditioner, PEFT keys", "text_conditioner.", component="text_conditioner"),
    Naming("text conditioner, ai-toolkit", "diffusion_model.llm_adapter.", component="text_conditioner"),
    Naming("text conditioner, kohya", "lora_unet_llm_adapter_", KOHYA, 2, is_flat=True, component="text_conditioner"),
    Naming("text encoder, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("text encoder, kohya", "lora_te_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, kohya for ComfyUI", "text_encoder.qwen3.", alpha=2, component="text_encoder"),
    Naming("text encoder, ComfyUI", "text_encoders.qwen3_06b.transformer.model.", component="text_encoder"),
)
OF_QWEN_IMAGE21 = (
    Naming("kohya", "lora_unet_", KOHYA, 2, is_flat=True),
    Naming("original names under kohya's prefix", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("diffusers' names under kohya's prefix", "lora_transformer_", KOHYA, 2, is_flat=True),
    Naming("ComfyUI diffusion_model", "diffusion_model.", is_original=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", alpha=2, is_original=True),
    Naming("ai-toolkit", "diffusion_model."),
    Naming("ai-toolkit without a prefix", ""),
    Naming("LoKr, SimpleTuner", "lycoris_", is_flat=True, is_lokr=True),
    Naming("LoKr, ai-toolkit", "diffusion_model.", is_original=True, is_lokr=True),
    Naming("text encoder, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("text encoder, kohya", "lora_te_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, ComfyUI", "text_encoders.qwen3vl_8b.transformer.", component="text_encoder"),
)
"""Names by the sources of their writers (ai-toolkit, OneTrainer, musubi-tuner, ComfyUI, diffusion-pipe, DiffSynth) and
by what people report of files: diffusers #12790, #13203, #13221, ComfyUI #11158, #11487, SGLang #36082."""
NAMED_ROWS = rows(
    *((naming, tiny) for naming in OF_BOTH for tiny in TINY_TRANSFORMERS),
    *((naming, Z_IMAGE) for naming in OF_Z_IMAGE),
    *((naming, FLUX2_KLEIN) for naming in OF_FLUX2_KLEIN),
    *((naming, FLUX1) for naming in OF_FLUX1),
    *((naming, KREA_2) for naming in OF_KREA_2),
    *((naming, ANIMA) for naming in OF_ANIMA),
    *((naming, QWEN_IMAGE21) for naming in OF_QWEN_IMAGE21),
)


def linears(module: nn.Module) -> Iterable[tuple[str, nn.Linear]]:
    """Return the linears by name, without those of a text encoder's eyes and mouth."""
    named = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear))
    return ((name, layer) for name, layer in named if "visual." not in name and name != "lm_head")


def written(
    path: Path, base: Base, naming: Naming, draw: Callable[[nn.Linear], tuple[Mapping[str, Tensor], Tensor]]
) -> Callable[[float], Tensor]:
    """Write an adapter of the tensors and the change that are drawn for each linear; return what diffusers answers."""
    tensors: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for layer, linear in linears(base.trained(naming.component, naming.is_original, fuses=naming.fuses)):
        parts, changes[f"{layer}.weight"] = draw(linear)
        tensors |= {naming.spelled(layer) + part: tensor for part, tensor in parts.items()}
    save_file(tensors, path, metadata=dict(naming.metadata or {}))
    return base.changed_by(changes, naming.component, is_original=naming.is_original, fuses=naming.fuses)


@pytest.mark.parametrize(("naming", "tiny", "weights"), NAMED_ROWS)
def test_every_spelling_gives_the_merged_result(
    base: Base, tmp_path: Path, naming: Naming, weights: Sequence[float]
) -> None:
    """Every linear is changed, and each written once."""
    generator = torch.Generator().manual_seed(1)

    def draw(linear: nn.Linear) -> tuple[Mapping[str, Tensor], Tensor]:
        if naming.is_lokr:
            sides = 1 if linear.out_features % 2 or linear.in_features % 2 else 2
            outer = torch.randn(sides, sides, generator=generator) * 0.2
            inner = torch.randn(linear.out_features // sides, linear.in_features // sides, generator=generator) * 0.2
            parts = {".lokr_w1": outer, ".lokr_w2": inner, ".alpha": torch.tensor(1e10)}
            return parts, torch.kron(outer, inner)
        down = torch.randn(4, linear.in_features, generator=generator) * 0.15
        up = torch.randn(linear.out_features, 4, generator=generator) * 0.15
        alpha = {} if naming.alpha is None else {".alpha": torch.tensor(naming.alpha)}
        scale = 0.5 if naming.alpha or naming.metadata else 1.0
        return {naming.parts[0]: down, naming.parts[1]: up, **alpha}, up @ down * scale

    path = tmp_path / "adapter.safetensors"
    require_equal(base, path, weights, written(path, base, naming, draw), factored=naming.is_lokr)


XLABS = {
    "img_attn.qkv": "processor.qkv_lora1", "txt_attn.qkv": "processor.qkv_lora2", "img_attn.proj": "processor.proj_lora1",
    "txt_attn.proj": "processor.proj_lora2", "linear1": "processor.qkv_lora", "linear2": "processor.proj_lora",
}  # fmt: skip
PART_ROWS = rows(("XLabs", FLUX1), ("XLabs, by ComfyUI", FLUX1), ("sd-scripts, split_qkv", FLUX1))


@pytest.mark.parametrize(("label", "tiny", "weights"), PART_ROWS)
def test_parts_of_joined_layers_give_the_merged_result(
    base: Base, tmp_path: Path, label: str, weights: Sequence[float]
) -> None:
    """XLabs changes no feed forward of a single block. sd-scripts can train parts of a layer apart, between zeros."""
    generator, path = torch.Generator().manual_seed(1), tmp_path / "adapter.safetensors"
    tensors, changes = dict[str, Tensor](), dict[str, Tensor]()
    for layer, linear in linears(base.original()):
        kind = next((kind for kind in XLABS if layer.endswith(kind)), None)
        if kind is None:
            continue
        width = linear.out_features // {"linear1": 7, "qkv": 3}.get(kind.split(".")[-1], 1)
        sizes = [width] * (linear.out_features // width) if width < linear.out_features else [width]
        sizes = [width, width, width, 4 * width] if kind == "linear1" else sizes
        if label == "sd-scripts, split_qkv":
            down = torch.randn(4 * len(sizes), linear.in_features, generator=generator) * 0.15
            up = torch.block_diag(*(torch.randn(size, 4, generator=generator) * 0.15 for size in sizes))
            names = [f"lora_unet_{layer.replace('.', '_')}.lora_{part}.weight" for part in ("down", "up")]
        else:
            sizes = sizes[:3]
            down = torch.randn(4, linear.in_features, generator=generator) * 0.15
            up = torch.randn(sum(sizes), 4, generator=generator) * 0.15
            stem = layer.replace(kind, XLABS[kind])
            if label != "XLabs":
                stem = f"diffusion_model.{layer}{'_qkv' if kind == 'linear1' else ''}"
            names = [f"{stem}.{'lora_' if label != 'XLabs' else ''}{part}.weight" for part in ("down", "up")]
        tensors |= dict(zip(names, (down, up), strict=True))
        changes[f"{layer}.weight"] = torch.zeros(linear.out_features, linear.in_features)
        changes[f"{layer}.weight"][: sum(sizes)] = up @ down
    save_file(tensors, path)
    require_equal(base, path, weights, base.changed_by(changes, "transformer", is_original=True))
    assert {made.rank for made in base.read(path)["transformer"].values()} == {4}


PREFIXES, FLAT_PREFIXES = ("", "transformer.", "diffusion_model."), ("lora_unet_", "lora_transformer_", "lycoris_")


def test_every_linear_of_z_images_real_size_is_found_by_every_spelling() -> None:
    with torch.device("meta"):
        component = ZImageFamily.component(diffusers.ZImageTransformer2DModel())
    table = LayerTable({"transformer": component}, "transformer")
    assert sum(layer.split(".")[0] in REFERENCES[Z_IMAGE].blocks for layer in component.layers) == 270
    assert len(component.layers) == 276
    assert [*{len(layers) for layers in component.fused.values()}] == [3]
    assert len(component.fused) == 34
    renamed = {"to_out.0": "out", "all_x_embedder.2-1": "x_embedder", "all_final_layer.2-1": "final_layer"}
    for layer in (*component.layers, *component.fused):
        spellings = {layer, layer.removesuffix(".0") if layer.endswith("to_out.0") else layer}
        spellings |= {layer.replace(ours, theirs) for ours, theirs in renamed.items()}
        for spelled in spellings:
            names = [prefix + spelled for prefix in (*PREFIXES, "model.diffusion_model.")]
            names += [prefix + spelled.replace(".", "_") for prefix in FLAT_PREFIXES]
            assert {table.find(name) for name in names} == {("transformer", layer)}, spelled
    width = table.shapes["transformer", "layers.0.attention.to_q"][1]
    assert table.shapes["transformer", "layers.0.attention.qkv"] == (3 * width, width) == (11520, 3840)


def test_every_linear_of_qwen_images_real_size_is_found_by_every_spelling() -> None:
    with torch.device("meta"):
        plain = diffusers.QwenImage21Transformer2DModel()
        original = QWEN_IMAGE21.original_names(plain.state_dict())
        table = LayerTable({"transformer": QwenImage21Family.component(plain)}, "transformer")
    assert base_name(table) == "Qwen-Image 2.1"
    named = [name.removesuffix(".weight") for name, weight in original.items() if weight.dim() == 2]
    found = {layer for name in named for layer in table.layers_of("transformer", (table.find(name) or ("", ""))[1])}
    assert found == table.components["transformer"].layers.keys()
    assert len(found) == 232
    for name in {*named, *found}:
        places = {table.find(prefix + name) for prefix in PREFIXES}
        places |= {table.find(prefix + name.replace(".", "_")) for prefix in FLAT_PREFIXES}
        assert len(places) == 1, name
        assert None not in places, name


def real_klein(doubles: int = 5, singles: int = 20, heads: int = 24, text: int = 7680) -> Any:
    """Return the transformer of klein, 4B unless sizes say otherwise, on no numbers."""
    return diffusers.Flux2Transformer2DModel(
        num_layers=doubles, num_single_layers=singles, num_attention_heads=heads, joint_attention_dim=text,
        guidance_embeds=False,
    )  # fmt: skip


def test_every_linear_of_kleins_real_sizes_is_found_by_every_spelling() -> None:
    for size, (doubles, singles, *sides) in {"4B": (5, 20, 24, 7680), "9B": (8, 24, 32, 12288)}.items():
        with torch.device("meta"):
            plain = real_klein(doubles, singles, *sides)
            named = [name for name, _ in linears(plain)]
            original = FLUX2_KLEIN.original_names(plain.state_dict())
            table = LayerTable({"transformer": Flux2KleinFamily.component(plain)}, "transformer")
        assert base_name(table) == f"FLUX.2 klein {size}"
        assert sum("blocks." in name for name in named) == doubles * 12 + singles * 2
        named += [name.removesuffix(".weight") for name, weight in original.items() if weight.dim() == 2]
        for name in named:
            found = {table.find(prefix + name) for prefix in PREFIXES}
            found |= {table.find(prefix + name.replace(".", "_")) for prefix in FLAT_PREFIXES}
            assert len(found) == 1, name
            assert None not in found, name


def test_flux1s_real_checkpoint_and_every_spelling_of_its_linears_are_accounted_for() -> None:
    """diffusers' converter, and ours, find the rows of each layer of a block of each kind, numbered."""
    with torch.device("meta"):
        small = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        whole = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        named = [name for name, _ in linears(whole)]
        every = tiny_flux1.original_names(whole.state_dict())
        table = LayerTable({"transformer": Flux1Family.component(whole)}, "transformer")
    numbers = numbered(small.state_dict())
    original = tiny_flux1.original_names(numbers)
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(original))
    for made in (theirs, of_diffusers({f"model.diffusion_model.{name}": each for name, each in original.items()})):
        assert made.keys() == numbers.keys()
        assert all(torch.equal(made[name], each) for name, each in numbers.items())
    assert base_name(table) == "FLUX.1"
    assert len(named) == 504
    names = {*named, *(name.removesuffix(".weight") for name, weight in every.items() if weight.dim() == 2)}
    names |= {name.replace(part, new) for name in names for part, new in XLABS.items() if name.endswith(part)}
    for name in names:
        found = {table.find(prefix + name) for prefix in (*PREFIXES, "base_model.model.")}
        found |= {table.find(prefix + name.replace(".", "_")) for prefix in FLAT_PREFIXES if "processor" not in name}
        assert len(found) == 1, name
        assert None not in found, name


def test_every_linear_of_krea_2s_real_size_is_found_by_every_spelling() -> None:
    """A checkpoint of its original names has the weights of diffusers' module, and nothing else."""
    with torch.device("meta"):
        plain = diffusers.Krea2Transformer2DModel()
        named = [name for name, _ in linears(plain)]
        own = plain.state_dict()
        original = KREA_2.original_names(own)
        table = LayerTable({"transformer": Krea2Family.component(plain)}, "transformer")
    assert base_name(table) == "Krea 2"
    assert len(named) == len(table.components["transformer"].layers) == 264
    assert {name: each.shape for name, each in REFERENCES[KREA_2].of_diffusers(dict(original)).items()} == {
        name: each.shape for name, each in own.items()
    }
    originals = [
        name.removesuffix(".weight") for name, each in original.items() if each.dim() == 2 and "mod" not in name
    ]
    assert len(originals) == 264
    spelled = [(name, theirs) for name, theirs in zip(named, originals, strict=True)]
    spelled += [(name, name) for name in named]
    for name, theirs in spelled:
        names = [prefix + theirs for prefix in (*PREFIXES, "base_model.model.")]
        names += [prefix + theirs.replace(".", "_") for prefix in FLAT_PREFIXES]
        assert {table.find(each) for each in names} == {("transformer", name)}, theirs
    fused = table.shapes["transformer", "transformer_blocks.27.attn.to_qkv"]
    assert table.find("lycoris_transformer_blocks_27_attn_to_qkv") == (
        "transformer",
        "transformer_blocks.27.attn.to_qkv",
    )
    assert fused == (6144 + 1536 + 1536, 6144)


def test_a_whole_difference_of_a_narrow_layer_is_added(bases: Bases, tmp_path: Path) -> None:
    """Krea 2's projector, of 12 inputs and one output, is as ComfyUI writes it; a wide layer's is refused."""
    base, change = bases(KREA_2), torch.tensor([[0.3, -0.2, 0.4]])
    save_file({"diffusion_model.txtfusion.projector.diff": change}, tmp_path / "a.safetensors")
    expected = base.changed_by({"text_fusion.projector.weight": change}, "transformer", is_original=False)
    require_equal(base, tmp_path / "a.safetensors", (0.0, 0.5, 1.0, -0.5), expected)
    save_file({"diffusion_model.blocks.0.attn.wq.diff": torch.ones(64, 64)}, tmp_path / "b.safetensors")
    with pytest.raises(UnusableAdapter, match=r"full-weight difference .*to_q are not supported, save it as LoRA"):
        read_adapter(tmp_path / "b.safetensors", base.table, max_rank=8, dtype=torch.float32)


# -- PEFT and diffusers ------------------------------------------------------------------------------------------------

PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "alpha 16 of rank 4": {"r": 4, "lora_alpha": 16},
    "rank-stabilized": {"r": 4, "lora_alpha": 4, "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "rank_pattern": {r"attention\.(to_q|qkv)": 8},
        "alpha_pattern": {r"attention\.(to_q|qkv)": 2, "w1": 9},
    },
}
PEFT_ROWS = rows(
    *((name, Z_IMAGE, "transformer") for name in PEFT_CONFIGS),
    *((f"{name}, fused", Z_IMAGE, "transformer") for name in PEFT_CONFIGS),
    ("alpha 16 of rank 4", Z_IMAGE, "text_encoder"),
    ("DoRA", Z_IMAGE, "text_encoder"),
    *(
        (f"{name}{how}", tiny, "transformer")
        for name in ("alpha 16 of rank 4", "DoRA")
        for how in ("", ", fused")
        for tiny in (FLUX2_KLEIN, FLUX1)
    ),
    *((name, KREA_2, "transformer") for name in ("alpha 16 of rank 4", "DoRA")),
    *((name, ANIMA, "transformer") for name in ("alpha 16 of rank 4", "DoRA")),
    *((name, QWEN_IMAGE21, "transformer") for name in ("alpha 16 of rank 4", "DoRA")),
)


def peft_model(
    base: Base, component: str, is_original: bool, config: Mapping[str, Any]
) -> tuple[Any, Callable[[float], Tensor]]:
    """Return PEFT's model of a component, and what diffusers answers with its weights at a weight."""
    targets = base.reference.targets[is_original]
    module = base.trained(component, is_original)
    model = get_peft_model(cast(Any, module), LoraConfig(target_modules=targets, **config))
    randomize(model)
    return model, lambda weight: base.with_weights({component: merged_by_peft(model, weight)}, is_original=is_original)


def merged_by_peft(model: Any, weight: float) -> Weights:
    """Return the weights of a copy of PEFT's model, its layers' own scaling times the weight."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling = {name: value * weight for name, value in layer.scaling.items()}
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize(("label", "tiny", "component", "weights"), PEFT_ROWS)
def test_a_peft_folder_gives_what_peft_makes(
    base: Base, tmp_path: Path, label: str, component: str, weights: Sequence[float]
) -> None:
    """The fused ones are as diffusion-pipe saves them: names of ComfyUI in a folder of PEFT."""
    config, is_original = label.removesuffix(", fused"), label.endswith(", fused")
    model, expected = peft_model(base, component, is_original, PEFT_CONFIGS[config])
    model.save_pretrained(str(tmp_path))
    if is_original:
        file = tmp_path / "adapter_model.safetensors"
        names = {name: f"diffusion_model.{name.removeprefix('base_model.model.')}" for name in load_file(file)}
        save_file({names[name]: each for name, each in load_file(file).items()}, file)
    require_equal(base, tmp_path, weights, expected)


RENAMED = {
    "DoRA, ai-toolkit": renamed("diffusion_model.", "lora_A.weight", "lora_B.weight", "magnitude"),
    "DoRA, VideoX-Fun's names": renamed("lora_unet__", "lora_down.weight", "lora_up.weight", "magnitude", flat=True),
    "DoRA, converted to kohya by diffusers": converted_to_kohya("transformer."),
}
RENAMED_ROWS = rows(
    *((label, Z_IMAGE, False) for label in RENAMED),
    ("DoRA, ai-toolkit, fused", Z_IMAGE, True),
    *((label, FLUX2_KLEIN, label == "DoRA, ai-toolkit") for label in RENAMED),
)


@pytest.mark.parametrize(("label", "tiny", "is_original", "weights"), RENAMED_ROWS)
def test_dora_under_other_names_gives_what_peft_makes(
    base: Base, tmp_path: Path, label: str, is_original: bool, weights: Sequence[float]
) -> None:
    model, expected = peft_model(base, "transformer", is_original, {"r": 4, "lora_alpha": 4, "use_dora": True})
    save_file(RENAMED[label.removesuffix(", fused")](get_peft_model_state_dict(model)), tmp_path / "a.safetensors")
    require_equal(base, tmp_path / "a.safetensors", weights, expected)


DIFFUSERS_ROWS = rows(*((name, Z_IMAGE) for name in ("alpha 16 of rank 4", "patterns", "DoRA", "transformer alone")))


@pytest.mark.parametrize(("config", "tiny", "weights"), DIFFUSERS_ROWS)
def test_what_diffusers_saves_gives_what_peft_makes(
    base: Base, tmp_path: Path, config: str, weights: Sequence[float]
) -> None:
    """The transformer alone is saved by its own `save_lora_adapter`, which names no component."""
    alone = config == "transformer alone"
    model, expected = peft_model(base, "transformer", False, PEFT_CONFIGS["patterns" if alone else config])
    module: Any = base.trained("transformer", False)
    module.add_adapter(model.peft_config["default"])
    module.load_state_dict(model.base_model.model.state_dict())
    if alone:
        module.save_lora_adapter(str(tmp_path))
    else:
        diffusers.ZImagePipeline.save_lora_weights(
            str(tmp_path),
            transformer_lora_layers=get_peft_model_state_dict(module),
            transformer_lora_adapter_metadata=module.peft_config["default"].to_dict(),
        )
    require_equal(base, tmp_path, weights, expected)


# -- LyCORIS and musubi-tuner ------------------------------------------------------------------------------------------

WITHOUT_CONVOLUTIONS = [name for name, options in LYCORIS.items() if options["preset"] == "attn-mlp"]
OF_KLEIN = ("locon", "LoHa", "LoKr", "LoKr full", "LoKr full as factors", "LoKr low-rank")
LYCORIS_ROWS = rows(
    *((name, Z_IMAGE, False) for name in WITHOUT_CONVOLUTIONS),
    *((f"{name}, fused", Z_IMAGE, True) for name in WITHOUT_CONVOLUTIONS),
    *((name, tiny, True) for name in OF_KLEIN for tiny in (FLUX2_KLEIN, ANIMA)),
    *((name, FLUX1, True) for name in ("locon", "LoHa", "LoKr", "LoKr full as factors")),
    *((name, QWEN_IMAGE21, True) for name in ("locon", "LoHa", "LoKr")),
)


@pytest.mark.parametrize(("label", "tiny", "is_original", "weights"), LYCORIS_ROWS)
def test_what_lycoris_saves_gives_what_lycoris_makes(
    base: Base, tmp_path: Path, label: str, is_original: bool, weights: Sequence[float]
) -> None:
    """Z-Image's adapters change the text encoder as well as the transformer."""
    algorithm = label.removesuffix(", fused")
    modules = {"transformer": base.trained("transformer", is_original), "text_encoder": nn.Module()}
    if base.tiny is Z_IMAGE:
        modules["text_encoder"] = base.trained("text_encoder", False)
    network = lycoris_network(modules, **LYCORIS[algorithm])
    path = tmp_path / "adapter.safetensors"
    network.save_weights(str(path), None, {"ss_network_module": "lycoris.kohya"})
    flat = {
        f"{prefix}_{name}".replace(".", "_"): (component, name)
        for prefix, component in (("lora_unet", "transformer"), ("lora_te", "text_encoder"))
        for name, _ in modules[component].named_modules()
    }

    @torch.no_grad()
    def expected(weight: float) -> Tensor:
        if weight == 0:  # LyCORIS' own DoRA keeps the whole change at 0: no weight means no adapter here
            return base.plain
        merged: dict[str, dict[str, Tensor]] = {}
        for layer in network.loras:
            component, name = flat[layer.lora_name]
            layer.multiplier = weight
            inputs = torch.eye(layer.org_module[0].in_features)  # its own merged weight has the scale of LoHa twice
            merged.setdefault(component, {})[f"{name}.weight"] = (layer(inputs) - layer(0 * inputs)).T
        return base.with_weights(merged, is_original=is_original)

    require_equal(base, path, weights, expected, factored="as factors" in algorithm)


MUSUBI_ROWS = rows(
    *(
        (f"{kind}{how}", Z_IMAGE)
        for kind in ("LoRA", "LoHa")
        for how in ("", ", converted for ComfyUI", ", both in one file")
    )
)


@pytest.mark.parametrize(("label", "tiny", "weights"), MUSUBI_ROWS)
def test_what_musubi_tuner_saved_gives_the_merged_result(
    base: Base, tmp_path: Path, label: str, weights: Sequence[float]
) -> None:
    """Files that it wrote and converted itself, by `musubi_tuner/recipe.py`.

    Its converter puts the changes of queries, keys and values into one of three times the rank, beside zeros. Some
    people publish both in one file (diffusers #13203).
    """
    kind = label.partition(",")[0].lower()
    plain, path = MUSUBI / f"{kind}.safetensors", tmp_path / "adapter.safetensors"
    tensors, converted = load_file(plain), load_file(MUSUBI / f"{kind}_comfy.safetensors")
    names = {layer.replace(".", "_"): layer for layer in base.family.components["transformer"].layers}
    changes: dict[str, Tensor] = {}
    for stem in {name.partition(".")[0] for name in tensors}:
        part = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{stem}.")}
        if kind == "lora":
            down, change = part["lora_down.weight"], part["lora_up.weight"] @ part["lora_down.weight"]
        else:
            down = part["hada_w1_b"]
            change = part["hada_w1_a"] @ down * (part["hada_w2_a"] @ part["hada_w2_b"])
        changes[f"{names[stem.removeprefix('lora_unet_')]}.weight"] = change * float(part["alpha"]) / down.shape[0]
    save_file(converted if "converted" in label else tensors | converted if "both" in label else tensors, path)
    require_equal(base, path, weights, base.changed_by(changes, "transformer", is_original=False))
    ranks = [{name: made.rank for name, made in base.read(each)["transformer"].items()} for each in (plain, path)]
    assert ranks[0] == ranks[1]


# -- what is refused ---------------------------------------------------------------------------------------------------

IS_FLUX1 = "looks like a FLUX.1 LoRA, this base is FLUX.2 klein 4B: choose a base model of that family"


def pair(stem: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.lora_down.weight": (4, inputs), f"{stem}.lora_up.weight": (outputs, 4)}


Refused = Sequence[tuple[Mapping[str, tuple[int, ...]], str]]
REFUSED_BY_Z_IMAGE: Refused = (
    (pair("diffusion_model.layers.0.attention.qkv", 32, 95), r"attention.qkv: .* do not fit .*\(96, 32\)"),
    ({"lora_unet_layers_0_attention_qkv.lokr_w1": (1, 1), "lora_unet_layers_0_attention_qkv.lokr_w2": (96, 32)},
     r"rank 32 of transformer.layers.0.attention.to_q, this server takes 8"),
    ({"layers.0.attention.norm_q.lora_A.weight": (4, 16)}, "the base model has no such layers: layers.0"),
    ({"transformer.layers.9.attention.to_q.lora_A.weight": (4, 32)}, "the base model has no such layers: transf"),
    ({"transformer.base_model.model.layers.0.attention.to_q.lora_A.weight": (4, 32)}, "has no such layers: transf"),
    ({"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (4, 3072)}, "looks like a Flux LoRA, this base is Z-I"),
    ({"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight": (4, 3072)}, "like a FLUX.2 LoRA"),
    ({"lora_unet_transformer_blocks_0_img_mlp_net_2.lora_down.weight": (4, 32)}, "looks like a Qwen-Image LoRA, this"),
    ({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": (4, 32)}, "like a LoRA of a diffusion transformer, th"),
    ({"diffusion_model.blocks.0.cross_attn.k.lora_A.weight": (4, 32)}, "looks like a Wan LoRA, this base is Z-Image"),
    ({"lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight": (4, 2048)},
     "looks like an SDXL LoRA, this base is Z-Image: choose a base model of that family, or a LoRA for this one$"),
    ({"lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": (4, 768)}, "looks like an SD 1 or SD 2 or SDXL LoRA"),
)  # fmt: skip
REFUSED_BY_KLEIN: Refused = (
    (pair("lora_unet_double_blocks_18_img_attn_qkv", 3072, 9216), IS_FLUX1),
    (pair("lora_unet_double_blocks_0_img_mod_lin", 3072, 18432), IS_FLUX1),
    (pair("lora_unet_single_blocks_7_linear1", 3072, 21504), IS_FLUX1),
    (pair("lora_unet_single_blocks_7_linear2", 15360, 3072), IS_FLUX1),
    (pair("diffusion_model.double_blocks.0.img_mlp.0", 3072, 12288), IS_FLUX1),
    (pair("transformer.single_transformer_blocks.0.attn.to_q", 3072, 3072), IS_FLUX1),
    (pair("transformer.single_transformer_blocks.0.proj_mlp", 3072, 12288), IS_FLUX1),
    (pair("transformer.transformer_blocks.0.ff.net.0.proj", 3072, 12288), "has no such layers: transformer.tr"),
    (pair("diffusion_model.double_blocks.0.img_attn.qkv", 4096, 12288), "looks like a FLUX.2 klein 9B LoRA"),
    (
        pair("transformer.transformer_blocks.0.attn.to_q", 4096, 4096),
        "looks like a FLUX.2 klein 9B or Qwen-Image 2.1 LoRA",
    ),
    (pair("diffusion_model.single_blocks.30.linear1", 6144, 55296), "looks like a FLUX.2 dev LoRA"),
    (pair("diffusion_model.layers.0.attention.qkv", 3840, 11520), "looks like a Z-Image LoRA"),
    (pair("lora_unet_transformer_blocks_0_img_mlp_net_2", 12288, 3072), "looks like a Qwen-Image LoRA"),
    (pair("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", 2048, 9), "looks like an SDXL LoRA"),
)


Tables = Mapping[TinyTransformer, LayerTable]


@pytest.fixture(scope="module")
def tables(z_image: Path, klein: Path) -> Tables:
    """The layers of tiny Z-Image and of klein 4B, sizes of which tell it from others."""
    tiny, other = (load_family(folder, OPTIONS) for folder in (z_image, klein))
    with torch.device("meta"):
        components = {**other.components, "transformer": Flux2KleinFamily.component(real_klein())}
    return {Z_IMAGE: LayerTable(tiny.components, tiny.denoiser), FLUX2_KLEIN: LayerTable(components, "transformer")}


@pytest.mark.parametrize(("tiny", "shapes", "reason"), [
    *(pytest.param(Z_IMAGE, *each, id=f"z_image-{next(iter(each[0]))}") for each in REFUSED_BY_Z_IMAGE),
    *(pytest.param(FLUX2_KLEIN, *each, id=f"flux2_klein-{next(iter(each[0]))}") for each in REFUSED_BY_KLEIN),
])  # fmt: skip
def test_what_is_of_another_model_or_size_is_refused_by_name(
    tables: Tables, tmp_path: Path, tiny: TinyTransformer, shapes: Mapping[str, tuple[int, ...]], reason: str
) -> None:
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter(tmp_path / "a.safetensors", tables[tiny], max_rank=8, dtype=torch.float32)


@pytest.mark.parametrize(("metadata", "reason"), [
    ({"ss_base_model_version": "zimage"}, ""),
    ({"modelspec.architecture": "Z-Image/lora"}, ""),
    ({"ss_base_model_version": "flux2_klein_4b"}, "looks like a FLUX.2 LoRA .ss_base_model_version: flux2_klein_4b"),
])  # fmt: skip
def test_a_text_encoder_that_two_families_have_goes_where_its_metadata_say(
    tables: Tables, tmp_path: Path, metadata: dict[str, str], reason: str
) -> None:
    stem, path = "text_encoder.layers.0.self_attn.q_proj", tmp_path / "a.safetensors"
    tensors = {f"{stem}.lora_A.weight": torch.ones(4, 32), f"{stem}.lora_B.weight": torch.ones(32, 4)}
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(UnusableAdapter, match=reason) if reason else nullcontext():
        assert read_adapter(path, tables[Z_IMAGE], max_rank=8, dtype=torch.float32).keys() == {"text_encoder"}


@pytest.mark.parametrize(
    "prefix", ["text_encoder.", "text_encoder.model.", "text_encoders.qwen3_4b.transformer.model."]
)
def test_an_adapter_of_kleins_text_encoder_alone_is_found_and_fits_z_image_too(tables: Tables, prefix: str) -> None:
    layer, table = "layers.26.self_attn.q_proj", tables[FLUX2_KLEIN]
    flat = f"lora_te_{layer.replace('.', '_')}"
    for stem in (prefix + layer, flat, flat.replace("_te_", "_te1_")):
        assert table.find(stem) == ("text_encoder", layer)
        assert also_fits({f"{stem}.lora_down.weight": (4, 16)}, table, {}) == ["Z-Image"]
    said = {"ss_base_model_version": "flux2_klein_4b"}
    assert also_fits({f"{flat}.lora_down.weight": (4, 16)}, table, said) == []


def test_the_table_for_users_has_every_row() -> None:
    """`python -m tests.engine.format_table` rewrites it."""
    assert {each for each in documented() if each[2] in map(str, TINY_TRANSFORMERS)} == rows_of(sys.modules[__name__])
