"""Z-Image draws what diffusers' own pipeline draws, from a folder and from a file, alone and in any company."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.domain.errors import FailureCode
from serve_app.engine import AdapterFile, Checkpoint, Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.weights import part_bytes
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32, ONE_AT_A_TIME
from tests.engine.diffusers_reference import PeftReference
from tests.engine.original_checkpoint import copy_config
from tests.engine.run_engine import begun_at_random, final_latents, finish, same_alone, start
from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_z_image import original_weights, tiny_vae, write_z_image

TOLERANCE = 1e-4
OPTIONS = replace(EXACT_FLOAT32, max_rows=8, adapter_slots=10)
EVERY_LINEAR = (
    "to_q", "to_k", "to_v", "to_out.0", "w1", "w2", "w3", "adaLN_modulation.0", "adaLN_modulation.1", "x_embedder.2-1",
    "linear", "mlp.0", "mlp.2", "cap_embedder.1",
)  # fmt: skip
ATTENTION = tiny_models.ATTENTION
REQUEST = RunRequest(run_id="r", prompt="a red cat", seed=3, steps=3, guidance=1.0, width=64, height=64)
WORDS = "a red cat sits on an old wall in the rain and looks at the lights of the town below"


@pytest.fixture(scope="module")
def turbo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Z-Image-Turbo, whose schedule is the same for all sizes."""
    return write_z_image(tmp_path_factory.mktemp("models") / "turbo")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Z-Image, whose schedule depends on the size, with a head of another width."""
    return write_z_image(tmp_path_factory.mktemp("models") / "base", shift=None, dim=48, heads=3, seed=1)


class Reference(PeftReference):
    """diffusers' pipeline, which counts guidance from 0."""

    def latents_of(self, request: RunRequest) -> Tensor:
        return self.latents(as_diffusers_has_it(request))

    def image_of(self, request: RunRequest) -> np.ndarray:
        return self.image(as_diffusers_has_it(request))


