"""Adapters of every trainer give the latents of their writer: sd-scripts, PEFT, diffusers, LyCORIS.

A row is a writer, a base model and a format; at every weight the latents equal those that the writing library makes
with the adapter in place, or those of its changes merged into the base by hand where the format is a set of names.
"""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.utils.state_dict_utils import convert_state_dict_to_kohya
from lycoris import kohya as lycoris_kohya
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    MontecloraConfig,
    VeloraConfig,
    VeraConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from serve_app.engine.adapters.layer_table import UnusableAdapter
from serve_app.engine.families.unet import sgm_aliases
from tests.engine.format_table import documented, rows, rows_of
from tests.engine.latent_comparison import (
    TOLERANCE,
    Base,
    Module,
    require_equal,
)

pytestmark = pytest.mark.slow
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
LINEARS = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
UNETS = ("sd", "sd2", "sdxl")
REDRAWN = "what tiny_models or diffusers draw without an adapter has changed"


# -- names: one set of changes under every spelling --------------------------------------------------------------------


class Pair(NamedTuple):
    down: Tensor
    up: Tensor


Pairs = dict[Module, Pair]


def random_pairs(base: Base, component: str, endings: tuple[str, ...], *, rank: int | None = 4, seed: int = 1) -> Pairs:
    """Rank None mixes ranks of 1 to 9."""
    generator = torch.Generator().manual_seed(seed)
    pairs: Pairs = {}
    for number, (name, module) in enumerate(base.layers(component, endings)):
        r, shape = rank or 1 + number % 9, module.weight.shape
        down = torch.randn(r, *shape[1:], generator=generator) * 0.15
        up = torch.randn(shape[0], r, *(1,) * (len(shape) - 2), generator=generator) * 0.15
        pairs[component, name] = Pair(down, up)
    return pairs


def unet(base: Base) -> Pairs:
    return random_pairs(base, "unet", LINEARS)


def all_components(base: Base) -> Pairs:
    pairs = unet(base)
    for component in base.components.keys() - {"unet"}:
        pairs |= random_pairs(base, component, TEXT, seed=5)
    return pairs


def locon(base: Base) -> Pairs:
    return all_components(base) | random_pairs(base, "unet", ("conv1", "conv2", "conv_shortcut"), rank=3, seed=9)


def mixed_ranks(base: Base) -> Pairs:
    return random_pairs(base, "unet", LINEARS, rank=None)


def attention(base: Base) -> Pairs:
    return random_pairs(base, "unet", ATTENTION)


def text(base: Base) -> Pairs:
    return random_pairs(base, "text_encoder", TEXT, seed=5)


def kohya(base: Base, component: str, layer: str) -> tuple[str, str, str]:
    encoder = {"sdxl": "lora_te1"}.get(base.name, "lora_te")
    prefix = {"unet": "lora_unet", "text_encoder": encoder, "text_encoder_2": "lora_te2"}[component]
    named = layer if component == "unet" or layer == "text_projection" else _with_text_model(layer)
    stem = f"{prefix}_{named}".replace(".", "_")
    return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"


def _with_text_model(layer: str) -> str:
    return "text_model." + layer.removeprefix("text_model.")


def dotted(prefix: str, down: str, up: str) -> Callable[[Base, str, str], tuple[str, str, str]]:
    def named(base: Base, component: str, layer: str) -> tuple[str, str, str]:
        stem = prefix.format(component=component) + (layer if component == "unet" else _with_text_model(layer))
        return stem + down, stem + up, stem + ".alpha"

    return named


def old_processor(base: Base, component: str, layer: str) -> tuple[str, str, str]:
    head, _, leaf = layer.rpartition(".attn")
    number, _, projection = leaf.partition(".")
    stem = f"unet.{head}.attn{number}.processor.{projection.replace('to_out.0', 'to_out')}_lora"
    return stem + ".down.weight", stem + ".up.weight", stem + ".alpha"


