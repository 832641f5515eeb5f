"""Adapters of Z-Image make what their writers make of its transformer and its text encoder.

A row is a writer and a format. What the writer itself, or for a set of names the formula of LoRA, makes of the weights
at every weight of the adapter is put in their place; ours has the adapter bound to the same layers, read by the names
and shapes alone. diffusers' own converter is no reference here: it leaves a fused `qkv` whole and DoRA out.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from serve_app.engine import RunRequest
from serve_app.engine.adapter_slots import bind_alone
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter
from serve_app.engine.families.z_image import ZImageFamily
from tests.engine.diffusers_reference import open_pipeline
from tests.engine.format_table import documented, rows_of
from tests.engine.latent_comparison import EVERY_WEIGHT, OPTIONS, SOME_WEIGHTS, compared, require_equal
from tests.engine.test_adapter_formats import (
    LYCORIS,
    Pair,
    converted_to_kohya,
    lycoris_network,
    randomize,
    renamed,
)
from tests.engine.tiny_models import diffusers
from tests.engine.tiny_z_image import write_z_image

pytestmark = pytest.mark.slow
PROMPT = "a red cat"
MUSUBI = Path(__file__).with_name("musubi_tuner")
PARTS = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
LINEARS = r"(layers|\w+_refiner)\..*\.(to_[qkv]|to_out\.0|w[123]|adaLN_modulation\.0)"
BLOCKS = ("layers", "noise_refiner", "context_refiner")
Weights = Mapping[str, Tensor]
"""A module's weights by its own names."""


class JointTransformerBlock(nn.Module):
    """A block as the original code and ComfyUI have it, which trainers of theirs see. LyCORIS looks for its name."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        parts = [block.get_submodule(name) for name in PARTS]
        qkv = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts[:3]), bias=False)
        qkv.weight = nn.Parameter(torch.cat([part.weight for part in parts[:3]]))
        self.attention = nn.ModuleDict({"qkv": qkv, "out": parts[3]})
        self.feed_forward = block.feed_forward
        if block.modulation:
            self.adaLN_modulation = block.adaLN_modulation


def original(transformer: Any) -> nn.Module:
    """Return the blocks of a copy of diffusers' transformer under the original code's names."""
    whole, shell = copy.deepcopy(transformer), nn.Module()
    for stack in BLOCKS:
        setattr(shell, stack, nn.ModuleList(map(JointTransformerBlock, getattr(whole, stack))))
    return shell


def of_diffusers(weights: Weights) -> dict[str, Tensor]:
    """Return the weights of `original` by diffusers' names."""
    named: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".qkv." in name:
            thirds = zip(PARTS, weight.chunk(3), strict=False)
            named |= {name.replace("attention.qkv", part): third for part, third in thirds}
        else:
            named[name.replace("attention.out", PARTS[3])] = weight
    return named


class ZImage:
    """The base model in the engine and in diffusers' pipeline. An answer is the velocity of one step."""

    def __init__(self, folder: Path) -> None:
        self.family = ZImageFamily.load(folder, OPTIONS)
        self.table = LayerTable(self.family.components, self.family.denoiser)
        self.pipeline = open_pipeline(folder)
        self.modules: dict[str, Any] = {name: getattr(self.pipeline, name) for name in self.family.components}
        self.latents = torch.randn(16, 8, 8, generator=torch.Generator().manual_seed(7))
        self.plain = self.answer(self.modules)

    @torch.inference_mode()
    def answer(self, modules: Mapping[str, Any]) -> Tensor:
        self.pipeline.text_encoder = modules["text_encoder"]
        captions, _ = self.pipeline.encode_prompt(PROMPT, do_classifier_free_guidance=False)
        (velocity,) = modules["transformer"]([self.latents[:, None]], torch.tensor([0.3]), captions, return_dict=False)[
            0
        ]
        return -velocity[:, 0]

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
            (velocity,) = self.family.denoise(self.latents[None], torch.tensor([700.0]), encoded)
            answers.append(velocity)
        return answers

    def with_weights(self, component: str, weights: Weights) -> Tensor:
        """Return the pipeline's answer with these weights in place of the component's own."""
        changed = copy.deepcopy(self.modules[component])
        _, unknown = changed.load_state_dict(weights, strict=False)
        assert not unknown
        return self.answer({**self.modules, component: changed})


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZImage]:
    yield ZImage(write_z_image(tmp_path_factory.mktemp("z_image")))
    if compared:
        print(f"\n{len(compared)} rows, largest error {max(compared.values()):.1e}")  # noqa: T201 - with `-s`


