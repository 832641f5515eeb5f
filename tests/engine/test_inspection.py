"""The inspection of an adapter reports a sentence, fields, training metadata and trigger words."""

import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_app.engine.adapters.layer_table import LayerTable
from serve_app.engine.families.outlines import OutlinedComponent, OutlinedLayer, outlined_table
from serve_app.engine.inspection import MAX_VALUE, inspect_adapter, main, suggested_trigger_words, training_metadata
from tests.support import POCKET, ROOT

SD_SCRIPTS = Path(__file__).with_name("sd_scripts")
STEM = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


@pytest.fixture(scope="module")
def tables(sd: Path, sdxl: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, LayerTable]:
    kept = tmp_path_factory.mktemp("tables")
    return {folder.name: outlined_table(folder, kept) for folder in (sd, sdxl)}


def found(path: Path, table: LayerTable) -> dict[str, Any]:
    answer = inspect_adapter(path, table, base="pocket", max_rank=64)
    assert "found" in answer, answer
    return answer["found"]


def too_little_memory() -> AbstractContextManager[None]:
    raise MemoryError


def test_the_limits_hold_for_names_as_well_as_for_numbers(tables: Mapping[str, LayerTable], tmp_path: Path) -> None:
    """The file is refused by its names alone, unless they take too much memory."""
    save_file({"nothing_of_the_base.lora_up.weight": torch.ones(1, 1)}, tmp_path / "a.safetensors")
    for limits, reason in ((nullcontext, "no such layers"), (too_little_memory, "takes too much memory")):
        answer = inspect_adapter(tmp_path / "a.safetensors", tables["sd"], "pocket", 64, limits=limits)
        assert reason in answer["refused"]


@pytest.mark.slow
def test_a_file_of_sd_scripts_for_sdxl_is_described_in_a_sentence(tables: Mapping[str, LayerTable]) -> None:
    seen = found(SD_SCRIPTS / "sdxl_fp16.safetensors", tables["sdxl"])
    assert seen["summary"] == (
        "SDXL, rank 1, attention, feed-forward and linear, text encoder and text encoder 2, from sd-scripts"
    )
    assert (seen["family"], seen["algorithm"], seen["rank"]) == ("SDXL", "LoRA", 1)
    assert seen["metadata"] == {
        "ss_output_name": "ink",
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_sd_model_name": "tiny",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "1",
        "ss_network_alpha": "0.5",
        "ss_num_train_images": "3",
        "ss_steps": "10",
        "ss_resolution": "(32, 32)",
        "ss_mixed_precision": "no",
    }
    assert seen["suggested_trigger_words"] == ["ink drawing", "a cat"]


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "algorithm"), [
    ({"lora_down.weight": (4, 32), "lora_up.weight": (32, 4)}, "LoRA"),
    ({"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "dora_scale": (32, 1)}, "DoRA"),
    ({"lora_A.weight": (4, 32), "lora_B.weight": (32, 4), "lora_magnitude_vector.weight": (32,)}, "DoRA"),
    ({"lora_down.weight": (4, 32), "lora_up.weight": (32, 4), "magnitude": (32,)}, "DoRA"),
    ({"hada_w1_a": (32, 2), "hada_w1_b": (2, 32), "hada_w2_a": (32, 2), "hada_w2_b": (2, 32)}, "LoHa"),
    ({"hada_w1_a": (32, 2), "hada_w1_b": (2, 32), "hada_w2_a": (32, 2), "hada_w2_b": (2, 32), "dora_scale": (32, 1)},
     "LoHa with DoRA"),
    ({"lokr_w1": (4, 4), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 8), "alpha": ()}, "LoKr"),
    ({"weight": (32,), "on_input": ()}, "IA3"),
])  # fmt: skip
def test_the_algorithm_is_named(
    tables: Mapping[str, LayerTable], tmp_path: Path, parts: Mapping[str, tuple[int, ...]], algorithm: str
) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"{STEM}.{part}": torch.ones(shape) * (part != "on_input") for part, shape in parts.items()}
    save_file(tensors, path)
    seen = found(path, tables["sd"])
    assert seen["algorithm"] == algorithm
    shown = "" if algorithm == "LoRA" else f"{algorithm}, "
    assert seen["summary"] == f"pocket, {shown}rank {seen['rank']}, attention"
    assert seen["work_rank"] == seen["rank"]


@pytest.mark.slow
def test_a_lokr_is_as_large_as_its_factors_and_takes_as_long_as_they_do(
    tables: Mapping[str, LayerTable], tmp_path: Path
) -> None:
    def seen_of(layer: str, number: int) -> dict[str, Any]:
        stem, factor = (
            f"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_{layer}",
            torch.full((8, 8), float(number)),
        )
        save_file({f"{stem}.lokr_w1": factor, f"{stem}.lokr_w2": factor.clone()}, tmp_path / "a.safetensors")
        return found(tmp_path / "a.safetensors", tables["sd"])

    seen = seen_of("to_q", 1)
    assert (seen["rank"], seen["work_rank"], seen["summary"]) == (1, 40, "pocket, LoKr, as large as rank 1, attention")
    assert seen["factored"] == seen_of("to_q", 2)["factored"] != seen_of("to_k", 1)["factored"], "its layers are told"