def original_names(prefix: str) -> Callable[[Base, str, str], tuple[str, str, str]]:
    """Return the names of the original code (`input_blocks.4.1.…`), as ComfyUI and SDXL trainers write them."""

    def named(base: Base, component: str, layer: str) -> tuple[str, str, str]:
        unet = base.components["unet"]
        aliases = sgm_aliases([name for name, _ in base.layers("unet", ("",))], unet.config.layers_per_block)
        spelled = next(alias for alias, ours in aliases.items() if ours == layer and "." in alias)
        spelled = spelled if prefix.endswith(".") else spelled.replace(".", "_")
        stem = prefix + spelled
        return f"{stem}.lora_down.weight", f"{stem}.lora_up.weight", f"{stem}.alpha"

    return named


class Naming(NamedTuple):
    label: str
    bases: str
    pairs: Callable[[Base], Pairs]
    names: Callable[[Base, str, str], tuple[str, str, str]]
    alpha: float | None = None
    dtype: torch.dtype = torch.float32
    alpha_dtype: torch.dtype | None = None


NAMINGS = (
    Naming("kohya fp16 with text encoders", "sd sd2 sdxl", all_components, kohya, alpha=2, dtype=torch.float16),
    Naming("kohya", "sd sd2 sdxl", unet, kohya, alpha=1),
    Naming("kohya bf16 with text encoders", "sd sd2 sdxl", all_components, kohya, alpha=2, dtype=torch.bfloat16),
    Naming("kohya LoCon", "sd sd2 sdxl", locon, kohya, alpha=1),
    Naming("kohya without alpha", "sd sd2 sdxl", all_components, kohya),
    Naming("kohya integer alpha", "sd sd2 sdxl", unet, kohya, alpha=1, alpha_dtype=torch.int64),
    Naming("kohya mixed ranks", "sd sd2 sdxl", mixed_ranks, kohya, alpha=2),
    Naming("kohya fp64", "sd sd2 sdxl", unet, kohya, alpha=1, dtype=torch.float64),
    Naming("fp8 E4M3", "sd", attention, kohya, dtype=torch.float8_e4m3fn),
    Naming("fp8 E5M2", "sd", attention, kohya, dtype=torch.float8_e5m2),
    Naming("diffusers, PEFT keys", "sd sdxl", unet, dotted("{component}.", ".lora_A.weight", ".lora_B.weight")),
    Naming("diffusers, a named adapter", "sd", unet, dotted("unet.", ".lora_A.style.weight", ".lora_B.style.weight")),
    Naming("diffusers, lora.down", "sd sdxl", unet, dotted("unet.", ".lora.down.weight", ".lora.up.weight")),
    Naming("diffusers, old processors", "sd sd2 sdxl", attention, old_processor),
    Naming("diffusers, lora_linear_layer", "sd", text,
           dotted("text_encoder.", ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")),
    Naming("OneTrainer clip_l", "sd", text, dotted("clip_l.", ".lora_down.weight", ".lora_up.weight"), alpha=2),
    Naming("ComfyUI diffusion_model", "sdxl", unet, original_names("diffusion_model."), alpha=2),
    Naming("original names under kohya's prefix", "sdxl", unet, original_names("lora_unet_"), alpha=2),
    Naming("LyCORIS standalone", "sd sd2", unet, lambda _, _component, layer: tuple(
        f"lycoris_{layer.replace('.', '_')}{part}" for part in (".lora_down.weight", ".lora_up.weight", ".alpha")
    ), alpha=2),  # type: ignore[return-value]
)  # fmt: skip
NAMED_ROWS = rows(
    *((naming, base) for naming in NAMINGS for base in naming.bases.split()),
    in_full=("kohya LoCon", "diffusers, PEFT keys"),
)


@pytest.mark.parametrize(("naming", "base_name", "weights"), NAMED_ROWS)
def test_every_spelling_gives_the_merged_result(
    bases: Callable[[str], Base], tmp_path: Path, weights: Sequence[float], naming: Naming, base_name: str
) -> None:
    base = bases(base_name)
    tensors: dict[str, Tensor] = {}
    changes: dict[Module, Tensor] = {}
    for (component, layer), pair in naming.pairs(base).items():
        down, up = (tensor.to(naming.dtype) for tensor in pair)
        down_key, up_key, alpha_key = naming.names(base, component, layer)
        tensors |= {down_key: down, up_key: up}
        scale = 1.0
        if naming.alpha is not None:
            tensors[alpha_key] = torch.tensor(naming.alpha).to(naming.alpha_dtype or naming.dtype)
            scale = naming.alpha / down.shape[0]
        changes[component, layer] = up.float().flatten(1) @ down.float().flatten(1) * scale
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path)
    require_equal(base, path, weights, lambda weight: base.merged(changes, weight))


# -- PEFT's folders ----------------------------------------------------------------------------------------------------

CONVOLUTIONS = ["conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "to_q"]
PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "alpha is the rank": {"r": 4, "lora_alpha": 4},
    "alpha 16 of rank 4": {"r": 4, "lora_alpha": 16},
    "rank-stabilized": {"r": 4, "lora_alpha": 4, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 4,
        "rank_pattern": {"attn1.to_q": 8},
        "alpha_pattern": {"attn1.to_q": 2, "to_v": 9},
    },
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "convolutions": {"r": 3, "lora_alpha": 6, "target_modules": CONVOLUTIONS},
    "DoRA of convolutions": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": CONVOLUTIONS},
}
TRAINED_OTHERWISE: dict[str, dict[str, Any]] = {
    "VeLoRA": {"r": 4, "velora_config": VeloraConfig(num_groups=4)},
    "MonteCLoRA": {"r": 4, "monteclora_config": MontecloraConfig(num_samples=2, buffer_size=2)},
}
"""These methods differ from LoRA in training alone, and leave tensors for that in their files."""
OF_ENCODERS: dict[str, dict[str, Any]] = {
    "without q_proj": {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "fc1", "fc2"]},
}
PEFT_ROWS = rows(
    *((name, base, "unet") for name in PEFT_CONFIGS for base in ("sd", "sd2", "sdxl")),
    *((name, "sd", "unet") for name in TRAINED_OTHERWISE),
    ("alpha 16 of rank 4", "sd", "text_encoder"),
    ("alpha 16 of rank 4", "sdxl", "text_encoder_2"),
    ("alpha 16 of rank 4", "sdxl", "text_encoder"),
    ("without q_proj", "sd", "text_encoder"),
    ("without q_proj", "sdxl", "text_encoder_2"),
    ("without q_proj", "sdxl", "text_encoder"),
    in_full=("patterns", "DoRA", "DoRA of convolutions"),
)