def as_diffusers_has_it(request: RunRequest) -> RunRequest:
    """Return a request with diffusers' guidance, of a size that its pipeline makes."""
    sides = {"width": -(-request.width // 16) * 16, "height": -(-request.height // 16) * 16}
    return replace(request, adapter=None, guidance=request.guidance - 1, **sides)


CASES = [
    replace(REQUEST, run_id="plain"),
    replace(REQUEST, run_id="guided", guidance=4.0, negative_prompt="dull", steps=4),
    replace(REQUEST, run_id="wide", width=96, prompt=WORDS, seed=5),
    replace(REQUEST, run_id="wide guided", width=96, negative_prompt=WORDS, guidance=2.5),
    replace(REQUEST, run_id="odd", width=72, height=60, prompt=WORDS * 3, guidance=3.0),
    replace(REQUEST, run_id="odd plain", width=72, height=60, prompt=""),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turbo", "base"])
def test_prompts_steps_and_pixels_are_those_of_diffusers(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    reference, model = Reference(folder), BaseModel.load("m", folder, ONE_AT_A_TIME, lambda: None)
    family: Any = model.family
    decoded: list[Tensor] = []
    for vae in (family.vae, reference.pipeline.vae):
        vae.decoder.register_forward_hook(lambda _module, _inputs, output: decoded.append(output))
    for one in CASES:
        encoded = model.encode(one)
        assert encoded is not None
        prompts = [one.negative_prompt, one.prompt][-encoded.rows :]
        for row, prompt in zip(encoded.context, prompts, strict=True):
            (expected,) = reference.pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
            assert (row[: len(expected)] - expected).abs().max() < TOLERANCE
            assert not row[len(expected) :].any()
        run, steps = start(model, one), list[Tensor]()
        while not run.is_done:
            model.runner.denoise([run])
            steps.append(run.latents)
        image, expected = model.decode(run), reference.image_of(one)
        assert len(steps) == len(reference.trace) == one.steps
        for made, step in zip(steps, reference.trace, strict=True):
            assert (made - step).abs().max() < TOLERANCE, one
        ours, theirs = decoded
        assert (ours - theirs).abs().max() < TOLERANCE
        decoded.clear()
        top, left = (expected.shape[0] - one.height) // 2, (expected.shape[1] - one.width) // 2
        assert image.shape == (one.height, one.width, 3)
        cut = expected[top : top + one.height, left : left + one.width].astype(int)
        assert abs(image.astype(int) - cut).max() <= 1


def test_a_prompt_is_cut_where_diffusers_cuts_it_and_is_not_weighted(turbo: Path) -> None:
    model = BaseModel.load("m", turbo, ONE_AT_A_TIME, lambda: None)
    with pytest.raises(ValueError, match="prompt_weights: are for CLIP's text encoders"):
        model.encode(replace(REQUEST, prompt_weights=True))
    encoded = model.encode(replace(REQUEST, prompt=WORDS * 8))
    assert encoded is not None
    (expected,) = Reference(turbo).pipeline.encode_prompt(WORDS * 8, do_classifier_free_guidance=False)[0]
    assert expected.shape[0] == 512
    assert (encoded.context[0] - expected).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, -0.5])
@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_adapters_act_as_in_peft(part: str, scale: float, turbo: Path, tmp_path: Path) -> None:
    targets = EVERY_LINEAR if part == "transformer" else ("none",)
    text = part == "text_encoder"
    tensors = tiny_models.random_lora(
        turbo, rank=4, seed=1, targets=targets, denoiser="transformer", text=text, size=0.15
    )
    adapter = tiny_models.write_adapter(tmp_path / "lora.safetensors", tensors)
    model = BaseModel.load("m", turbo, ONE_AT_A_TIME, lambda: None)
    plain, reference = Reference(turbo), Reference(turbo)
    reference.adapt(tensors)
    reference.scale(scale)
    for one in (REQUEST, replace(REQUEST, prompt=WORDS, guidance=3.0, width=96)):
        made = final_latents(model, [replace(one, adapter=adapter, scale=scale)])[one.run_id]
        expected = reference.latents_of(one)
        assert (made - expected).abs().max() < TOLERANCE
        assert bool(scale) == bool((expected - plain.latents_of(one)).abs().max() > 100 * TOLERANCE)


FORMS = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "scaled fp8": torch.float8_e4m3fn,
    "fp8 scaled by output": torch.float8_e4m3fn,
}  # fmt: skip


def stored(form: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's weight as a file of this form holds it, and its scale."""
    scale = torch.tensor({"scaled fp8": 2**-9, "fp8 scaled by output": 2**-8}.get(form, 1.0))
    if form == "fp8 scaled by output":
        scale = scale / (1 + torch.arange(len(weight)) % 2)
    return (weight / scale.reshape(-1, 1)).to(FORMS[form]), scale


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_makes_the_latents_of_its_folder(form: str, prefix: str, turbo: Path, tmp_path: Path) -> None:
    """The folder's weights are rounded as the file's first."""
    folder = Path(shutil.copytree(turbo, tmp_path / "folder"))
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(whole)
    for name, weight in weights.items():
        if name.endswith(".weight") and weight.dim() == 2:
            rounded, scale = stored(form, weight)
            weights[name] = rounded.float() * scale.reshape(-1, 1)
    save_file(weights, whole)
    tensors = original_weights(folder, prefix) | {f"{prefix}norm_final.weight": torch.ones(4)}
    for name, weight in list(tensors.items()):
        if name.endswith(".weight") and weight.dim() == 2:
            tensors[name], scale = stored(form, weight)
            if "scaled" in form:
                tensors[name.replace(".weight", ".scale_weight" if prefix else ".weight_scale")] = scale
                tensors[name.replace(".weight", ".comfy_quant")] = torch.zeros(3, dtype=torch.uint8)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    config = copy_config(turbo, tmp_path / "config")
    lora = tiny_models.write_lora(
        tmp_path / "lora.safetensors", turbo, rank=4, seed=1, text=True, denoiser="transformer", targets=ATTENTION
    )
    requests = [replace(REQUEST, guidance=2.0), replace(REQUEST, run_id="lora", adapter=lora)]
    expected = final_latents(BaseModel.load("m", folder, ONE_AT_A_TIME, lambda: None), requests)
    vae, encoder, tokenizer = (turbo / part for part in ("vae", "text_encoder", "tokenizer"))
    checkpoints = [
        Checkpoint(file, config, vae=vae, text_encoder=encoder, tokenizer=tokenizer),
        Checkpoint(file, config, vae=turbo, text_encoder=turbo),
        Checkpoint(file, turbo),
    ]
    for checkpoint in checkpoints if form == "float32" else checkpoints[:1]:
        if form == "float32":
            weighed = (sum(part_bytes(each, torch.float32).values()) for each in (folder, checkpoint))
            assert -next(weighed) + next(weighed) == tensors[f"{prefix}norm_final.weight"].nbytes
        made = final_latents(BaseModel.load("m", checkpoint, ONE_AT_A_TIME, lambda: None), requests)
        for key, latents in expected.items():
            assert torch.equal(made[key], latents), (checkpoint, key)


def another(folder: Path, into: Path, part: str, module: Any) -> Path:
    """Copy a folder with another part in it."""
    shutil.copytree(folder, into)
    shutil.rmtree(into / part)
    module.save_pretrained(into / part)
    return into


def test_parts_that_do_not_fit_are_refused_by_name(turbo: Path, base: Path, sd: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(original_weights(turbo), file)
    tiny = diffusers.AutoencoderKL.from_config(dict(tiny_vae().config) | {"latent_channels": 4})
    other = another(turbo, tmp_path / "vae", "vae", tiny)
    wide = {**transformers.Qwen3Config.from_pretrained(turbo / "text_encoder").to_dict(), "hidden_size": 48}
    encoder = transformers.Qwen3Model(transformers.Qwen3Config.from_dict(wide))
    wider = another(turbo, tmp_path / "encoder", "text_encoder", encoder)
    omni = Path(shutil.copytree(turbo, tmp_path / "omni"))
    described = json.loads((omni / "transformer" / "config.json").read_text())
    (omni / "transformer" / "config.json").write_text(json.dumps(described | {"siglip_feat_dim": 16}))
    bare = Path(shutil.copytree(turbo, tmp_path / "bare"))
    shutil.rmtree(bare / "text_encoder")
    cases: list[tuple[Path | Checkpoint, str]] = [
        (other, "takes 16 channels and the VAE makes 4: name .* `vae:`"),
        (Checkpoint(turbo, vae=sd), "takes 16 channels and the VAE makes 4"),
        (wider, "captions 32 wide and the text encoder makes 48: .* `text_encoder:`"),
        (Checkpoint(turbo, text_encoder=wider), r"text_encoder: .*is not of the architecture at .*turbo"),
        (Checkpoint(turbo, text_encoder=tmp_path / "none"), "text_encoder: .*none: holds no config.json"),
        (Checkpoint(turbo, tokenizer=sd), "no chat template, .* `tokenizer:`"),
        (Checkpoint(turbo, tokenizer=tmp_path / "none"), "tokenizer: .*none: holds no tokenizer_config.json"),
        (Checkpoint(file, base), "cap_embedder.1.bias is 32 instead of 48"),
        (Checkpoint(file, sd), "is a Z-Image, and its config a Stable Diffusion"),
        (Checkpoint(sd, text_encoder=turbo), "text_encoder: Stable Diffusion comes with its own"),
        (Checkpoint(turbo, clip_skip=1), "clip_skip"),
        (omni, "transformer"),
        (bare, "has no text_encoder"),
    ]
    for source, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            BaseModel.load("m", source, EXACT_FLOAT32, lambda: None)
    for spoilt, message in (
        ({"layers.9.attention.qkv.weight": torch.ones(3, 2)}, "no part of its architecture reads: layers.9"),
        ({"layers.0.attention.qkv.weight": torch.ones(3, 2)}, "layers.0.attention.to_q.weight is 1 × 2 instead of"),
        ({"x_pad_token": None}, "lacks weights .* x_pad_token"),
        ({"x_pad_token": torch.ones(1, 32, dtype=torch.uint8)}, "x_pad_token is quantized as uint8"),
        ({"lora_unet_layers_0_attention_qkv.lora_down.weight": torch.ones(2, 2)}, "is a LoRA"),
        ({"all_x_embedder.2-1.weight": torch.ones(2, 2)}, "has diffusers' names"),
    ):
        tensors = {**original_weights(turbo), **spoilt}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            BaseModel.load("m", Checkpoint(file, turbo), EXACT_FLOAT32, lambda: None)


@pytest.fixture(scope="module")
def loras(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    """Attention alone, every linear, and the text encoder too, of ranks in three buckets."""
    into = tmp_path_factory.mktemp("adapters")
    kinds = (
        (4, ATTENTION, False),
        (20, EVERY_LINEAR, False),
        (6, ("w1", "w3"), True),
        (12, ("cap_embedder.1",), False),
    )
    return [
        tiny_models.write_lora(
            into / f"{i}.safetensors", base, rank=rank, seed=i, targets=targets, denoiser="transformer", text=text,
            size=0.1,
        )
        for i, (rank, targets, text) in enumerate(kinds)
    ]  # fmt: skip


def mixed(count: int, loras: list[AdapterFile], chance: random.Random) -> list[RunRequest]:
    """Return runs of every bucket, with and without guidance and adapters, of three sizes."""
    return [
        RunRequest(
            run_id=f"{i}", prompt=(WORDS * 6)[: chance.choice((9, 30, 90, 200, 480))], seed=chance.randrange(2**32),
            negative_prompt=(WORDS * 3)[: chance.choice((0, 0, 5, 150))], adapter=chance.choice([*loras, None]),
            scale=chance.choice((0.3, 1.0, -0.5)), steps=chance.randint(1, 4), guidance=chance.choice((1.0, 3.5, 5.0)),
            width=chance.choice((64, 64, 96)), height=chance.choice((64, 60)),
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.slow
def test_mixed_runs_have_the_bytes_that_they_have_alone(base: Path, loras: list[AdapterFile]) -> None:
    chance = random.Random(1)
    requests = [begun_at_random(one, chance) for one in mixed(24, loras, chance)]
    same, widest = same_alone(base, replace(OPTIONS, max_runs=12), requests, chance)
    assert same == 24
    assert widest == OPTIONS.max_rows


@pytest.mark.slow
def test_a_caption_in_the_same_bucket_changes_no_bit_of_a_neighbour(base: Path, loras: list[AdapterFile]) -> None:
    model = BaseModel.load("m", base, OPTIONS, lambda: None)
    one = replace(REQUEST, prompt=WORDS[:20], adapter=loras[1])
    others = [replace(one, run_id=f"{i}", prompt=WORDS[:i], adapter=loras[i % 4], seed=i) for i in (0, 5, 30, 7)]
    alone = final_latents(model, [one])["r"]
    assert torch.equal(final_latents(model, [*others, one])["r"], alone)
    assert torch.equal(final_latents(model, [one, *reversed(others)])["r"], alone)


@pytest.mark.slow
def test_it_serves_beside_another_family_and_refuses_its_samplers(turbo: Path, sd: Path) -> None:
    one = replace(REQUEST, base_model="turbo")
    with Engine.load({"turbo": turbo, "sd": sd}, EXACT_FLOAT32) as engine:
        made = finish(engine, [one, replace(one, run_id="sd", base_model="sd")])
        failure = finish(engine, [replace(one, sampler="ddim")])["r"].failure
        flow = finish(engine, [replace(one, run_id="flow", sampler="flow-euler")])["flow"]
    assert failure is not None
    assert failure.code is FailureCode.GENERATION_FAILED
    assert "ddim" in failure.message
    assert np.array_equal(np.asarray(flow.image), np.asarray(made["r"].image))
    with Engine.load(turbo, EXACT_FLOAT32) as engine:
        assert np.array_equal(np.asarray(finish(engine, [REQUEST])["r"].image), np.asarray(made["r"].image))
    with pytest.raises(ValueError, match="flow-euler"):
        Engine.load(turbo, replace(EXACT_FLOAT32, sampler="dpm++2m-karras"))
