"""Adapters of FLUX.2 klein make what their weights say, under the names of every trainer that writes them.

A row is a writer and a format. What the writer itself, or the formula of its algorithm, makes of the weights is put in
their place in diffusers' transformer; ours has the adapter bound to the same layers. diffusers' converter of
checkpoints tells which weights a name of the original code means; its converter of adapters is no reference, for it
leaves the last modulation's halves in the other order.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from serve_app.engine import RunRequest
from serve_app.engine.adapter_slots import bind_alone
from serve_app.engine.adapters.explain import also_fits, base_name
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import read_adapter
from serve_app.engine.families.flux2_klein import Flux2KleinFamily
from tests.engine.format_table import documented, rows_of
from tests.engine.latent_comparison import EVERY_WEIGHT, OPTIONS, require_equal
from tests.engine.test_adapter_formats import LYCORIS, converted_to_kohya, lycoris_network, randomize, renamed
from tests.engine.test_z_image_adapters import (
    KOHYA,
    PEFT_CONFIGS,
    Naming,
    Weights,
    merged_by_peft,
    random_pairs,
)
from tests.engine.tiny_flux2_klein import original_names, write_flux2_klein
from tests.engine.tiny_models import diffusers

pytestmark = pytest.mark.slow
LATENTS = torch.randn(1, 32, 4, 4, generator=torch.Generator().manual_seed(7))
REQUEST = RunRequest(run_id="", prompt="a red cat", guidance=1, width=64, height=64)


BLOCKS: Mapping[str, type[nn.Module]] = {
    "double_blocks": type("DoubleStreamBlock", (nn.Module,), {}),
    "single_blocks": type("SingleStreamBlock", (nn.Module,), {}),
}
"""LyCORIS looks for layers in modules whose classes are called so, as the original code calls them."""


def original(transformer: nn.Module) -> nn.Module:
    """Return the linears of diffusers' transformer as the original code has them, which trainers of it see."""
    shell = nn.Module()
    for name, weight in original_names(transformer.state_dict()).items():
        *path, leaf, _ = name.split(".")
        node, kind = shell, nn.Module
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, kind())
            node, kind = getattr(node, part), BLOCKS.get(part, nn.Module)
        if weight.dim() == 2:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            node.add_module(leaf, linear)
    return shell


def of_diffusers(weights: Weights) -> dict[str, Tensor]:
    return convert_flux2_transformer_checkpoint_to_diffusers(dict(weights))


class Klein:
    """The base model in the engine and in diffusers. An answer is the velocity of one step, or a caption's states."""

    def __init__(self, folder: Path) -> None:
        self.family = Flux2KleinFamily.load(folder, OPTIONS)
        self.table = LayerTable(self.family.components, self.family.denoiser)
        self.transformer = diffusers.Flux2Transformer2DModel.from_pretrained(str(folder / "transformer"))
        self.context = self.family.encode(REQUEST, "").context
        self.ids = (torch.zeros(512, 4), torch.zeros(16, 4))
        self.ids[0][:, 3] = torch.arange(512)
        self.ids[1][:, 1:3] = torch.cartesian_prod(torch.arange(4), torch.arange(4))
        self.plain = self.answer(self.transformer)

    @torch.inference_mode()
    def answer(self, transformer: Any) -> Tensor:
        tokens = LATENTS.flatten(2).transpose(1, 2)
        (velocity,) = transformer(
            tokens, self.context, torch.tensor([0.7]), self.ids[1], self.ids[0], return_dict=False
        )
        return velocity.transpose(1, 2).unflatten(2, (4, 4))

    @torch.inference_mode()
    def with_adapter(self, path: Path, weights: Sequence[float]) -> list[Tensor]:
        read = read_adapter(path, self.table, max_rank=OPTIONS.max_rank, dtype=torch.float32)
        assert read.keys() == {"transformer"}
        answers: list[Tensor] = []
        for weight in weights:
            bind_alone(self.family.components["transformer"].layers, read["transformer"], weight)
            encoded = self.family.prepare(self.family.encode(REQUEST, ""))
            answers.append(self.family.denoise(LATENTS, torch.tensor([700.0]), encoded))
        return answers

    def with_weights(self, weights: Weights) -> Tensor:
        """Return diffusers' answer with these weights in place of its own."""
        changed = copy.deepcopy(self.transformer)
        _, unknown = changed.load_state_dict(weights, strict=False)
        assert not unknown
        return self.answer(changed)

    def changed_by(self, changes: Weights) -> Callable[[float], Tensor]:
        """Return what answers with these changes, by the names of weights, at a weight of the adapter."""
        own = self.transformer.state_dict()
        return lambda weight: self.with_weights({name: own[name] + each * weight for name, each in changes.items()})


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Klein:
    return Klein(write_flux2_klein(tmp_path_factory.mktemp("klein")))