def peft_model(base: Base, component: str, config: Mapping[str, Any]) -> Any:
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"] if component == "unet" else ["q_proj", "v_proj", "fc1"]
    module = copy.deepcopy(base.components[component])
    settings: dict[str, Any] = {"target_modules": targets, **config}
    model = get_peft_model(module, LoraConfig(**settings)).eval()
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    """LoRA weights that change something: libraries start them at no change."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)


def scaled_latents(base: Base, component: str, model: Any, module: nn.Module, weight: float) -> Tensor:
    """Return the pipeline with PEFT's model in place, its layers' own scaling times the weight."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(getattr(layer, "scaling", None), dict)]
    before = [dict(layer.scaling) for layer in layers]
    for layer, scaling in zip(layers, before, strict=True):
        layer.scaling = {name: value * weight for name, value in scaling.items()}
    setattr(base.pipeline, component, module)
    try:
        return base.latents()
    finally:
        setattr(base.pipeline, component, base.components[component])
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling = scaling


@pytest.mark.parametrize(("config", "base_name", "component", "weights"), PEFT_ROWS)
def test_a_peft_folder_gives_what_peft_makes(
    bases: Callable[[str], Base], tmp_path: Path, weights: Sequence[float], config: str, base_name: str, component: str
) -> None:
    base = bases(base_name)
    model = peft_model(base, component, (PEFT_CONFIGS | TRAINED_OTHERWISE | OF_ENCODERS)[config])
    model.save_pretrained(str(tmp_path / "folder"))
    module = model.base_model.model
    require_equal(
        base, tmp_path / "folder", weights, lambda weight: scaled_latents(base, component, model, module, weight)
    )


