"""Anima's files in every form that people have them, its true shapes, and captions beside others."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.engine import Checkpoint, RunRequest
from serve_app.engine.adapters.explain import also_fits, base_name
from serve_app.engine.adapters.layer_table import LayerTable, UnusableAdapter
from serve_app.engine.adapters.reader import read_adapter
from serve_app.engine.families.anima import AnimaFamily
from serve_app.engine.families.registry import load_meta_layers
from serve_app.engine.families.single_file import fitted
from serve_app.engine.families.weights import part_bytes
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.hollow_models import write_hollow
from tests.engine.original_checkpoint import copy_config
from tests.engine.run_engine import final_latents, load
from tests.engine.tiny_anima import original_names
from tests.engine.tiny_transformers import ANIMA
from tests.engine.true_models import random_anima

pytestmark = pytest.mark.slow
REQUEST = RunRequest(run_id="r", prompt="a red cat", seed=3, steps=2, guidance=3.0, width=64, height=64)


def weights_of(folder: Path, part: str) -> dict[str, Tensor]:
    return load_file(next((folder / part).glob("*.safetensors")))


def as_published(folder: Path) -> Mapping[str, Tensor]:
    return ANIMA.original_weights(folder, "net.")


def of_diffusers(folder: Path) -> Mapping[str, Tensor]:
    conditioner = {f"text_conditioner.{name}": each for name, each in weights_of(folder, "text_conditioner").items()}
    return weights_of(folder, "transformer") | conditioner


@pytest.mark.parametrize("form", [as_published, of_diffusers])
def test_every_form_of_a_file_makes_the_latents_of_its_folder(
    form: Callable[[Path], Mapping[str, Tensor]], anima: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: weight.contiguous() for name, weight in form(anima).items()}, file)
    config = copy_config(anima, tmp_path / "config")
    source = Checkpoint(file, config, vae=anima / "vae", text_encoder=anima / "text_encoder")
    assert torch.equal(final_latents(load(source), [REQUEST])["r"], final_latents(load(anima), [REQUEST])["r"])
    weighed = [part_bytes(each, torch.float32) for each in (anima, source)]
    assert weighed[0] == weighed[1]


def test_captions_of_any_length_have_their_bytes_beside_one_another(anima: Path) -> None:
    """The first has one token, and the last more than the 512 that are read; none has no neighbour of its length."""
    model = load(anima, replace(EXACT_FLOAT32, max_rows=8))
    assert model.family.latent_rgb is not None, "unfinished images are shown"
    prompts = ["a", "a red cat sits on an old wall.", "a red cat. " * 27, "", "a red cat. " * 60]
    requests = [replace(REQUEST, run_id=f"{i}", prompt=prompt, seed=i) for i, prompt in enumerate(prompts)]
    together = final_latents(model, requests[:4]) | final_latents(model, requests[:0:-1])
    for one in requests:
        assert torch.equal(final_latents(model, [one])[one.run_id], together[one.run_id]), one.prompt


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the true sizes that holds no numbers."""
    return write_hollow(tmp_path_factory.mktemp("hollow") / "anima", "anima", torch.bfloat16)


def test_true_files_and_adapters_are_accounted_for(real: Path) -> None:
    """Of Qwen's VAE the last slice of each convolution over time is counted, and of the others every weight."""
    sizes, pipeline = part_bytes(real, torch.bfloat16), random_anima(torch.device("meta"))
    assert {part: round(size / 1e9, 2) for part, size in sizes.items()} == {
        "transformer": 3.91, "text_conditioner": 0.27, "text_encoder": 1.19, "vae": 0.09,
    }  # fmt: skip
    for part in ("transformer", "text_conditioner", "text_encoder"):
        assert sizes[part] == 2 * sum(weight.numel() for weight in getattr(pipeline, part).parameters()), part
    transformer = pipeline.transformer
    own = transformer.state_dict()
    for prefix in ("net.", ""):
        named = original_names(own, prefix)
        assert fitted(real, named, transformer, AnimaFamily.convert, torch.bfloat16).keys() == own.keys()
    table = load_meta_layers(real)
    assert base_name(table) == "Anima"
    layers = {component: [name for part, name in table.shapes if part == component] for component in table.components}
    assert {component: len(names) for component, names in layers.items()} == {
        "transformer": 454, "text_conditioner": 61, "text_encoder": 196,
    }  # fmt: skip
    originals = [
        layer.removesuffix(".")
        for layer in original_names({f"{name}.": torch.empty(0) for name in layers["transformer"]})
    ]
    for ours, theirs in zip(layers["transformer"], originals, strict=True):
        for spelled in (ours, theirs):
            dotted, flat = ["", "transformer.", "diffusion_model."], ["lora_unet_", "lora_transformer_", "lycoris_"]
            require_found(table, ("transformer", ours), dotted, flat, spelled)
    for name in layers["text_conditioner"]:
        dotted = ["text_conditioner.", "llm_adapter.", "diffusion_model.llm_adapter.", "base_model.model.llm_adapter."]
        flat = ["lora_unet_llm_adapter_", "lycoris_llm_adapter_"]
        require_found(table, ("text_conditioner", name), dotted, flat, name)
    for name in layers["text_encoder"]:
        dotted = ["text_encoder.", "text_encoder.qwen3.", "text_encoders.qwen3_06b.transformer.model."]
        require_found(table, ("text_encoder", name), dotted, ["lora_te_"], name)


def require_found(table: LayerTable, layer: tuple[str, str], dotted: list[str], flat: list[str], spelled: str) -> None:
    names = [prefix + spelled for prefix in dotted] + [prefix + spelled.replace(".", "_") for prefix in flat]
    assert {table.find(name) for name in names} == {layer}, names


@pytest.mark.parametrize(("stem", "inputs", "outputs", "reason"), [
    ("diffusion_model.blocks.0.self_attn.q_proj", 5120, 5120, "looks like a Cosmos LoRA, this base is Anima: no base"),
    ("transformer.transformer_blocks.0.attn1.to_q", 4096, 4096, "looks like a Cosmos or LTX-2 LoRA, this base is An"),
    ("diffusion_model.blocks.0.self_attn.q", 5120, 5120, "looks like a Wan LoRA, this base is Anima"),
    ("diffusion_model.layers.0.attention.qkv", 3840, 11520, "looks like a Z-Image LoRA, this base is Anima: choose"),
    ("transformer.transformer_blocks.40.attn1.to_q", 2048, 2048, "the base model has no such layers: transf"),
])  # fmt: skip
def test_adapters_of_other_models_are_refused_by_name(
    real: Path, tmp_path: Path, stem: str, inputs: int, outputs: int, reason: str
) -> None:
    shapes = {f"{stem}.lora_down.weight": (4, inputs), f"{stem}.lora_up.weight": (outputs, 4)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UnusableAdapter, match=reason):
        read_adapter(tmp_path / "a.safetensors", load_meta_layers(real), max_rank=8, dtype=torch.float32)


def test_an_adapter_that_fits_what_is_not_served_is_not_called_ambiguous(real: Path) -> None:
    shapes = {"transformer.transformer_blocks.0.attn1.to_q.lora_A.weight": (4, 2048)}
    assert also_fits(shapes, load_meta_layers(real), {}) == []
