"""A single safetensors file is the same base model as its diffusers folder, without a network."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.engine import Checkpoint, Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.original_checkpoint import copy_config, write_original
from tests.engine.run_engine import final_latents, finish

REQUEST = RunRequest(run_id="k", prompt="a red cat", negative_prompt="dull", seed=3, steps=2, width=64, height=64)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sd2", "sdxl"])
def test_a_single_file_makes_the_latents_of_its_folder(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(family)
    file = write_original(folder, tmp_path / "model.safetensors")
    config = copy_config(folder, tmp_path / "config")
    lora = tiny_models.write_lora(tmp_path / "lora.safetensors", folder, rank=4, seed=1, text=True)
    requests = [REQUEST, replace(REQUEST, run_id="lora", adapter=lora)]
    expected = final_latents(BaseModel.load("m", folder, EXACT_FLOAT32, lambda: None), requests)
    made = final_latents(BaseModel.load("m", Checkpoint(file, config), EXACT_FLOAT32, lambda: None), requests)
    for key, latents in expected.items():
        assert torch.equal(made[key], latents)


@pytest.mark.slow
def test_the_image_is_the_folders_and_the_config_may_lie_beside_the_file(sd: Path, tmp_path: Path) -> None:
    file = write_original(sd, tmp_path / "fine-tune.safetensors")
    copy_config(sd, tmp_path / "fine-tune")
    with Engine.load(sd, EXACT_FLOAT32) as folder, Engine.load(file, EXACT_FLOAT32) as engine:
        assert list(engine.base_models) == ["fine-tune"]
        assert (finish(engine, [REQUEST])["k"].image == finish(folder, [REQUEST])["k"].image).all()  # pyright: ignore


def test_a_file_without_a_config_is_one_clear_error(sd: Path, tmp_path: Path) -> None:
    file = write_original(sd, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: .* config a diffusers folder of the same arch"):
        Engine.load(file, EXACT_FLOAT32)
    with pytest.raises(FileNotFoundError, match=r"elsewhere holds no model_index.json"):
        Engine.load(Checkpoint(file, tmp_path / "elsewhere"), EXACT_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [
        "model.diffusion_model.middle_block.0.in_layers.2.weight",
        "cond_stage_model.transformer.text_model.final_layer_norm.bias",
        "first_stage_model.decoder.conv_in.weight",
    ],
)
def test_a_file_that_lacks_weights_is_refused(sd: Path, tmp_path: Path, missing: str) -> None:
    whole = load_file(write_original(sd, tmp_path / "whole.safetensors"))
    assert missing in whole
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in whole.items() if name != missing}, file)
    with pytest.raises(ValueError, match=r"model.safetensors: lacks weights that"):
        Engine.load(Checkpoint(file, sd), EXACT_FLOAT32)


@pytest.mark.slow
def test_a_file_of_another_architecture_is_refused(sd: Path, sd2: Path, tmp_path: Path) -> None:
    file = write_original(sd2, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: is not of the architecture at"):
        Engine.load(Checkpoint(file, sd), EXACT_FLOAT32)


def test_what_is_no_stable_diffusion_is_refused_by_name(sd: Path, tmp_path: Path) -> None:
    folder = copy_config(sd, tmp_path / "flux")
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline", "transformer": ["diffusers", "X"]}')
    with pytest.raises(ValueError, match="FluxPipeline is not supported"):
        Engine.load(folder, EXACT_FLOAT32)
    with pytest.raises(FileNotFoundError, match=r"model.ckpt: no such safetensors"):
        Engine.load(Checkpoint(tmp_path / "model.ckpt", sd), EXACT_FLOAT32)