def row(*named: Any) -> Any:
    return pytest.param(*named, id=f"{getattr(named[0], 'label', named[0])}-flux2_klein-every-weight")


# -- names -------------------------------------------------------------------------------------------------------------

NAMINGS = (
    Naming("diffusers, PEFT keys", "transformer."),
    Naming("diffusers, a named adapter", "", (".lora_A.default.weight", ".lora_B.default.weight")),
    Naming("kohya", "lora_unet_", KOHYA, 2, is_original=True, is_flat=True),
    Naming("kohya without alpha", "lora_unet_", KOHYA, is_original=True, is_flat=True),
    Naming("diffusers' names under kohya's prefix", "lora_transformer_", KOHYA, 2, is_flat=True),
    Naming("VideoX-Fun", "lora_unet__", KOHYA, 2, is_flat=True),
    Naming("TheLastBen", "lora_unet_", ("_.lora_down.weight", "_.lora_up.weight"), is_original=True, is_flat=True),
    Naming("ai-toolkit", "diffusion_model.", is_original=True),
    Naming("ai-toolkit without a prefix", "", is_original=True),
    Naming("ComfyUI diffusion_model, alpha", "diffusion_model.", KOHYA, 2, is_original=True),
    Naming("ComfyUI diffusion_model, diffusers' names", "diffusion_model."),
    Naming("OneTrainer", "transformer.", KOHYA, 2),
    Naming("LyCORIS standalone", "lycoris_", KOHYA, 2, is_flat=True),
    Naming("alpha in flat metadata", "diffusion_model.", is_original=True, metadata={"lora_alpha": "2", "r": "4"}),
    Naming("alpha in the component's metadata", "transformer.", metadata={"transformer.lora_alpha": "2"}),
)
NAMED_ROWS = [row(naming) for naming in NAMINGS]


def spelled(naming: Naming, layer: str) -> str:
    return naming.prefix + (layer.replace(".", "_") if naming.is_flat else layer)


@pytest.mark.parametrize("naming", NAMED_ROWS)
def test_every_spelling_gives_the_merged_result(klein: Klein, tmp_path: Path, naming: Naming) -> None:
    """Every linear is changed, and each written once."""
    tensors: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for layer, (down, up) in random_pairs(
        original(klein.transformer) if naming.is_original else klein.transformer
    ).items():
        stem = spelled(naming, layer)
        tensors |= {stem + naming.parts[0]: down, stem + naming.parts[1]: up}
        if naming.alpha is not None:
            tensors[f"{stem}.alpha"] = torch.tensor(naming.alpha)
        changes[f"{layer}.weight"] = up @ down * (0.5 if naming.alpha or naming.metadata else 1.0)
    path = tmp_path / "adapter.safetensors"
    save_file(tensors, path, metadata=dict(naming.metadata or {}))
    merged = of_diffusers(changes) if naming.is_original else changes
    require_equal(klein, path, EVERY_WEIGHT, klein.changed_by(merged))


LOKR_ROWS = [
    row(Naming("LoKr, kohya", "lora_unet_", is_original=True, is_flat=True)),
    row(Naming("LoKr, ai-toolkit", "diffusion_model.", is_original=True)),
    row(Naming("LoKr, SimpleTuner", "lycoris_", is_flat=True)),
    row(Naming("LoKr, diffusers' names", "transformer.")),
]


