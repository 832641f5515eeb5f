"""Adapters of architectures that have no family here are named, however their layers are spelled."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import diffusers
import pytest
import torch

from serve_app.engine.adapters.explain import explain
from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.outlines import outlined_table

TWO = {"num_layers": 2}
BOTH = TWO | {"num_single_layers": 2}
REFINED = {"n_layers": 2, "n_refiner_layers": 1}
HIDREAM = BOTH | {"patch_size": 2, "caption_channels": [64, 64], "llama_layers": [0, 1]}
TRANSFORMERS: Sequence[tuple[str, Mapping[str, object], str]] = (
    ("Krea2", TWO, "Krea 2"),
    ("Cosmos", TWO, "Anima or Cosmos"),
    ("QwenImage21", TWO, "Qwen-Image 2.1"),
    ("QwenImage", TWO, "Qwen-Image"),
    ("Flux3", BOTH, "FLUX.3"),
    ("Flux2", BOTH, "FLUX.2 dev"),
    ("Chroma", BOTH, "Chroma"),
    ("HunyuanVideo", BOTH, "HunyuanVideo or HunyuanImage"),
    ("HunyuanImage", BOTH, "HunyuanVideo or HunyuanImage"),
    ("MiniMaxH3", TWO, "MiniMax H3"),
    ("HiDreamImage", HIDREAM, "HiDream"),
    ("AuraFlow", {"num_mmdit_layers": 1, "num_single_dit_layers": 1}, "AuraFlow"),
    ("SD3", TWO | {"num_attention_heads": 24}, "SD 3"),
    ("Lumina2", TWO, "Lumina 2"),
    ("Ideogram4", TWO, "Ideogram 4"),
    ("ErnieImage", TWO, "ERNIE-Image"),
    ("ZImage", REFINED, "Z-Image"),
    ("LTX2Video", TWO, "LTX-2"),
    ("LTXVideo", TWO, "Anima or LTX"),
    ("Sana", TWO, "Sana"),
    ("Wan", TWO, "Wan"),
    ("Flux", BOTH, "FLUX.1"),
    ("LongCatImage", BOTH, "FLUX.1"),
    ("OvisImage", BOTH, "FLUX.1"),
    ("PixArt", TWO, "PixArt"),
    ("CogView4", TWO, "CogView4 or GLM-Image"),
    ("GlmImage", TWO, "CogView4 or GLM-Image"),
    ("BriaFibo2", REFINED | {"perceiver_num_layers": 1}, "Bria FIBO 2"),
)  # fmt: skip
"""Transformers of diffusers in their true widths with few layers, and how a file is called that trains all of them."""


@pytest.fixture(scope="module")
def bases(sd: Path, z_image: Path, klein: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[LayerTable]:
    kept = tmp_path_factory.mktemp("kept")
    return [outlined_table(folder, kept, name=folder.name) for folder in (sd, z_image, klein)]


def messages(shapes: Mapping[str, tuple[int, ...]], bases: Sequence[LayerTable]) -> set[str]:
    """Return whose adapter the file is called for each base, and what to do."""
    said = (explain([*shapes], shapes, base) for base in bases)
    return {re.sub(", this base is .*?: ", ": ", message.removeprefix("looks like ")) for message in said}


def advised(family: str) -> str:
    names = ("FLUX.1", "FLUX.2", "Z-Image", "Krea 2", "Anima", "Qwen-Image 2.1")
    served = any(family.startswith(name) for name in names)
    return "choose a base model of that family" if served else "no base model of that family can be served"


@pytest.mark.parametrize(("model", "config", "family"), [pytest.param(*row, id=row[0]) for row in TRANSFORMERS])
def test_a_lora_on_all_layers_of_a_transformer_is_named(
    bases: Sequence[LayerTable], model: str, config: Mapping[str, object], family: str
) -> None:
    kind = next(name for dims in "23" if hasattr(diffusers, name := f"{model}Transformer{dims}DModel"))
    with torch.device("meta"):
        layers = getattr(diffusers, kind)(**config).named_modules()
    linear = {name: layer.weight.shape for name, layer in layers if isinstance(layer, torch.nn.Linear)}
    assert len(linear) > 10
    for dotted in (True, False):
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (outputs, inputs) in linear.items():
            stem = f"transformer.{name}.lora_" if dotted else f"lora_unet_{name.replace('.', '_')}.lora_"
            shapes[f"{stem}{'A' if dotted else 'down'}.weight"] = (4, inputs)
            shapes[f"{stem}{'B' if dotted else 'up'}.weight"] = (outputs, 4)
        for said in messages(shapes, bases if family != "Z-Image" else bases[:1]):
            assert f"{family} LoRA: {advised(family)}" in said


SPELLED: Sequence[tuple[str, int, int, str]] = (
    ("diffusion_model.blocks.0.attn.wq", 6144, 6144, "a Krea 2"),
    ("diffusion_model.txtfusion.refiner_blocks.0.attn.wo", 2560, 2560, "a Krea 2"),
    ("base_model.model.blocks.3.mlp.down", 16384, 6144, "a Krea 2"),
    ("lora_unet_blocks_0_attn_gate", 6144, 6144, "a Krea 2"),
    ("lora_unet_blocks_27_mlp_up", 6144, 16384, "a Krea 2"),
    ("lycoris_transformer_blocks_0_attn_to_qkv", 6144, 9216, "a Krea 2"),
    ("transformer.transformer_blocks.0.attn.to_k", 6144, 1536, "a Krea 2"),
    ("transformer.transformer_blocks.0.attn.to_q", 6144, 6144, "a FLUX.2 dev or Krea 2"),
    ("diffusion_model.llm_adapter.blocks.0.self_attn.q_proj", 1024, 1024, "an Anima"),
    ("diffusion_model.blocks.0.self_attn.q_proj", 2048, 2048, "an Anima or Cosmos"),
    ("lora_unet_blocks_0_cross_attn_output_proj", 2048, 2048, "an Anima or Cosmos"),
    ("lora_unet_blocks_9_mlp_layer1", 2048, 8192, "an Anima or Cosmos"),
    ("diffusion_model.blocks.0.adaln_modulation_mlp.1", 2048, 256, "an Anima or Cosmos"),
    ("transformer.transformer_blocks.0.attn2.to_k", 2048, 2048, "an Anima or LTX"),
    ("transformer_blocks.0.img_mlp.gate_up", 4096, 24576, "a Qwen-Image 2.1"),
    ("lora_unet_transformer_blocks_0_img_mlp_out", 12288, 4096, "a Qwen-Image 2.1"),
    ("transformer.transformer_blocks.0.attn.to_out.0", 4096, 4096, "a FLUX.2 klein 9B or Qwen-Image 2.1"),
    ("transformer.transformer_blocks.59.img_mlp.net.2", 12288, 3072, "a Qwen-Image"),
    ("lora_unet_transformer_blocks_0_txt_mod_1", 3072, 18432, "a Qwen-Image"),
    ("transformer.transformer_blocks.0.attn.add_q_proj", 1536, 1536, "an SD 3"),
    ("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536, 4608, "an SD 3"),
    ("diffusion_model.double_blocks.0.img_attn.qkv", 3584, 10752, "a HunyuanImage"),
    ("lora_unet_double_blocks_0_txt_mlp_fc1", 3072, 12288, "a HunyuanVideo or HunyuanImage"),
    ("diffusion_model.token_refiner.blocks.0.attn.qkv_proj", 5376, 21504, "a MiniMax H3"),
    ("diffusion_model.double_stream_blocks.0.block.attn1.to_q", 2560, 2560, "a HiDream"),
    ("diffusion_model.double_layers.0.attn.w1q", 3072, 3072, "an AuraFlow"),
    ("diffusion_model.layers.0.attention.o", 4608, 4608, "an Ideogram 4"),
    ("transformer.layers.0.attention.to_q", 4608, 4608, "an Ideogram 4"),
    ("lora_unet_layers_0_self_attention_to_q", 3072, 3072, "an ERNIE-Image"),
    ("diffusion_model.blocks.0.ffn.0", 5120, 13824, "a Wan"),
    ("lora_unet_blocks_0_cross_attn_k", 5120, 5120, "a Wan"),
    ("diffusion_model.distilled_guidance_layer.in_proj", 64, 5120, "a Chroma"),
    ("lora_unet_single_blocks_7_linear1", 3072, 21504, "a FLUX.1"),
    ("lora_unet_double_blocks_0_img_attn_qkv", 3072, 9216, "a Flux"),
    ("double_blocks.0.processor.qkv_lora1", 3072, 9216, "a Flux"),
)  # fmt: skip
"""A layer as its trainer writes it, with its inputs and outputs."""


def test_one_layer_names_the_architecture_where_it_can(bases: Sequence[LayerTable]) -> None:
    for stem, inputs, outputs, family in SPELLED:
        shapes = {f"{stem}.lora_down.weight": (4, inputs), f"{stem}.lora_up.weight": (outputs, 4)}
        for said in messages(shapes, bases[:2]):
            assert said.startswith(f"{family} LoRA: "), (stem, said)


def test_widths_that_a_unet_has_too_do_not_name_it(bases: Sequence[LayerTable]) -> None:
    """LTX' and Anima's cross attention is as wide as SDXL's, HunyuanImage's and Z-Image's text as SD 2's."""
    for width, family in ((1024, "a LoRA of a diffusion transformer"), (2048, "an Anima or LTX LoRA")):
        shapes = {"transformer.transformer_blocks.0.attn2.to_k.lora_A.weight": (4, width)}
        assert all(said.startswith(family) for said in messages(shapes, bases[:2]))