IN_FULL = ("kohya", "DoRA", "patterns", "patterns, fused", "locon DoRA", "locon DoRA per input, fused", "LoHa",
           "LoKr low-rank", "LoHa, both in one file")  # fmt: skip
"""Rows that are run at every weight each time, as those of `test_adapter_formats.rows`: one of each kind."""


def row(*named: Any, suffix: str = "") -> list[Any]:
    """Return a row, whose name is as `format_table` reads it, at every weight; behind `make soak` unless it is `IN_FULL`.

    Every row is run at some weights each time.
    """
    label = str(getattr(named[0], "label", named[0]))
    marks = () if label in IN_FULL else pytest.mark.soak
    every = pytest.param(*named, EVERY_WEIGHT, id=f"{label}-z_image{suffix}-every-weight", marks=marks)
    return [every, *([pytest.param(*named, SOME_WEIGHTS, id=f"{label}-z_image{suffix}-some-weights")] if marks else ())]


# -- names -------------------------------------------------------------------------------------------------------------

LORA_AB, KOHYA = (".lora_A.weight", ".lora_B.weight"), (".lora_down.weight", ".lora_up.weight")


class Naming(NamedTuple):
    label: str
    prefix: str
    parts: tuple[str, str] = LORA_AB
    alpha: float | None = None
    is_original: bool = False
    """The names are those of the original code, where queries, keys and values are one layer."""
    is_flat: bool = False
    component: str = "transformer"
    metadata: Mapping[str, str] | None = None


NAMINGS = (
    Naming("diffusers, PEFT keys", "transformer."),
    Naming("diffusers, lora.down", "transformer.", (".lora.down.weight", ".lora.up.weight")),
    Naming("diffusers, a named adapter", "", (".lora_A.default.weight", ".lora_B.default.weight")),
    Naming("kohya", "lora_unet_", KOHYA, 2, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_flat=True),
    Naming("VideoX-Fun", "lora_unet__", KOHYA, 2, is_flat=True),
    Naming("original names under kohya's prefix", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("ComfyUI diffusion_model", "diffusion_model.", is_original=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", alpha=2, is_original=True),
    Naming("ComfyUI diffusion_model, lora.down", "diffusion_model.", (".lora.down.weight", ".lora.up.weight"), 2, True),
    Naming("ai-toolkit", "diffusion_model."),
    Naming("ai-toolkit without a prefix", ""),
    Naming("OneTrainer", "transformer.", KOHYA, 2),
    Naming("LyCORIS standalone", "lycoris_", KOHYA, 2, is_flat=True),
    Naming("alpha in flat metadata", "diffusion_model.", metadata={"lora_alpha": "2", "r": "4"}),
    Naming("alpha in metadata, fused", "diffusion_model.", is_original=True, metadata={"network_alpha": "2"}),
    Naming("alpha in the component's metadata", "transformer.", metadata={"transformer.lora_alpha": "2"}),
    Naming("text encoder, PEFT keys", "text_encoder.", component="text_encoder"),
    Naming("text encoder, kohya", "lora_te_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, lora_te1", "lora_te1_", KOHYA, 2, is_flat=True, component="text_encoder"),
    Naming("text encoder, ComfyUI", "text_encoders.qwen3_4b.transformer.model.", component="text_encoder"),
)  # fmt: skip
"""Names by the sources of their writers (ai-toolkit, OneTrainer, musubi-tuner, ComfyUI, diffusion-pipe, DiffSynth) and
by what people report of files: diffusers #12790, #13203, #13221, ComfyUI #11158, #11487, SGLang #36082."""


def random_pairs(module: nn.Module, seed: int = 1) -> dict[str, Pair]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Pair(
            torch.randn(4, layer.in_features, generator=generator) * 0.15,
            torch.randn(layer.out_features, 4, generator=generator) * 0.15,
        )
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }


def with_changes(base: ZImage, component: str, changes: Weights, weight: float) -> Tensor:
    own = base.modules[component].state_dict()
    changed = {f"{layer}.weight": own[f"{layer}.weight"] + change * weight for layer, change in changes.items()}
    return base.with_weights(component, changed)


NAMED_ROWS = [each for naming in NAMINGS for each in row(naming)]


@pytest.mark.parametrize(("naming", "weights"), NAMED_ROWS)
def test_every_spelling_gives_the_merged_result(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], naming: Naming
) -> None:
    module = z_image.modules[naming.component]
    tensors: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for layer, (down, up) in random_pairs(original(module) if naming.is_original else module).items():
        stem = naming.prefix + (layer.replace(".", "_") if naming.is_flat else layer)
        tensors |= {stem + naming.parts[0]: down, stem + naming.parts[1]: up}
        if naming.alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(naming.alpha)
        scale = 0.5 if naming.alpha or naming.metadata else 1.0
        changes[f"{layer}."] = up @ down * scale
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path, metadata=dict(naming.metadata or {}))
    merged = {name.removesuffix("."): change for name, change in of_diffusers(changes).items()}
    expected = lambda weight: with_changes(z_image, naming.component, merged, weight)  # noqa: E731
    require_equal(z_image, path, weights, expected)