Tensors = dict[str, Tensor]


def renamed(prefix: str, *parts: str, flat: bool = False) -> Callable[[Tensors], Tensors]:
    """Return a function that writes PEFT's tensors under other names of `lora_A`, `lora_B` and the magnitudes."""

    def named(tensors: Tensors) -> Tensors:
        written: Tensors = {}
        for name, tensor in tensors.items():
            stem, _, part = name.removeprefix("base_model.model.").partition(".lora_")
            kind = ("A.weight", "B.weight", "magnitude_vector").index(part)
            written[f"{prefix}{stem.replace('.', '_') if flat else stem}.{parts[kind]}"] = tensor
        return written

    return named


def converted_to_kohya(prefix: str) -> Callable[[Tensors], Tensors]:
    """diffusers' converter, by which its advanced trainers save: it leaves a dot in the magnitudes' names."""
    return lambda tensors: convert_state_dict_to_kohya(
        {name.replace("base_model.model.", prefix): tensor for name, tensor in tensors.items()}
    )


RENAMED: dict[str, Callable[[Tensors], Tensors]] = {
    "DoRA, ai-toolkit": renamed("lora_unet_", "lora_down.weight", "lora_up.weight", "magnitude", flat=True),
    "DoRA, ai-toolkit, PEFT keys": renamed("unet.", "lora_A.weight", "lora_B.weight", "magnitude"),
    "DoRA, converted to kohya by diffusers": converted_to_kohya("unet."),
    "DoRA, one number per output as dora_scale": renamed("unet.", "lora_down.weight", "lora_up.weight", "dora_scale"),
    "DoRA, its authors' names": renamed("", "lora_A.weight", "lora_B.weight", "weight_m_wdecomp.weight"),
}
RENAMED_ROWS = rows(
    *((label, base) for label in RENAMED for base in ("sd", "sdxl")),
    in_full=("DoRA, ai-toolkit", "DoRA, converted to kohya by diffusers"),
)


@pytest.mark.parametrize(("label", "base_name", "weights"), RENAMED_ROWS)
def test_dora_under_other_names_gives_what_peft_makes(
    bases: Callable[[str], Base], tmp_path: Path, weights: Sequence[float], label: str, base_name: str
) -> None:
    base = bases(base_name)
    model = peft_model(base, "unet", {"r": 4, "lora_alpha": 4, "use_dora": True})
    save_file(RENAMED[label](get_peft_model_state_dict(model)), tmp_path / "adapter.safetensors")
    module = model.base_model.model
    require_equal(
        base,
        tmp_path / "adapter.safetensors",
        weights,
        lambda weight: scaled_latents(base, "unet", model, module, weight),
    )


@pytest.mark.parametrize(("config", "folder", "file"), [
    (IA3Config(target_modules=["to_k", "ff.net.2"], feedforward_modules=["ff.net.2"]), "a PEFT IA3", "PEFT IA³"),
    (VeraConfig(r=4, target_modules=["attn1.to_q"]), "a PEFT VERA", "VeRA"),
    (AdaLoraConfig(target_modules=["to_q"], total_step=9), "a PEFT ADALORA", "AdaLoRA"),
    (LoraConfig(r=4, target_modules=["to_q"], modules_to_save=["conv_in"]), "modules_to_save", "without its adapter_con"),
], ids=["IA3", "VeRA", "AdaLoRA", "modules_to_save"])  # fmt: skip
def test_pefts_other_adapters_are_refused_by_name(
    bases: Callable[[str], Base], tmp_path: Path, config: Any, folder: str, file: str
) -> None:
    """Each is refused beside its configuration and, since people bring the file alone, without it."""
    base = bases("sd")
    get_peft_model(copy.deepcopy(base.components["unet"]), config).save_pretrained(str(tmp_path))
    with pytest.raises(UnusableAdapter, match=folder):
        base.with_adapter(tmp_path)
    alone = (tmp_path / "adapter_model.safetensors").rename(tmp_path / "alone.safetensors")
    with pytest.raises(UnusableAdapter, match=file):
        base.with_adapter(alone)


