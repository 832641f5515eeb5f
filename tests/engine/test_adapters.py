"""LoRA files of every spelling become the same weights; what cannot be placed is refused by name."""

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import AdapterWeights, read_adapter
from serve_app.engine.adapters.scaling import scaling_rules
from serve_app.engine.families.outlines import OutlinedComponent, OutlinedLayer, outlined_table
from serve_app.engine.families.registry import load_family
from serve_app.safetensors_file import check_safetensors
from tests.engine.conftest import EXACT_FLOAT32

Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
STEM, CONV = "lora_unet_" + Q.replace(".", "_"), "lora_unet_down_blocks_0_resnets_0_conv1"


def layer_table(folder: Path) -> LayerTable:
    family = load_family(folder, EXACT_FLOAT32)
    return LayerTable(family.components, family.denoiser)


@pytest.fixture(scope="module")
def table(sd: Path) -> LayerTable:
    return layer_table(sd)


@pytest.fixture(scope="module")
def xl_table(sdxl: Path) -> LayerTable:
    return layer_table(sdxl)


def read(path: Path, table: LayerTable) -> AdapterWeights:
    return read_adapter(path, table, max_rank=64, dtype=torch.float32)


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def pair(stem: str, down: str, up: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{stem}{down}": torch.randn(4, 32, generator=generator),
        f"{stem}{up}": torch.randn(32, 4, generator=generator),
    }


@pytest.mark.parametrize(("sgm", "ours"), [
    ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q",
     "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
    ("lora_unet_input_blocks_5_1_proj_in", "down_blocks.1.attentions.1.proj_in"),
    ("lora_unet_input_blocks_1_0_emb_layers_1", "down_blocks.0.resnets.0.time_emb_proj"),
    ("lora_unet_middle_block_1_transformer_blocks_1_attn2_to_k",
     "mid_block.attentions.0.transformer_blocks.1.attn2.to_k"),
    ("lora_unet_output_blocks_2_1_transformer_blocks_0_ff_net_0_proj",
     "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.0.proj"),
    ("lora_unet_output_blocks_2_2_conv", "up_blocks.0.upsamplers.0.conv"),
    ("lora_unet_input_blocks_3_0_op", "down_blocks.0.downsamplers.0.conv"),
    ("lora_unet_time_embed_0", "time_embedding.linear_1"),
])  # fmt: skip
def test_names_of_the_original_sdxl_code_are_found(xl_table: LayerTable, sgm: str, ours: str) -> None:
    assert xl_table.find(sgm) == ("unet", ours)