def test_every_linear_of_the_real_size_is_found_by_every_spelling() -> None:
    with torch.device("meta"):
        component = ZImageFamily.component(diffusers.ZImageTransformer2DModel())
    table = LayerTable({"transformer": component}, "transformer")
    assert sum(layer.split(".")[0] in BLOCKS for layer in component.layers) == 270
    assert len(component.layers) == 276
    assert [*{len(layers) for layers in component.fused.values()}] == [3]
    assert len(component.fused) == 34
    renamed = {"to_out.0": "out", "all_x_embedder.2-1": "x_embedder", "all_final_layer.2-1": "final_layer"}
    for layer in (*component.layers, *component.fused):
        spellings = {layer, layer.removesuffix(".0") if layer.endswith("to_out.0") else layer}
        spellings |= {layer.replace(ours, theirs) for ours, theirs in renamed.items()}
        for spelled in spellings:
            flat = spelled.replace(".", "_")
            names = [prefix + spelled for prefix in ("", "transformer.", "diffusion_model.", "model.diffusion_model.")]
            names += [prefix + flat for prefix in ("lora_unet_", "lora_transformer_", "lycoris_")]
            assert {table.find(name) for name in names} == {("transformer", layer)}, spelled
    width = table.shapes["transformer", "layers.0.attention.to_q"][1]
    assert table.shapes["transformer", "layers.0.attention.qkv"] == (3 * width, width) == (11520, 3840)


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
PEFT_ROWS = [
    *(each for name in PEFT_CONFIGS for each in row(name, "transformer", False)),
    *(each for name in PEFT_CONFIGS for each in row(f"{name}, fused", "transformer", True)),
    *row("alpha 16 of rank 4", "text_encoder", False, suffix="-text_encoder"),
    *row("DoRA", "text_encoder", False, suffix="-text_encoder"),
]