# -- diffusers' own writer ---------------------------------------------------------------------------------------------

DIFFUSERS_ROWS = rows(
    *(
        (name, base)
        for name in ("alpha 16 of rank 4", "patterns", "DoRA", "rank-stabilized", "UNet alone")
        for base in ("sd", "sd2", "sdxl")
    ),
    in_full=("patterns", "UNet alone"),
)


@pytest.mark.parametrize(("config", "base_name", "weights"), DIFFUSERS_ROWS)
def test_what_diffusers_saves_gives_what_peft_makes(
    bases: Callable[[str], Base], tmp_path: Path, weights: Sequence[float], config: str, base_name: str
) -> None:
    """The UNet alone is saved by its own `save_lora_adapter`, which names no component."""
    base = bases(base_name)
    alone = config == "UNet alone"
    module: Any = copy.deepcopy(base.components["unet"])
    module.add_adapter(
        LoraConfig(target_modules=["to_q", "to_k", "to_v", "to_out.0"], **PEFT_CONFIGS["patterns" if alone else config])
    )
    randomize(module)
    saved: Any = type(base.pipeline)
    if alone:
        module.save_lora_adapter(str(tmp_path))
    else:
        saved.save_lora_weights(
            str(tmp_path),
            unet_lora_layers=get_peft_model_state_dict(module),
            unet_lora_adapter_metadata=module.peft_config["default"].to_dict(),
        )
    path = tmp_path / "pytorch_lora_weights.safetensors"
    require_equal(base, path, weights, lambda weight: scaled_latents(base, "unet", module, module, weight))
    assert torch.equal(base.with_adapter(tmp_path)[-1], base.with_adapter(path)[-1]), "the folder differs from its file"


# -- kohya's sd-scripts ------------------------------------------------------------------------------------------------

SD_SCRIPTS = Path(__file__).with_name("sd_scripts")
SD_SCRIPTS_ROWS = rows(
    *((path.stem, path.stem.partition("_")[0]) for path in sorted(SD_SCRIPTS.glob("*.safetensors"))),
    in_full=("sd_convolutions",),
)


@pytest.mark.parametrize(("name", "base_name", "weights"), SD_SCRIPTS_ROWS)
def test_what_sd_scripts_saved_gives_what_sd_scripts_made(
    bases: Callable[[str], Base], weights: Sequence[float], name: str, base_name: str
) -> None:
    """Files that it wrote, and its own latents of them; `sd_scripts/recipe.py` wrote both."""
    base, made = bases(base_name), load_file(SD_SCRIPTS / f"{name}.latents")
    difference = float((base.plain - made["base"]).abs().max())
    assert difference <= TOLERANCE, (
        f"{REDRAWN} (by {difference:.1e} of {name}): run tests/engine/sd_scripts/recipe.py again"
    )
    require_equal(base, SD_SCRIPTS / f"{name}.safetensors", weights, lambda weight: made[f"{weight}"])


# -- LyCORIS -----------------------------------------------------------------------------------------------------------