@pytest.mark.parametrize(("name", "reason"), [
    (f"lora_unet_{Q.replace('.', '_')}.diff_b", "full-weight difference"),
    (f"lora_unet_{Q.replace('.', '_')}.oft_blocks", "OFT"),
    (f"lora_unet_{Q.replace('.', '_')}.b1.weight", "GLoRA"),
    (f"lora_unet_{Q.replace('.', '_')}.w_norm", "train_norm"),
    (f"unet.{Q}.lora_B.bias", "bias"),
    ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "looks like a Flux LoRA, .*, or a LoRA for this one$"),
    ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", "looks like a FLUX.1 LoRA"),
    ("lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight", "looks like an SD 3 LoRA"),
    ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "looks like a LoRA of a diffusion transformer"),
    ("transformer.transformer_blocks.0.img_mlp.net.2.lora_A.weight", "looks like a Qwen-Image LoRA, this base is"),
    ("blocks.0.self_attn.q.lora_A.weight", "looks like a Wan LoRA"),
    ("blocks.0.self_attn.q_proj.lora_A.weight", "looks like an Anima or Cosmos LoRA, .*: choose a base"),
    ("diffusion_model.layers.0.attention.to_q.lora_A.weight", "looks like a Z-Image LoRA, this base is .*: choose"),
    ("lora_unet_context_refiner_1_feed_forward_w1.lokr_w1", "looks like a Z-Image LoRA, this base is .*: choose a base"),
    ("text_encoders.qwen3_4b.transformer.model.layers.0.mlp.up_proj.lora_A.weight", "like a LoRA of Qwen3, the text enc"),
    ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "looks like a language model, or a LoRA of one"),
    ("emb_params", "looks like a textual inversion"),
    ("conv_in.weight", "looks like a whole UNet"),
    ("model.diffusion_model.input_blocks.0.0.weight", "looks like a whole checkpoint"),
    ("lora_te3_encoder_block_0_layer_0_SelfAttention_k.lora_down.weight", "SD 3 or Flux LoRA .*third text encoder"),
    ("lllite_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q.down.0.weight", "a ControlNet-LLLite for SDXL"),
    ("ip_adapter.1.to_k_ip.weight", "looks like an IP-Adapter, this base is .*: this service loads LoRAs"),
    ("down_blocks.3.motion_modules.0.temporal_transformer.proj_in.weight", "AnimateDiff .* for SD 1 or SD 2"),
    ("768.0.linear.0.weight", "a hypernetwork"),
    ("model.1.sub.0.RDB1.conv1.0.weight", "an upscaler"),
    ("body.0.rdb1.conv1.weight", "an upscaler"),
    ("body.0.block1.weight", "a T2I-Adapter"),
    ("controlnet_cond_embedding.conv_in.weight", "a ControlNet, "),
    (f"base_model.model.{Q}.ia3_l", "PEFT IA³ weights for SD 1 or SD 2 are not supported, save"),
    (f"base_model.model.{Q}.vera_lambda_b", "VeRA weights"),
    (f"base_model.model.{Q}.lora_E", "AdaLoRA weights"),
    ("base_model.model.conv_in.modules_to_save.weight", "modules_to_save"),
    (f"base_model.model.{Q}.hra_u", "PEFT hra weights .* save it as LoRA"),
    ("base_model.unilora_theta_d", "PEFT unilora weights are not supported"),
    (f"unet.{Q}.strange_thing", "weights called strange_thing are not supported, save it as LoRA, .*: unet"),
    ("lora_te_text_model_embeddings_token_embedding.lora_down.weight", "text embedding .* train and save it without"),
    ("base_model.model.text_model.embeddings.token_embedding.lora_embedding_A", "text embedding .* are not supported"),
    (f"unet.{Q}.lora_A.weight_scale", "float8 or 4-bit .with scales. .* in floating point"),
    (f"{STEM}.lora_down.scale_weight", "float8 or 4-bit .with scales. .* in floating point"),
    (f"unet.{Q}.lora_A.weight.quant_state.bitsandbytes__nf4", "4-bit .*nf4.* save it in floating point"),
    (f"{STEM}.set_weight", "whole layers of ComfyUI .set_weight.* extract a LoRA"),
    ("lora_unet__layers_0_attention_to_q.lora_down.weight", "looks like a Z-Image LoRA, this base is .*: choose"),
    ("lora_unet__single_transformer_blocks_0_attn_to_qkv_mlp_proj.lora_down.weight", "looks like a FLUX.2 LoRA, this "),
    ("unet$$nowhere.lora_A.weight", "no such layers: unet.nowhere"),
    ("lora_unet_down_blocks_3_attentions_0_transformer_blocks_1_attn1_to_q.alpha", "an SDXL LoRA, this base .*: choose"),
    ("lora_unet_up_blocks_3_attentions_0_proj_in.alpha", "looks like an SD 1 or SD 2 LoRA, .* for this one$"),
    ("unet.no_such_block.to_q.lora_A.weight", "no such layers"),
    ("unet.something_else", "unet.something_else"),
])  # fmt: skip
def test_a_key_that_cannot_be_placed_refuses_the_file_by_name(
    table: LayerTable, tmp_path: Path, name: str, reason: str
) -> None:
    tensors = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight") | {name: torch.zeros(4, 4)}
    with pytest.raises(UnusableAdapter, match=reason):
        read(saved(tmp_path / "a.safetensors", tensors), table)


@pytest.mark.parametrize(("names", "reason"), [
    ("model.diffusion_model.out.0.weight first_stage_model.decoder.conv_in.weight", "a whole checkpoint, this base is"),
    ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight vae.decoder.conv_in.weight "
     "model.diffusion_model.double_blocks.0.img_attn.qkv.weight_scale "
     "model.diffusion_model.double_stream_modulation_img.lin.weight "
     "text_encoders.qwen3_4b.transformer.model.layers.0.mlp.up_proj.weight", "a whole checkpoint for FLUX.2, this"),
    ("layers.0.attention.to_q.weight layers.0.attention.norm_q.weight", "a whole model or a part of one for Z-Image"),
    ("text_model.embeddings.token_embedding.weight text_model.final_layer_norm.bias", "a whole model or a part of one"),
])  # fmt: skip
def test_a_whole_model_is_not_called_a_lora_nor_after_a_part_of_it(
    table: LayerTable, tmp_path: Path, names: str, reason: str
) -> None:
    with pytest.raises(UnusableAdapter, match=f"looks like {reason}.*: choose the LoRA's own file"):
        read(saved(tmp_path / "a.safetensors", {name: torch.zeros(4, 4) for name in names.split()}), table)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, 0x4B50, 0x5A42, 0x8B1F, 0x3C20, 0x5B20, 0x10280])