@pytest.mark.parametrize("naming", LOKR_ROWS)
def test_every_spelling_of_lokr_gives_the_product(klein: Klein, tmp_path: Path, naming: Naming) -> None:
    module = original(klein.transformer) if naming.is_original else klein.transformer
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    changes: dict[str, Tensor] = {}
    for layer, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and "blocks" in layer:
            outer = torch.randn(2, 2, generator=generator) * 0.2
            inner = torch.randn(linear.out_features // 2, linear.in_features // 2, generator=generator) * 0.2
            stem = spelled(naming, layer)
            tensors |= {f"{stem}.lokr_w1": outer, f"{stem}.lokr_w2": inner, f"{stem}.alpha": torch.tensor(1e10)}
            changes[f"{layer}.weight"] = torch.kron(outer, inner)
    save_file(tensors, tmp_path / "adapter.safetensors")
    merged = of_diffusers(changes) if naming.is_original else changes
    require_equal(klein, tmp_path / "adapter.safetensors", EVERY_WEIGHT, klein.changed_by(merged), factored=True)


def test_every_linear_of_the_real_sizes_is_found_by_every_spelling() -> None:
    sizes = {"4B": (5, 20, 24, 7680), "9B": (8, 24, 32, 12288)}
    for size, (doubles, singles, heads, text) in sizes.items():
        with torch.device("meta"):
            plain = diffusers.Flux2Transformer2DModel(
                num_layers=doubles, num_single_layers=singles, num_attention_heads=heads, joint_attention_dim=text,
                guidance_embeds=False,
            )  # fmt: skip
            linears = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
            originals = {name for name, module in original(plain).named_modules() if isinstance(module, nn.Linear)}
            table = LayerTable({"transformer": Flux2KleinFamily.component(plain)}, "transformer")
        assert base_name(table) == f"FLUX.2 klein {size}"
        blocks = [name for name in linears if "blocks." in name]
        assert len(blocks) == doubles * 12 + singles * 2
        for name in (*linears, *originals):
            flat = name.replace(".", "_")
            found = {table.find(prefix + name) for prefix in ("", "transformer.", "diffusion_model.")}
            found |= {table.find(prefix + flat) for prefix in ("lora_unet_", "lora_transformer_", "lycoris_")}
            assert len(found) == 1, name
            assert None not in found, name


# -- PEFT and LyCORIS --------------------------------------------------------------------------------------------------

PEFT_ROWS = [
    row(f"{name}{', fused' if is_original else ''}", name, is_original)
    for name in ("alpha 16 of rank 4", "DoRA")
    for is_original in (False, True)
]


@pytest.mark.parametrize(("label", "config", "is_original"), PEFT_ROWS)
def test_a_peft_folder_gives_what_peft_makes(
    klein: Klein, tmp_path: Path, label: str, config: str, is_original: bool
) -> None:
    del label
    model, expected = peft_model(klein, is_original, PEFT_CONFIGS[config])
    model.save_pretrained(str(tmp_path))
    if is_original:
        file = tmp_path / "adapter_model.safetensors"
        save_file(
            {
                f"diffusion_model.{name.removeprefix('base_model.model.')}": each
                for name, each in load_file(file).items()
            },
            file,
        )
    require_equal(klein, tmp_path, EVERY_WEIGHT, expected)


RENAMED = {
    "DoRA, ai-toolkit": renamed("diffusion_model.", "lora_A.weight", "lora_B.weight", "magnitude"),
    "DoRA, VideoX-Fun's names": renamed("lora_unet__", "lora_down.weight", "lora_up.weight", "magnitude", flat=True),
    "DoRA, converted to kohya by diffusers": converted_to_kohya("transformer."),
}
RENAMED_ROWS = [row(label) for label in RENAMED]


@pytest.mark.parametrize("label", RENAMED_ROWS)
def test_dora_under_other_names_gives_what_peft_makes(klein: Klein, tmp_path: Path, label: str) -> None:
    """ai-toolkit writes the original code's names, the others diffusers'."""
    model, expected = peft_model(klein, "ai-toolkit" in label, {"r": 4, "lora_alpha": 4, "use_dora": True})
    save_file(RENAMED[label](get_peft_model_state_dict(model)), tmp_path / "a.safetensors")
    require_equal(klein, tmp_path / "a.safetensors", EVERY_WEIGHT, expected)


def peft_model(klein: Klein, is_original: bool, config: Mapping[str, Any]) -> tuple[Any, Callable[[float], Tensor]]:
    """Return PEFT's model of the transformer, and what diffusers answers with its weights at a weight."""
    module = original(klein.transformer) if is_original else copy.deepcopy(klein.transformer)
    targets = (
        r".*(qkv|proj|mlp\.[02]|linear[12])"
        if is_original
        else r".*blocks.*\.(to_[qkv]\w*|to_out\.0|to_add_out|add_\w+|linear_\w+)|single.*to_out"
    )
    model = get_peft_model(cast(Any, module), LoraConfig(target_modules=targets, **config))
    randomize(model)

    def expected(weight: float) -> Tensor:
        weights = merged_by_peft(model, weight)
        return klein.with_weights(of_diffusers(weights) if is_original else weights)

    return model, expected


LYCORIS_ROWS = [row(name) for name in ("locon", "LoHa", "LoKr", "LoKr full", "LoKr full as factors", "LoKr low-rank")]


@pytest.mark.parametrize("algorithm", LYCORIS_ROWS)
def test_what_lycoris_saves_gives_what_lycoris_makes(klein: Klein, tmp_path: Path, algorithm: str) -> None:
    module = original(klein.transformer)
    network = lycoris_network({"transformer": module, "text_encoder": nn.Module()}, **LYCORIS[algorithm])
    path = tmp_path / "adapter.safetensors"
    network.save_weights(str(path), None, {"ss_network_module": "lycoris.kohya"})
    flat = {f"lora_unet_{name}".replace(".", "_"): name for name, _ in module.named_modules()}

    @torch.no_grad()
    def expected(weight: float) -> Tensor:
        merged: dict[str, Tensor] = {}
        for layer in network.loras:
            layer.multiplier = weight
            inputs = torch.eye(layer.org_module[0].in_features)
            merged[f"{flat[layer.lora_name]}.weight"] = (layer(inputs) - layer(0 * inputs)).T
        return klein.with_weights(of_diffusers(merged))

    require_equal(klein, path, EVERY_WEIGHT, expected, factored="as factors" in algorithm)


# -- what is refused ---------------------------------------------------------------------------------------------------

FLUX1 = "looks like a FLUX.1 LoRA, this base is FLUX.2 klein 4B: choose a base model of that family"


def pair(stem: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.lora_down.weight": (4, inputs), f"{stem}.lora_up.weight": (outputs, 4)}


FOREIGN = (
    (pair("lora_unet_double_blocks_18_img_attn_qkv", 3072, 9216), FLUX1),
    (pair("lora_unet_double_blocks_0_img_mod_lin", 3072, 18432), FLUX1),
    (pair("lora_unet_single_blocks_7_linear1", 3072, 21504), FLUX1),
    (pair("lora_unet_single_blocks_7_linear2", 15360, 3072), FLUX1),
    (pair("diffusion_model.double_blocks.0.img_mlp.0", 3072, 12288), FLUX1),
    (pair("transformer.single_transformer_blocks.0.attn.to_q", 3072, 3072), FLUX1),
    (pair("transformer.single_transformer_blocks.0.proj_mlp", 3072, 12288), FLUX1),
    (pair("transformer.transformer_blocks.0.ff.net.0.proj", 3072, 12288), "has no such layers: transformer.tr"),
    (pair("diffusion_model.double_blocks.0.img_attn.qkv", 4096, 12288), "looks like a FLUX.2 klein 9B LoRA"),
    (pair("transformer.transformer_blocks.0.attn.to_q", 4096, 4096), "looks like a FLUX.2 klein 9B LoRA"),
    (pair("diffusion_model.single_blocks.30.linear1", 6144, 55296), "looks like a FLUX.2 dev LoRA"),
    (pair("diffusion_model.layers.0.attention.qkv", 3840, 11520), "looks like a Z-Image LoRA"),
    (pair("lora_unet_transformer_blocks_0_img_mlp_net_2", 12288, 3072), "looks like a Qwen-Image LoRA"),
    (pair("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", 2048, 9), "looks like an SDXL LoRA"),
)


@pytest.fixture(scope="module")
def real(klein: Klein) -> LayerTable:
    """Return the layers of klein 4B."""
    with torch.device("meta"):
        plain = diffusers.Flux2Transformer2DModel(
            num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680, guidance_embeds=False
        )
        components = {**klein.family.components, "transformer": Flux2KleinFamily.component(plain)}
        return LayerTable(components, "transformer")


@pytest.mark.parametrize(("shapes", "reason"), FOREIGN, ids=[next(iter(shapes)) for shapes, _ in FOREIGN])
def test_what_is_of_another_model_is_refused_by_name(
    real: LayerTable, tmp_path: Path, shapes: Mapping[str, tuple[int, ...]], reason: str
) -> None:
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter(tmp_path / "a.safetensors", real, max_rank=8, dtype=torch.float32)


@pytest.mark.parametrize(
    "prefix", ["text_encoder.", "text_encoder.model.", "text_encoders.qwen3_4b.transformer.model."]
)
def test_an_adapter_of_the_text_encoder_alone_is_found_and_fits_z_image_too(real: LayerTable, prefix: str) -> None:
    layer = "layers.26.self_attn.q_proj"
    flat = f"lora_te_{layer.replace('.', '_')}"
    for stem in (prefix + layer, flat, flat.replace("_te_", "_te1_")):
        assert real.find(stem) == ("text_encoder", layer)
        assert also_fits({f"{stem}.lora_down.weight": (4, 16)}, real, {}) == ["Z-Image"]
    said = {"ss_base_model_version": "flux2_klein_4b"}
    assert also_fits({f"{flat}.lora_down.weight": (4, 16)}, real, said) == []


def test_the_table_for_users_has_every_row() -> None:
    """`python -m tests.engine.format_table` writes it anew."""
    assert {each for each in documented() if each[2] == "flux2_klein"} == rows_of({
        "test_every_spelling_gives_the_merged_result": NAMED_ROWS,
        "test_every_spelling_of_lokr_gives_the_product": LOKR_ROWS,
        "test_a_peft_folder_gives_what_peft_makes": PEFT_ROWS,
        "test_dora_under_other_names_gives_what_peft_makes": RENAMED_ROWS,
        "test_what_lycoris_saves_gives_what_lycoris_makes": LYCORIS_ROWS,
    })  # fmt: skip