lycoris_kohya.PRESET["ia3 by expressions"] = {
    "enable_conv": False,
    "unet_target_module": [],
    "unet_target_name": [r".*to_k", r".*to_v", r".*ff\.net\.2"],
    "text_encoder_target_module": [],
    "text_encoder_target_name": [],
    "name_algo_map": {r".*ff\.net\.2": {"train_on_input": True}},
}
"""LyCORIS' own preset `ia3`, whose plain names version 4 finds in no UNet."""
LYCORIS: dict[str, dict[str, Any]] = {
    "locon": {"algo": "locon", "preset": "attn-mlp"},
    "locon with convolutions": {"algo": "locon", "conv_dim": 4, "conv_alpha": 1.0, "preset": "unet-convblock-only"},
    "locon Tucker": {
        "algo": "locon", "use_tucker": True, "conv_dim": 4, "conv_alpha": 1.0, "preset": "unet-convblock-only",
    },
    "locon DoRA": {"algo": "locon", "dora_wd": True, "preset": "attn-mlp"},
    "locon rank-stabilized": {"algo": "locon", "rs_lora": True, "preset": "attn-mlp"},
    "locon scalar": {"algo": "locon", "use_scalar": True, "preset": "attn-mlp"},
    "locon DoRA per input": {"algo": "locon", "dora_wd": True, "wd_on_output": False, "preset": "attn-mlp"},
    "locon DoRA per input, convolutions": {
        "algo": "locon", "dora_wd": True, "wd_on_output": False, "conv_dim": 4, "conv_alpha": 1.0,
        "preset": "unet-convblock-only",
    },
    "locon wider than its layers": {"algo": "locon", "dim": 160, "preset": "attn-mlp"},
    "LoHa": {"algo": "loha", "preset": "attn-mlp"},
    "LoHa of a high dimension": {"algo": "loha", "dim": 14, "preset": "attn-mlp"},
    "LoHa convolutions": {"algo": "loha", "conv_dim": 3, "conv_alpha": 1.0, "preset": "unet-convblock-only"},
    "LoHa convolutions, OneTrainer": {
        "algo": "loha", "conv_dim": 3, "conv_alpha": 1.0, "preset": "unet-convblock-only",
    },
    "LoHa convolutions of a high dimension, OneTrainer": {
        "algo": "loha", "conv_dim": 14, "conv_alpha": 1.0, "preset": "unet-convblock-only",
    },
    "LoHa Tucker": {
        "algo": "loha", "use_tucker": True, "conv_dim": 3, "conv_alpha": 1.0, "preset": "unet-convblock-only",
    },
    "LoHa DoRA": {"algo": "loha", "dora_wd": True, "preset": "attn-mlp"},
    "LoKr": {"algo": "lokr", "factor": 4, "preset": "attn-mlp"},
    "LoKr of a high dimension": {"algo": "lokr", "factor": 4, "dim": 40, "preset": "attn-mlp"},
    "LoKr full": {"algo": "lokr", "factor": 4, "full_matrix": True, "preset": "attn-mlp"},
    "LoKr full as factors": {"algo": "lokr", "factor": 4, "full_matrix": True, "preset": "attn-mlp"},
    "LoKr dimension 3 as factors": {"algo": "lokr", "factor": 4, "dim": 3, "preset": "attn-mlp"},
    "LoKr DoRA as factors": {"algo": "lokr", "factor": 8, "full_matrix": True, "dora_wd": True, "preset": "attn-mlp"},
    "LoKr DoRA per input as factors": {
        "algo": "lokr", "factor": 4, "full_matrix": True, "dora_wd": True, "wd_on_output": False, "preset": "attn-mlp",
    },
    "LoKr DoRA per input": {
        "algo": "lokr", "factor": 4, "dim": 2, "dora_wd": True, "wd_on_output": False, "preset": "attn-mlp",
    },
    "LoKr low-rank": {"algo": "lokr", "factor": 4, "dim": 2, "preset": "attn-mlp"},
    "LoKr both low-rank": {"algo": "lokr", "factor": 8, "dim": 1, "decompose_both": True, "preset": "attn-mlp"},
    "LoKr convolutions": {"algo": "lokr", "factor": 4, "dim": 2, "conv_dim": 2, "preset": "unet-convblock-only"},
    "LoKr Tucker": {
        "algo": "lokr", "factor": 4, "dim": 2, "conv_dim": 2, "use_tucker": True, "preset": "unet-convblock-only",
    },
    "IA3": {"algo": "ia3", "preset": "attn-mlp"},
    "IA3 with inputs": {"algo": "ia3", "preset": "ia3 by expressions"},
}  # fmt: skip
LYCORIS_ROWS = rows(
    *((name, base) for name in LYCORIS for base in ("sd", "sdxl")),
    in_full=("locon DoRA", "locon DoRA per input", "LoHa", "LoKr low-rank", "IA3 with inputs"),
)