def merged_by_peft(model: Any, weight: float) -> Weights:
    """Return the weights of a copy of PEFT's model, its layers' own scaling times the weight."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            layer.scaling = {name: value * weight for name, value in layer.scaling.items()}
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize(("config", "component", "is_original", "weights"), PEFT_ROWS)
def test_a_peft_folder_gives_what_peft_makes(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], config: str, component: str, is_original: bool
) -> None:
    """The fused ones are as diffusion-pipe saves them: names of ComfyUI in a folder of PEFT."""
    module = original(z_image.modules[component]) if is_original else copy.deepcopy(z_image.modules[component])
    targets = r".*\.(qkv|out|w[123]|adaLN_modulation\.0)" if is_original else f"{LINEARS}|.*_proj"
    config = config.removesuffix(", fused")
    model = get_peft_model(cast(Any, module), LoraConfig(target_modules=targets, **PEFT_CONFIGS[config]))
    randomize(model)
    model.save_pretrained(str(tmp_path))
    if is_original:
        file = tmp_path / "adapter_model.safetensors"
        named = {
            f"diffusion_model.{name.removeprefix('base_model.model.')}": each for name, each in load_file(file).items()
        }
        save_file(named, file)

    def expected(weight: float) -> Tensor:
        merged = merged_by_peft(model, weight)
        return z_image.with_weights(component, of_diffusers(merged) if is_original else merged)

    require_equal(z_image, tmp_path, weights, expected)


RENAMED = {
    "DoRA, ai-toolkit": renamed("diffusion_model.", "lora_A.weight", "lora_B.weight", "magnitude"),
    "DoRA, VideoX-Fun's names": renamed("lora_unet__", "lora_down.weight", "lora_up.weight", "magnitude", flat=True),
    "DoRA, converted to kohya by diffusers": converted_to_kohya("transformer."),
}
RENAMED_ROWS = [
    *(each for label in RENAMED for each in row(label, False)),
    *row("DoRA, ai-toolkit, fused", True),
]


@pytest.mark.parametrize(("label", "is_original", "weights"), RENAMED_ROWS)
def test_dora_under_other_names_gives_what_peft_makes(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], label: str, is_original: bool
) -> None:
    plain = z_image.modules["transformer"]
    module = original(plain) if is_original else copy.deepcopy(plain)
    targets = r".*\.(qkv|out|w[123])" if is_original else LINEARS
    config = LoraConfig(target_modules=targets, r=4, lora_alpha=4, use_dora=True)
    model = get_peft_model(cast(Any, module), config)
    randomize(model)
    save_file(RENAMED[label.removesuffix(", fused")](get_peft_model_state_dict(model)), tmp_path / "a.safetensors")

    def expected(weight: float) -> Tensor:
        merged = merged_by_peft(model, weight)
        return z_image.with_weights("transformer", of_diffusers(merged) if is_original else merged)

    require_equal(z_image, tmp_path / "a.safetensors", weights, expected)


DIFFUSERS_ROWS = [
    each for name in ("alpha 16 of rank 4", "patterns", "DoRA", "transformer alone") for each in row(name)
]


@pytest.mark.parametrize(("config", "weights"), DIFFUSERS_ROWS)
def test_what_diffusers_saves_gives_what_peft_makes(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], config: str
) -> None:
    """The transformer alone is saved by its own `save_lora_adapter`, which names no component."""
    alone = config == "transformer alone"
    module = copy.deepcopy(z_image.modules["transformer"])
    settings = LoraConfig(target_modules=LINEARS, **PEFT_CONFIGS["patterns" if alone else config])
    module.add_adapter(settings)
    randomize(module)
    if alone:
        module.save_lora_adapter(str(tmp_path))
    else:
        diffusers.ZImagePipeline.save_lora_weights(
            str(tmp_path),
            transformer_lora_layers=get_peft_model_state_dict(module),
            transformer_lora_adapter_metadata=module.peft_config["default"].to_dict(),
        )
    model = get_peft_model(copy.deepcopy(z_image.modules["transformer"]), settings)
    cast(Any, model.base_model.model).load_state_dict(module.state_dict())
    require_equal(
        z_image,
        tmp_path,
        weights,
        lambda weight: z_image.with_weights("transformer", merged_by_peft(model, weight)),
    )


# -- LyCORIS and musubi-tuner ------------------------------------------------------------------------------------------

WITHOUT_CONVOLUTIONS = [name for name, options in LYCORIS.items() if options["preset"] == "attn-mlp"]
LYCORIS_ROWS = [
    each
    for name in WITHOUT_CONVOLUTIONS
    for is_original in (False, True)
    for each in row(f"{name}{', fused' if is_original else ''}", name, is_original)
]


@pytest.mark.parametrize(("label", "algorithm", "is_original", "weights"), LYCORIS_ROWS)
def test_what_lycoris_saves_gives_what_lycoris_makes(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], label: str, algorithm: str, is_original: bool
) -> None:
    modules = copy.deepcopy(z_image.modules)
    if is_original:
        modules["transformer"] = original(modules["transformer"])
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
            return z_image.plain
        changed = copy.deepcopy(z_image.modules)
        merged: dict[str, dict[str, Tensor]] = {component: {} for component in changed}
        for layer in network.loras:
            component, name = flat[layer.lora_name]
            layer.multiplier = weight
            inputs = torch.eye(layer.org_module[0].in_features)  # its own merged weight has the scale of LoHa twice
            merged[component][f"{name}.weight"] = (layer(inputs) - layer(0 * inputs)).T
        for component, of_layers in merged.items():
            changed[component].load_state_dict(of_diffusers(of_layers), strict=False)
        return z_image.answer(changed)

    require_equal(z_image, path, weights, expected, factored="as factors" in algorithm)


MUSUBI_ROWS = [
    each
    for kind in ("LoRA", "LoHa")
    for how in ("", ", converted for ComfyUI", ", both in one file")
    for each in row(f"{kind}{how}")
]


@pytest.mark.parametrize(("label", "weights"), MUSUBI_ROWS)
def test_what_musubi_tuner_saved_gives_the_merged_result(
    z_image: ZImage, tmp_path: Path, weights: Sequence[float], label: str
) -> None:
    """Files that it wrote and converted itself, by `musubi_tuner/recipe.py`.

    Its converter puts the changes of queries, keys and values into one of three times the rank, beside zeros. Some
    people publish both in one file (diffusers #13203).
    """
    kind = label.partition(",")[0].lower()
    tensors = load_file(MUSUBI / f"{kind}.safetensors")
    names = {layer.replace(".", "_"): layer for layer in z_image.family.components["transformer"].layers}
    changes: dict[str, Tensor] = {}
    for stem in {name.partition(".")[0] for name in tensors}:
        part = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{stem}.")}
        change, rank = (
            (part["lora_up.weight"] @ part["lora_down.weight"], part["lora_down.weight"].shape[0])
            if kind == "lora"
            else (
                part["hada_w1_a"] @ part["hada_w1_b"] * (part["hada_w2_a"] @ part["hada_w2_b"]),
                part["hada_w1_b"].shape[0],
            )
        )
        changes[names[stem.removeprefix("lora_unet_")]] = change * float(part["alpha"]) / rank
    plain, path = MUSUBI / f"{kind}.safetensors", tmp_path / "adapter.safetensors"
    converted = load_file(MUSUBI / f"{kind}_comfy.safetensors")
    save_file(converted if "converted" in label else tensors | converted if "both" in label else tensors, path)
    require_equal(z_image, path, weights, lambda weight: with_changes(z_image, "transformer", changes, weight))
    ranks = [{name: made.rank for name, made in z_image.read(each)["transformer"].items()} for each in (plain, path)]
    assert ranks[0] == ranks[1]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensors", "reason"), [
    ({"diffusion_model.layers.0.attention.qkv.lora_A.weight": (4, 32),
      "diffusion_model.layers.0.attention.qkv.lora_B.weight": (95, 4)}, r"attention.qkv: .* do not fit .*\(96, 32\)"),
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
])  # fmt: skip
def test_what_is_of_another_model_or_size_is_refused_by_name(
    z_image: ZImage, tmp_path: Path, tensors: Mapping[str, tuple[int, ...]], reason: str
) -> None:
    save_file({name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter(tmp_path / "a.safetensors", z_image.table, max_rank=8, dtype=torch.float32)


@pytest.mark.parametrize(("metadata", "reason"), [
    ({"ss_base_model_version": "zimage"}, ""),
    ({"modelspec.architecture": "Z-Image/lora"}, ""),
    ({"ss_base_model_version": "flux2_klein_4b"}, "looks like a FLUX.2 LoRA .ss_base_model_version: flux2_klein_4b"),
])  # fmt: skip
def test_a_text_encoder_that_two_families_have_goes_where_its_metadata_say(
    z_image: ZImage, tmp_path: Path, metadata: dict[str, str], reason: str
) -> None:
    stem = "text_encoder.layers.0.self_attn.q_proj"
    save_file(
        {f"{stem}.lora_A.weight": torch.ones(4, 32), f"{stem}.lora_B.weight": torch.ones(32, 4)},
        tmp_path / "a.safetensors",
        metadata=metadata,
    )
    if not reason:
        assert z_image.read(tmp_path / "a.safetensors").keys() == {"text_encoder"}
        return
    with pytest.raises(UnusableAdapter, match=reason):
        z_image.read(tmp_path / "a.safetensors")


def test_the_table_for_users_has_every_row() -> None:
    """`python -m tests.engine.format_table` writes it anew."""
    assert {each for each in documented() if each[2] == "z_image"} == rows_of({
        "test_every_spelling_gives_the_merged_result": NAMED_ROWS,
        "test_a_peft_folder_gives_what_peft_makes": PEFT_ROWS,
        "test_what_diffusers_saves_gives_what_peft_makes": DIFFUSERS_ROWS,
        "test_dora_under_other_names_gives_what_peft_makes": RENAMED_ROWS,
        "test_what_lycoris_saves_gives_what_lycoris_makes": LYCORIS_ROWS,
        "test_what_musubi_tuner_saved_gives_the_merged_result": MUSUBI_ROWS,
    })  # fmt: skip