def test_a_header_of_any_length_is_read(table: LayerTable, tmp_path: Path, length: int) -> None:
    """Eight bytes of length come first: these begin as a pickle, a zip, bzip2, gzip or a web page does."""
    plain = saved(tmp_path / "a.safetensors", pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight"))
    content = plain.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    made = read(plain, table)["unet"][Q]
    plain.write_bytes(length.to_bytes(8, "little") + content[8:end].ljust(length) + content[end:])
    check_safetensors(plain)
    assert torch.equal(read(plain, table)["unet"][Q].up, made.up)


@pytest.mark.parametrize(("change", "reason"), [
    ({"down": torch.full((4, 32), float("nan"))}, "not finite"),
    ({"up": torch.full((32, 4), float("inf"))}, "not finite"),
    ({"down": torch.zeros(5, 32)}, "do not fit"),
    ({"up": None}, "needs both"),
    ({"down": torch.ones(4, 32, dtype=torch.int8)}, "down is quantized as int8"),
])  # fmt: skip
def test_weights_that_could_poison_or_do_not_fit_are_refused(
    table: LayerTable, tmp_path: Path, change: dict[str, torch.Tensor | None], reason: str
) -> None:
    parts: dict[str, torch.Tensor | None] = {"down": torch.ones(4, 32), "up": torch.ones(32, 4)} | change
    tensors = {
        f"unet.{Q}.lora_{'A' if name == 'down' else 'B'}.weight": tensor
        for name, tensor in parts.items()
        if tensor is not None
    }
    with pytest.raises(UnusableAdapter, match=reason):
        read(saved(tmp_path / "a.safetensors", tensors), table)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_a_table_from_the_configuration_is_that_of_the_loaded_model_and_kept(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(model)
    loaded: LayerTable = request.getfixturevalue("xl_table" if model == "sdxl" else "table")
    made = outlined_table(folder, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat()
    kept = outlined_table(folder, tmp_path)
    for table in (made, kept):
        assert table.shapes == loaded.shapes
        assert vars(table)["_names"] == vars(loaded)["_names"]
        assert vars(table)["_prefixes"] == vars(loaded)["_prefixes"]
        assert table.denoiser == loaded.denoiser
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_a_table_is_made_anew_when_the_configuration_changes(sd: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "model", tmp_path / "kept"
    for name in ("model_index.json", "unet/config.json", "text_encoder/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((sd / name).read_bytes())
    (folder / "transformer").mkdir()  # of a part that no family of today has
    for depth in (1, 2):
        (folder / "transformer/config.json").write_text(json.dumps({"num_layers": depth}))
        outlined_table(folder, kept)
        assert len([*kept.iterdir()]) == depth
    layer = "time_embedding.linear_1"
    before = outlined_table(folder, kept).base_weight("unet", layer).shape
    config = json.loads((folder / "unet/config.json").read_text())
    config["block_out_channels"] = [2 * width for width in config["block_out_channels"]]
    (folder / "unet/config.json").write_text(json.dumps(config))
    assert outlined_table(folder, kept).base_weight("unet", layer).shape == tuple(2 * side for side in before)


@pytest.mark.parametrize(("config", "reason"), [
    ({"peft_type": "LOHA"}, "a PEFT LOHA adapter, only LORA"),
    ({"r": 10**9}, "its rank is 4, but its configuration says 1e.09"),
    ({"rank_pattern": {"attn1.to_q": 5}}, "its rank is 4, but its configuration says 5"),
    ({"use_dora": True}, "no magnitudes, but its configuration says use_dora: True"),
    ({"lora_bias": True}, "lora_bias not supported"),
    ({"modules_to_save": ["conv_in"]}, "modules_to_save not supported"),
    ({"bias": "all"}, "bias 'all' is not supported"),
    ({"init_lora_weights": "pissa"}, "changed base weights"),
])  # fmt: skip
def test_a_peft_configuration_that_is_not_computed_is_refused_by_name(
    table: LayerTable, tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    saved(tmp_path / "adapter_model.safetensors", pair(f"base_model.model.{Q}", ".lora_A.weight", ".lora_B.weight"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **config}))
    with pytest.raises(UnusableAdapter, match=reason):
        read(tmp_path, table)


@pytest.mark.parametrize("config", [
    {},
    {"lora_alpha": 3.5, "use_rslora": True},
    {"lora_alpha": 4, "alpha_pattern": {"to_k": 5, "attn1.to_q": 6, r"down_blocks\.\d+\..*to_q": 7, "nothing": 9}},
    {"lora_alpha": 4, "alpha_pattern": {"o_q": 5, "^mid_block.*to_q": 6}},
    {"lora_alpha": 4, "alpha_pattern": {"attn1.to_q": 5, "attn1.to.q": 6, "conv.in": 7, "x.conv_in": 8}},
    {"lora_alpha": 4, "rank_pattern": {"attn1.to_q": 5, ".*to_k": 6}},
    {"lora_alpha": 4, "alpha_pattern": None, "some_field_of_a_newer_peft": 1},
], ids=str)  # fmt: skip
def test_alphas_are_those_of_pefts_own_classes(config: dict[str, Any]) -> None:
    unknown = "some_field_of_a_newer_peft" in config
    with pytest.warns(UserWarning, match="Unexpected keyword") if unknown else nullcontext():
        reference = PeftConfig.from_peft_type(**{"peft_type": "LORA", "r": 4, **config})
    assert isinstance(reference, LoraConfig)
    patterns: dict[str, Any] = reference.alpha_pattern or {}
    ranks: dict[str, Any] = reference.rank_pattern or {}
    rules = scaling_rules({}, {"peft_type": "LORA", "r": 4, **config})
    for layer in ("mid_block.attn1.to_q", "down_blocks.0.attn1.to_q", "attn1.to_q", "to_k", "up.xto_k", "conv_in"):
        alpha = patterns.get(get_pattern_key(list(patterns), layer), reference.lora_alpha)
        rank = ranks.get(get_pattern_key(list(ranks), layer), reference.r)
        assert rules.of("unet", layer)[:3] == (alpha, reference.use_rslora, rank)


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_patterns_fit_the_names_that_the_file_gives_its_layers(table: LayerTable, tmp_path: Path, prefix: str) -> None:
    """transformers 4 puts `text_model.` before an encoder's layers, and version 5 nothing."""
    name = f"{prefix}encoder.layers.0.self_attn.q_proj"
    saved(tmp_path / "adapter_model.safetensors", pair(f"base_model.model.{name}", ".lora_A.weight", ".lora_B.weight"))
    config = {"peft_type": "LORA", "r": 8, "rank_pattern": {name: 4}, "lora_alpha": 4, "alpha_pattern": {name: 16}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (made,) = read(tmp_path, table)["text_encoder"].values()
    assert made.scaling == 4


@pytest.mark.parametrize("config", [
    {"lora_alpha": "8"}, {"lora_alpha": True}, {"lora_alpha": 10**400}, {"alpha_pattern": [1]},
    {"alpha_pattern": {"to_q": None}}, {"alpha_pattern": {"(": 1}},
], ids=lambda config: str(config)[:40])  # fmt: skip
def test_an_alpha_that_is_no_number_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnusableAdapter, match=r"adapter_config\.json: (lora_alpha|alpha_pattern)"):
        scaling_rules({}, config)


@pytest.mark.parametrize(("metadata", "alpha"), [
    ({"transformer.lora_alpha": "64", "transformer.r": "4"}, 64),
    ({"unet.lora_alpha": "2", "text_encoder.lora_alpha": "64"}, 2),
    ({"lora_alpha": "16", "alpha": "16.0", "rank": "4"}, 16),
    ({"network_alpha": "2.5"}, 2.5),
    ({"alpha": "8", "use_rslora": "True"}, 16),
    ({"lora_adapter_metadata": '{"lora_alpha": 12, "r": 4}', "lora_alpha": "12"}, 12),
    ({"rank": "4", "alpha": "None", "ss_network_alpha": "1"}, 4),
    ({"rank": "Dynamic", "ss_network_alpha": "Dynamic"}, 4),
], ids=str)  # fmt: skip
def test_an_alpha_that_only_the_metadata_tell_is_obeyed(
    table: LayerTable, tmp_path: Path, metadata: dict[str, str], alpha: float
) -> None:
    """SimpleTuner, LightX2V and others write it as text and no tensor of it."""
    save_file(pair(Q, ".lora_A.weight", ".lora_B.weight"), tmp_path / "a.safetensors", metadata=metadata)
    assert read(tmp_path / "a.safetensors", table)["unet"][Q].scaling == alpha / 4


@pytest.mark.parametrize(("metadata", "reason"), [
    ({"alpha": "16", "lora_alpha": "8"}, "two values of lora_alpha: (16|8) and "),
    ({"lora_adapter_metadata": '{"lora_alpha": 16}', "lora_alpha": "8"}, "lora_alpha is 8.0 by its metadata, 16.0"),
    ({"alpha": "much"}, "metadata: lora_alpha is not a number but 'much': write the number"),
    ({"alpha": "dynamic"}, 'has no alpha, though the metadata call it "Dynamic"'),
    ({"vision.lora_alpha": "8"}, "have a lora_alpha for vision, which the base model lacks"),
    ({"alpha": "8", "r": "9"}, "its rank is 4, but its configuration says 9"),
    ({"lora_adapter_metadata": '{"lora_bias": true}'}, "lora_bias not supported"),
], ids=str)  # fmt: skip
def test_metadata_that_contradict_themselves_or_the_file_are_refused(
    table: LayerTable, tmp_path: Path, metadata: dict[str, str], reason: str
) -> None:
    save_file(pair(Q, ".lora_A.weight", ".lora_B.weight"), tmp_path / "a.safetensors", metadata=metadata)
    with pytest.raises(UnusableAdapter, match=reason):
        read(tmp_path / "a.safetensors", table)


def test_an_alpha_that_the_metadata_call_dynamic_is_each_layers_own(table: LayerTable, tmp_path: Path) -> None:
    tensors = pair(STEM, ".lora_down.weight", ".lora_up.weight") | {f"{STEM}.alpha": torch.tensor(2.0)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"alpha": "Dynamic", "rank": "Dynamic"})
    assert read(tmp_path / "a.safetensors", table)["unet"][Q].scaling == 0.5


def test_patterns_that_take_long_are_refused_where_a_limit_is_set() -> None:
    """Python's expressions cannot be interrupted, and hold up every thread of a replica."""
    config = {"alpha_pattern": {r"(\w?){18}!": 1}}
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    assert scaling_rules({}, config).of("unet", layer).alpha == 8
    with pytest.raises(UnusableAdapter, match="alpha_pattern: its expressions take too long"):
        scaling_rules({}, config, seconds=1e-4).of("unet", layer)


def test_pefts_names_without_its_configuration_are_refused(table: LayerTable, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", pair(f"base_model.model.{Q}", ".lora_A.weight", ".lora_B.weight"))
    with pytest.raises(UnusableAdapter, match=r"without its adapter_config\.json"):
        read(path, table)


@pytest.mark.parametrize(("files", "reason"), [
    ("", "the folder holds neither"),
    ("adapter_model.bin", "folder's adapter_model.bin is a pickle"),
    ("pytorch_lora_weights.bin", "folder's pytorch_lora_weights.bin is a pickle"),
    ("adapter_model.safetensors", "without adapter_config.json"),
    ("adapter_model.safetensors pytorch_lora_weights.safetensors", "the folder holds two adapters"),
    ("adapter_config.json model-00001-of-00002.safetensors", "of several shards"),
    ("unet/adapter_model.safetensors text_encoder/adapter_model.safetensors", "is in a subfolder"),
    ("ink.safetensors", "ink.safetensors is a file by itself"),
    ("model_index.json unet/diffusion_pytorch_model.safetensors", "of a whole model"),
])  # fmt: skip
def test_a_folder_that_is_no_adapter_is_refused(table: LayerTable, tmp_path: Path, files: str, reason: str) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnusableAdapter, match=reason):
        read(tmp_path, table)


@pytest.mark.parametrize("twice", [".lora_down.weight", ".lora_A.default.weight", ".lora_alpha"])
def test_two_tensors_of_one_part_are_refused(table: LayerTable, tmp_path: Path, twice: str) -> None:
    tensors = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight") | {f"unet.{Q}{twice}": torch.ones(4, 32)}
    tensors[f"unet.{Q}.alpha"] = torch.tensor(4.0)
    with pytest.raises(UnusableAdapter, match="two tensors of one part: "):
        read(saved(tmp_path / "a.safetensors", tensors), table)


@pytest.mark.parametrize("stem", [
    f"{STEM}_", STEM.replace("unet_", "unet__"), Q.replace(".", "_"), f"unet_{Q.replace('.', '_')}",
    f"lycoris__{Q.replace('.', '_')}", f"unet$${Q.replace('.', '$$')}", STEM.replace("_to_q", ".to_q"),
])  # fmt: skip
@pytest.mark.parametrize("magnitude", ["magnitude", "lora_magnitude_vector", "lora_magnitude.default.weight"])
def test_a_layer_is_found_by_any_spelling_and_its_magnitude_by_another(
    table: LayerTable, tmp_path: Path, stem: str, magnitude: str
) -> None:
    """TheLastBen's trainer ends names with an underscore, and ai-toolkit's own have `$$` for dots."""
    tensors = pair(stem, ".lora_down.weight", ".lora_up.weight")
    plain = read(saved(tmp_path / "a.safetensors", tensors), table)["unet"]
    assert plain.keys() == {Q}
    made = read(saved(tmp_path / "a.safetensors", tensors | {f"unet.{Q}.{magnitude}": torch.ones(32)}), table)["unet"][
        Q
    ]
    assert torch.equal(made.up, plain[Q].up)
    assert made.magnitude is not None


def test_a_magnitude_without_its_weights_is_refused(table: LayerTable, tmp_path: Path) -> None:
    both = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight") | pair(STEM, ".lora_down.weight", ".lora_up.weight")
    for beside in ({}, both):
        path = saved(tmp_path / "a.safetensors", beside | {f"{Q}.magnitude": torch.ones(32)})
        with pytest.raises(UnusableAdapter, match=f"{Q}: has peft_magnitude as {Q}, but not exactly one pair"):
            read(path, table)


def test_a_layer_under_two_names_is_read_where_both_say_the_same(table: LayerTable, tmp_path: Path) -> None:
    tensors = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight")
    once = read(saved(tmp_path / "a.safetensors", tensors), table)["unet"][Q]
    tensors |= pair(STEM, ".lora_down.weight", ".lora_up.weight")
    assert torch.equal(read(saved(tmp_path / "a.safetensors", tensors), table)["unet"][Q].up, once.up)
    for changed in ({f"{STEM}.alpha": torch.tensor(2.0)}, {f"{STEM}.dora_scale": torch.ones(32, 1)}):
        with pytest.raises(UnusableAdapter, match=f"two different changes of unet.{Q}, one of them as "):
            read(saved(tmp_path / "a.safetensors", tensors | changed), table)


def test_a_fused_name_changes_each_of_its_layers_at_its_own_rank(tmp_path: Path) -> None:
    """Layers may differ in outputs; columns that are zero for one, and ranks beyond its outputs, are left out."""
    sides = {"q": 8, "k": 2, "v": 3}
    layers = {name: OutlinedLayer((side, 6)) for name, side in sides.items()}
    table = LayerTable({"transformer": OutlinedComponent(layers, {}, [], {"qkv": ["q", "k", "v"]})}, "transformer")
    down, up = torch.randn(5, 6), torch.randn(13, 5)
    up[:8, 4] = up[8:, :2] = 0
    path = saved(tmp_path / "a.safetensors", {"qkv.lora_A.weight": down, "qkv.lora_B.weight": up})
    made = read(path, table)["transformer"]
    assert {name: each.rank for name, each in made.items()} == {"q": 4, "k": 2, "v": 3}
    whole = torch.cat([each.up @ each.down for each in made.values()])
    assert torch.allclose(whole, up @ down, atol=1e-6)


def test_two_adapters_in_one_file_are_refused(table: LayerTable, tmp_path: Path) -> None:
    tensors = pair(f"unet.{Q}", ".lora_A.one.weight", ".lora_B.two.weight")
    with pytest.raises(UnusableAdapter, match="two adapters in one file: "):
        read(saved(tmp_path / "a.safetensors", tensors), table)


def test_a_text_encoder_of_sd_1_is_refused_by_sdxl(xl_table: LayerTable, tmp_path: Path) -> None:
    stem = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    path = saved(tmp_path / "a.safetensors", pair(stem, ".lora_down.weight", ".lora_up.weight"))
    with pytest.raises(UnusableAdapter, match=r"looks like an SD 1 LoRA .* this base is SDXL"):
        read(path, xl_table)


@pytest.mark.parametrize("stem", [
    "clip_l.text_model.encoder.layers.0.self_attn.q_proj",
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
])  # fmt: skip
@pytest.mark.parametrize(("metadata", "fits"), [
    ({"ss_base_model_version": "sd_v1"}, "sd"),
    ({"ss_base_model_version": "sdxl_base_v1-0"}, "sdxl"),
    ({"ss_base_model_version": "flux1"}, ""),
    ({"modelspec.architecture": "stable-diffusion-v1/lora"}, "sd"),
    ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "sdxl"),
    ({"modelspec.architecture": "stable-diffusion-3-medium/lora"}, ""),
    ({"ss_base_model_version": "of a new kind"}, "sd sdxl"),
    ({}, "sd sdxl"),
], ids=str)  # fmt: skip
def test_the_first_text_encoder_alone_goes_where_its_metadata_say(
    table: LayerTable, xl_table: LayerTable, tmp_path: Path, stem: str, metadata: dict[str, str], fits: str
) -> None:
    """Without metadata nobody can tell: SD 1 and SDXL have the same CLIP-L."""
    path = tmp_path / "a.safetensors"
    save_file(pair(stem, ".lora_down.weight", ".lora_up.weight"), path, metadata=metadata)
    for name, each in (("sd", table), ("sdxl", xl_table)):
        if name in fits.split():
            assert read(path, each).keys() == {"text_encoder"}
        else:
            with pytest.raises(
                UnusableAdapter, match=r"looks like an? (SD 1|SDXL|SD 3|FLUX.1) LoRA \((ss_base|modelspec)"
            ):
                read(path, each)


def test_pefts_configuration_says_which_base_a_text_encoder_is_of(
    table: LayerTable, xl_table: LayerTable, tmp_path: Path
) -> None:
    stem = "base_model.model.text_model.encoder.layers.0.self_attn.q_proj"
    saved(tmp_path / "adapter_model.safetensors", pair(stem, ".lora_A.weight", ".lora_B.weight"))
    for base, own, other in (
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", table, xl_table),
        ("stabilityai/stable-diffusion-xl-base-1.0", xl_table, table),
    ):
        config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": base}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        assert read(tmp_path, own).keys() == {"text_encoder"}
        with pytest.raises(UnusableAdapter, match="base_model_name_or_path: "):
            read(tmp_path, other)


@pytest.mark.parametrize(("encoder", "width"), [("text_encoder", 32), ("text_encoder_2", 48)])
@pytest.mark.parametrize("layer", ["self_attn.v_proj", "mlp.fc1", "mlp.fc2"])
def test_names_without_a_prefix_are_of_the_text_encoder_that_their_shapes_fit(
    xl_table: LayerTable, tmp_path: Path, encoder: str, width: int, layer: str
) -> None:
    ending = f"layers.0.{layer}"
    shape = next(s for (part, name), s in xl_table.shapes.items() if part == encoder and name.endswith(ending))
    assert width in shape
    stem = f"base_model.model.text_model.encoder.layers.0.{layer}"
    tensors = {f"{stem}.lora_A.weight": torch.ones(4, shape[1]), f"{stem}.lora_B.weight": torch.ones(shape[0], 4)}
    saved(tmp_path / "adapter_model.safetensors", tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert read(tmp_path, xl_table).keys() == {encoder}


def test_a_base_of_no_known_family_is_called_by_its_id(sd: Path, tmp_path: Path) -> None:
    pocket = outlined_table(sd, tmp_path / "kept", name="pocket")
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    path = saved(tmp_path / "a.safetensors", pair(stem, ".lora_down.weight", ".lora_up.weight"))
    with pytest.raises(UnusableAdapter, match="looks like a Flux LoRA, this base is pocket: "):
        read(path, pocket)


@pytest.mark.parametrize(("width", "family"), [(768, "SD 1"), (1024, "SD 2")])
def test_an_adapter_of_another_base_is_named_by_its_cross_attention(
    xl_table: LayerTable, tmp_path: Path, width: int, family: str
) -> None:
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
    tensors = {f"{stem}.lora_down.weight": torch.ones(4, width), f"{stem}.lora_up.weight": torch.ones(320, 4)}
    with pytest.raises(UnusableAdapter, match=f"looks like an {family} LoRA, this base is SDXL"):
        read(saved(tmp_path / "a.safetensors", tensors), xl_table)


@pytest.mark.parametrize(("name", "shapes", "reason"), [
    ("lora_unet_nowhere", {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4)}, "no such layers"),
    (STEM, {"lora_down.weight": (4, 33), "lora_up.weight": (32, 4)}, "do not fit"),
    (STEM, {"lora_down.weight": (23, 32), "lora_up.weight": (32, 23)}, r"rank 23 \(LoRA of dimension 23\) of .*, this"),
    (STEM, {"lora_down.weight": (65, 32), "lora_up.weight": (32, 65)}, r"rank 32 \(LoRA of dimension 65\)"),
    (STEM, {"hada_w1_a": (32, 5), "hada_w1_b": (5, 32), "hada_w2_a": (32, 5), "hada_w2_b": (5, 32)},
     r"rank 25 \(LoHa of dimension 5\) of .*, this server takes 20: train a smaller one"),
    (STEM, {"lokr_w1_a": (4, 4), "lokr_w1_b": (4, 4), "lokr_w2_a": (8, 6), "lokr_w2_b": (6, 8)},
     r"rank 24 \(LoKr of dimension 4\)"),
    (STEM, {"lokr_w1": (4, 4), "lokr_w2": (8, 8)}, r"rank 32 \(LoKr of two whole factors\)"),
    (CONV, {"lokr_w1": (4, 4), "lokr_w2": (8, 8, 3, 3)}, r"rank 32 \(LoKr of two whole factors\) of .*conv"),
    (CONV, {"lora_down.weight": (4, 32, 1, 1), "lora_up.weight": (32, 30, 1, 1), "lora_mid.weight": (30, 4, 3, 3)},
     r"rank 30 \(LoRA of dimension 4\)"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "alpha": (2,)}, "alpha is not one number"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "dora_scale": (31, 1)}, "one number per output"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "dora_scale": (1, 31)}, "per output or input"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "hada_w1_a": (32, 4)}, "needs|two algorithms"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "lokr_w1": (4, 4), "lokr_w2": (8, 8)},
     "two algorithms"),
    (STEM, {"lokr_w1": (4, 4), "lokr_w1_a": (4, 2), "lokr_w1_b": (2, 4), "lokr_w2": (8, 8)}, "two algorithms"),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "on_input": ()}, "two algorithms"),
    (STEM, {"weight": (33,), "on_input": ()}, "IA³ of 33 numbers"),
    (STEM, {"weight": (32,), "on_input": (2,)}, "not one flag"),
    (STEM, {"on_input": ()}, "no weights that they belong to"),
    (STEM, {"hada_w1_a": (32, 2), "hada_w1_b": (2, 32), "hada_w2_a": (31, 2), "hada_w2_b": (2, 32)}, Q),
    (STEM, {"hada_w1_a": (32, 2), "hada_w1_b": (2, 32), "hada_w2_a": (32, 2)}, Q),
    (STEM, {"hada_w1_a": (32, 10**4), "hada_w1_b": (10**4, 32), "hada_w2_a": (32, 2), "hada_w2_b": (2, 32)}, Q),
    (STEM, {"lokr_w1": (4, 4), "lokr_w2": (8, 7)}, Q),
    (STEM, {"lokr_w1": (4, 4)}, Q),
    (STEM, {"lokr_w1_a": (4, 2), "lokr_w1_b": (3, 4), "lokr_w2": (8, 8)}, Q),
    (STEM, {"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "lora_mid.weight": (4, 3, 3, 3)}, Q),
])  # fmt: skip
def test_names_shapes_and_rank_are_refused_before_any_number_is_read(
    table: LayerTable, tmp_path: Path, name: str, shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    """Its numbers are none: whoever reads them says so."""
    tensors = {f"{name}.{part}": torch.full(shape, float("nan")) for part, shape in shapes.items()}
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter(saved(tmp_path / "a.safetensors", tensors), table, max_rank=20, dtype=torch.float32)


def test_a_lokr_keeps_its_factors_where_they_take_less_time_than_their_rank(tmp_path: Path) -> None:
    """ai-toolkit's own factors of a layer of 3840, and of one that klein's original code has in place of three."""
    layers = {name: OutlinedLayer((3072, 3072)) for name in "qkv"}
    layers["whole"] = OutlinedLayer((3840, 3840))
    layers["conv"] = OutlinedLayer((3840, 3840, 3, 3))
    table = LayerTable({"transformer": OutlinedComponent(layers, {}, [], {"qkv": [*"qkv"]})}, "transformer")
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    lokr = {"whole.lokr_w1": draw(60, 60), "whole.lokr_w2": draw(64, 64),
            "qkv.lokr_w1": draw(8, 8), "qkv.lokr_w2": draw(1152, 384)}  # fmt: skip
    path = saved(tmp_path / "a.safetensors", lokr)
    made = read_adapter(path, table, max_rank=128, dtype=torch.float32)["transformer"]
    assert [(each.rank, each.size_rank, each.work_rank) for each in (made["whole"], made["q"])] == [
        (0, 2, 94), (0, 73, 250),
    ]  # fmt: skip
    whole = torch.kron(lokr["qkv.lokr_w1"], lokr["qkv.lokr_w2"])
    for name, change in zip("qkv", whole.split(3072), strict=True):
        assert torch.equal(made[name].change, change)
    coarse = r"LoKr's factors 2×2 and 1920×1920, as large as rank 481, of .*whole, this server takes 64: .*lokr_factor"
    for name, outer, inner, reason in (
        ("whole", (2, 2), (1920, 1920), coarse),
        ("whole", (60, 60, 1), (64, 64), "whole: its tensors do not fit each other"),
        ("whole", (60, 60, 5), (64, 64), "whole: its tensors do not fit each other"),
        ("conv", (60, 60), (64, 64, 3, 3), r"rank 3840 \(LoKr of two whole factors\) of .*conv, this server takes 64"),
    ):
        path = saved(tmp_path / "b.safetensors", {f"{name}.lokr_w1": draw(outer), f"{name}.lokr_w2": draw(inner)})
        with pytest.raises(UnusableAdapter, match=reason):
            read(path, table)


def test_a_lokr_of_whole_factors_is_scaled_by_one(table: LayerTable, tmp_path: Path) -> None:
    """LyCORIS does so, whatever the alpha: its own, 9999999999, is infinite in 16 bits."""
    tensors = {
        f"{STEM}.lokr_w1": torch.ones(4, 4),
        f"{STEM}.lokr_w2": torch.ones(8, 8),
        f"{STEM}.alpha": torch.tensor(9999999999.0).half(),
    }
    path = saved(tmp_path / "a.safetensors", tensors)
    check_safetensors(path)
    assert read(path, table)["unet"][Q].scaling == 1