@pytest.mark.slow
def test_a_folder_of_peft_names_its_base(tables: Mapping[str, LayerTable], tmp_path: Path) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    tensors = {f"base_model.model.{name}.lora_{part}.weight": torch.ones(32, 32) for part in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 32, "base_model_name_or_path": "acme/pocket"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    seen = found(tmp_path, tables["sd"])
    assert (seen["writer"], seen["metadata"]) == ("PEFT", {"base_model_name_or_path": "acme/pocket"})


@pytest.mark.parametrize(("layer", "width", "metadata", "others"), [
    ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", 1024, {}, "; it fits SD 1 as well"),
    ("down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", 768, {}, "; it fits SD 2 and SDXL as well"),
    ("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q", 1024, {"ss_base_model_version": "sd_v2"}, ""),
    ("down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k", 1024, {}, ""),
    ("up_blocks.3.attentions.0.proj_in", 768, {}, ""),
])  # fmt: skip
def test_a_file_that_fits_two_families_says_so(
    tmp_path: Path, layer: str, width: int, metadata: dict[str, str], others: str
) -> None:
    """The layers of a base model of real widths, of which only the outlines are needed."""
    cross = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k"
    sides = {layer: (320, 320), cross: (320, width)}
    layers = {name: OutlinedLayer(shape) for name, shape in sides.items()}
    table = LayerTable({"unet": OutlinedComponent(layers, {}, ["lora_unet_"])}, "unet")
    stem = "lora_unet_" + layer.replace(".", "_")
    tensors = {"lora_down.weight": torch.ones(4, sides[layer][1]), "lora_up.weight": torch.ones(320, 4)}
    save_file({f"{stem}.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "a", metadata=metadata)
    before, found_also, after = found(tmp_path / "a", table)["summary"].partition("; it fits")
    assert (found_also + after, before[:4]) == (others, "SD 2" if width == 1024 else "SD 1")


FLUX = {f"double_blocks.0.img_attn.qkv.lora_{part}.weight": (4, 4) for part in ("down", "up")}


@pytest.mark.parametrize(("content", "reason"), [
    (b"PK\x03\x04" + b"a" * 600, "the file is a zip archive: "),
    (FLUX, "looks like a Flux LoRA, this base is pocket: "),
], ids=["the kind of file", "the base model"])  # fmt: skip
def test_what_the_header_tells_is_told_without_torch(
    layer_tables: Path, tmp_path: Path, content: bytes | dict[str, tuple[int, ...]], reason: str
) -> None:
    """torch takes 2 s to load, for which the owner of a wrong file and all behind it would wait."""
    path = tmp_path / "a.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file({name: torch.ones(shape) for name, shape in content.items()}, path)
    code = f"import sys; sys.modules['torch'] = None; from {main.__module__} import main; main(*sys.argv[1:])"
    arguments = [POCKET, "pocket", path, "128", layer_tables, "30"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(done.stdout)["refused"].startswith(reason), done.stderr[-500:]


def test_training_metadata_are_chosen_and_cut_and_of_one_line() -> None:
    kept = training_metadata({
        "modelspec.title": "Ink\n\x1b[31m on \ud800 paper", "modelspec.thumbnail": "data:image/png;base64,AAAA",
        "modelspec.description": "x" * 10_000, "ss_dataset_dirs": '{"/home/ann/3_ink": {}}', "ss_clip_skip": "None",
        "ss_training_comment": "", "ss_unknown": "1", "sshs_model_hash": "00",
    })  # fmt: skip
    assert kept == {"modelspec.title": "Ink [31m on paper", "modelspec.description": "x" * MAX_VALUE}


@pytest.mark.parametrize(("metadata", "words"), [
    ({}, []),
    ({"modelspec.trigger_phrase": "ohwx person, ink"}, ["ohwx person", "ink"]),
    ({"ss_tag_frequency": '{"1_a": {"cat": 2, "ink": 9}, "2_b": {"cat": 8, "dog": 1}}'}, ["cat", "ink", "dog"]),
    ({"modelspec.trigger_phrase": "ink", "ss_tag_frequency": '{"a": {"ink": 9, "cat": 8}}'}, ["ink", "cat"]),
    ({"ss_tag_frequency": json.dumps({"a": {f"tag {n}": n for n in range(1_000)}})},
     [f"tag {n}" for n in (999, 998, 997, 996, 995)]),
    ({"ss_tag_frequency": '{"a": {"' + "x" * 65 + '": 9, "cat": true, "dog": "2", "": 4, "owl": 1}}'}, ["owl"]),
    ({"ss_tag_frequency": "[[[["}, []),
    ({"ss_tag_frequency": "[" * 100_000}, []),
    ({"ss_tag_frequency": '[{"cat": 1}]'}, []),
    ({"ss_tag_frequency": '{"a": [1]}'}, []),
])  # fmt: skip
def test_trigger_words_are_suggested_by_the_phrase_and_the_commonest_tags(
    metadata: dict[str, str], words: list[str]
) -> None:
    assert suggested_trigger_words(metadata) == words