def lycoris_network(components: Mapping[str, Any], *, dim: int = 4, **options: Any) -> Any:
    """Return a network that is applied to the components, of which the first is the denoiser."""
    denoiser, *encoders = components.values()
    text = encoders if len(encoders) > 1 else encoders[0]
    torch.manual_seed(0)
    network = lycoris_kohya.create_network(1.0, dim, 2.0, None, text, denoiser, **options)
    network.apply_to(text, denoiser, True, True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            size = 0.3 if "lokr" in name or "hada" in name else 0.15
            if "dora_scale" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("scalar"):
                parameter.fill_(0.7)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return network


def written_by_one_trainer(path: Path, network: Any) -> None:
    """Rewrite a LoHa's factors of convolutions as OneTrainer keeps them: as the weights of two convolutions."""
    kernels = {layer.lora_name: layer.org_module[0].weight.shape[2:] for layer in network.loras}
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("_a", "_b")) and (kernel := kernels[name.partition(".")[0]]):
            sides = (1, 1) if name.endswith("_a") else kernel
            tensors[name] = tensor.reshape(tensor.shape[0], -1, *sides)
    save_file(tensors, path)


def remove_network(base: Base, network: Any) -> None:
    type(network).apply_preset({"name_algo_map": {}})  # which stays with the class
    for layer in network.loras:
        layer.restore()
    for component in base.components.values():
        for module in component.modules():
            module.__dict__.pop("forward", None)
    base.restore()


@pytest.mark.parametrize(("algorithm", "base_name", "weights"), LYCORIS_ROWS)
def test_what_lycoris_saves_gives_what_lycoris_makes(
    bases: Callable[[str], Base], tmp_path: Path, weights: Sequence[float], algorithm: str, base_name: str
) -> None:
    base = bases(base_name)
    network = lycoris_network(base.components, **LYCORIS[algorithm])
    try:
        path = tmp_path / "adapter.safetensors"
        network.save_weights(str(path), None, {"ss_network_module": "lycoris.kohya"})
        if "OneTrainer" in algorithm:
            written_by_one_trainer(path, network)

        def expected(weight: float) -> Tensor:
            if weight == 0:  # LyCORIS' own DoRA keeps the whole change at 0: no weight means no adapter here
                return base.plain
            for layer in network.loras:
                layer.multiplier = weight
            network.set_multiplier(weight)
            return base.latents()

        require_equal(base, path, weights, expected, factored="as factors" in algorithm)
    finally:
        remove_network(base, network)


@pytest.mark.parametrize(("options", "reason"), [
    ({"algo": "full", "preset": "attn-mlp"}, "full-weight difference"),
    ({"algo": "glora", "preset": "attn-mlp"}, "GLoRA"),
    ({"algo": "diag-oft", "preset": "attn-mlp"}, "OFT"),
    ({"algo": "boft", "preset": "attn-mlp"}, "OFT"),
    ({"algo": "locon", "train_norm": True, "preset": "unet-convblock-only", "conv_dim": 4}, "train_norm"),
])  # fmt: skip
def test_lycoris_algorithms_that_are_not_read_are_refused_by_name(
    bases: Callable[[str], Base], tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    base = bases("sd")
    network = lycoris_network(base.components, **options)
    try:
        path = tmp_path / "adapter.safetensors"
        network.save_weights(str(path), None, {})
    finally:
        remove_network(base, network)
    with pytest.raises(UnusableAdapter, match=reason):
        base.with_adapter(path)


def test_the_table_for_users_has_every_row() -> None:
    """`python -m tests.engine.format_table` rewrites it."""
    assert {row for row in documented() if row[2] in UNETS} == rows_of(sys.modules[__name__])
