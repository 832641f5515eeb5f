"""LoRA files of every spelling become the same weights; what cannot be placed is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve_app.engine.adapters_file import AdapterWeights, LayerTable, UnusableAdapter, read_adapter
from serve_app.engine.base_model import BaseModel
from tests.engine import tiny
from tests.engine.conftest import EXACT_FLOAT32

Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def table(sd: Path) -> LayerTable:
    return BaseModel.load("m", sd, EXACT_FLOAT32, lambda: None).family.table


@pytest.fixture(scope="module")
def xl_table(sdxl: Path) -> LayerTable:
    return BaseModel.load("m", sdxl, EXACT_FLOAT32, lambda: None).family.table


def read(path: Path, table: LayerTable, max_rank: int = 64) -> AdapterWeights:
    return read_adapter(path, table, max_rank=max_rank, dtype=torch.float32)


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def pair(stem: str, down: str, up: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{stem}{down}": torch.randn(4, 32, generator=generator),
        f"{stem}{up}": torch.randn(32, 4, generator=generator),
    }


@pytest.mark.parametrize(("stem", "down", "up"), [
    (f"unet.{Q}", ".lora_A.weight", ".lora_B.weight"),
    (Q, ".lora_A.weight", ".lora_B.weight"),
    (f"base_model.model.{Q}", ".lora_A.weight", ".lora_B.weight"),
    (f"unet.{Q}", ".lora_A.default.weight", ".lora_B.default.weight"),
    (f"unet.{Q}", ".lora.down.weight", ".lora.up.weight"),
    (f"unet.{Q.replace('.to_q', '.processor.to_q')}_lora", ".down.weight", ".up.weight"),
    ("lora_unet_" + Q.replace(".", "_"), ".lora_down.weight", ".lora_up.weight"),
])  # fmt: skip
def test_every_spelling_names_the_same_layer(table: LayerTable, tmp_path: Path, stem: str, down: str, up: str) -> None:
    weights = read(saved(tmp_path / "a.safetensors", pair(stem, down, up)), table)
    assert weights.keys() == {"unet"}
    assert weights["unet"].keys() == {Q}
    assert weights["unet"][Q].scale == 1  # no alpha means alpha = rank


@pytest.mark.parametrize("stem", [
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
    "text_encoder.encoder.layers.0.self_attn.q_proj",
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
])  # fmt: skip
def test_text_encoder_layers_are_found(table: LayerTable, tmp_path: Path, stem: str) -> None:
    weights = read(saved(tmp_path / "a.safetensors", pair(stem, ".lora_down.weight", ".lora_up.weight")), table)
    assert [len(layers) for component, layers in weights.items() if component == "text_encoder"] == [1]


@pytest.mark.parametrize(("sgm", "ours"), [
    ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"),
    ("lora_unet_input_blocks_5_1_proj_in", "down_blocks.1.attentions.1.proj_in"),
    ("lora_unet_input_blocks_1_0_emb_layers_1", "down_blocks.0.resnets.0.time_emb_proj"),
    ("lora_unet_middle_block_1_transformer_blocks_1_attn2_to_k", "mid_block.attentions.0.transformer_blocks.1.attn2.to_k"),
    ("lora_unet_output_blocks_2_1_transformer_blocks_0_ff_net_0_proj", "up_blocks.0.attentions.2.transformer_blocks.0.ff.net.0.proj"),
    ("lora_unet_output_blocks_2_2_conv", "up_blocks.0.upsamplers.0.conv"),
    ("lora_unet_input_blocks_3_0_op", "down_blocks.0.downsamplers.0.conv"),
    ("lora_unet_time_embed_0", "time_embedding.linear_1"),
])  # fmt: skip
def test_names_of_the_original_sdxl_code_are_found(xl_table: LayerTable, sgm: str, ours: str) -> None:
    assert xl_table.find("unet", sgm.removeprefix("lora_unet_")) == ours


def test_alpha_scales_and_per_layer_alphas_win(table: LayerTable, tmp_path: Path) -> None:
    stem = "lora_unet_" + Q.replace(".", "_")
    tensors = pair(stem, ".lora_down.weight", ".lora_up.weight") | {f"{stem}.alpha": torch.tensor(1.0)}
    assert read(saved(tmp_path / "a.safetensors", tensors), table)["unet"][Q].scale == 0.25
    peft = tiny.write_adapter(
        tmp_path / "b.safetensors",
        pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight"),
        {"unet.lora_alpha": 8, "unet.alpha_pattern": {"attn1.to_q": 2}},
    )
    assert read(peft.path, table)["unet"][Q].scale == 0.5


@pytest.mark.parametrize(("name", "reason"), [
    (f"lora_unet_{Q.replace('.', '_')}.hada_w1_a", "LoHa"),
    (f"lora_unet_{Q.replace('.', '_')}.lokr_w1", "LoKr"),
    (f"lora_unet_{Q.replace('.', '_')}.diff", "full-weight"),
    ("unet.no_such_block.to_q.lora_A.weight", "no such layers"),
    ("unet.something_else", "unet.something_else"),
])  # fmt: skip
def test_a_key_that_cannot_be_placed_refuses_the_file_by_name(
    table: LayerTable, tmp_path: Path, name: str, reason: str
) -> None:
    tensors = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight") | {name: torch.zeros(4, 4)}
    with pytest.raises(UnusableAdapter, match=reason):
        read(saved(tmp_path / "a.safetensors", tensors), table)


@pytest.mark.parametrize(("change", "reason"), [
    ({"down": torch.full((4, 32), float("nan"))}, "not finite"),
    ({"up": torch.full((32, 4), float("inf"))}, "not finite"),
    ({"down": torch.zeros(4, 31)}, "do not fit"),
    ({"down": torch.zeros(5, 32)}, "do not fit"),
    ({"up": None}, "needs both"),
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


def test_a_rank_above_the_limit_is_refused(table: LayerTable, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.safetensors", pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight"))
    with pytest.raises(UnusableAdapter, match="rank 4 is above"):
        read(path, table, max_rank=2)


def test_a_scaling_rule_that_is_not_ours_is_refused(table: LayerTable, tmp_path: Path) -> None:
    pairs = pair(f"unet.{Q}", ".lora_A.weight", ".lora_B.weight")
    path = tmp_path / "a.safetensors"
    save_file(pairs, path, metadata={"lora_adapter_metadata": '{"unet.lora_alpha": 4, "unet.use_rslora": true}'})
    with pytest.raises(UnusableAdapter, match="use_rslora"):
        read(path, table)


def test_a_file_that_is_not_safetensors_is_refused(table: LayerTable, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"not at all")
    with pytest.raises(UnusableAdapter, match="not a safetensors file"):
        read(tmp_path / "a.safetensors", table)
