"""A single safetensors file is the same base model as its diffusers folder, without a network."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.engine import Checkpoint, Engine, RunRequest
from tests.engine import tiny_models
from tests.engine.diffusers_reference import DiffusersReference, open_pipeline
from tests.engine.original_checkpoint import copy_config, write_original
from tests.engine.run_engine import ONE_AT_A_TIME, final_latents, finish, load, start
from tests.engine.tiny_models import diffusers

TOLERANCE = 1e-4
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
    expected = final_latents(load(folder), requests)
    made = final_latents(load(Checkpoint(file, config)), requests)
    for key, latents in expected.items():
        assert torch.equal(made[key], latents)


@pytest.mark.slow
def test_the_image_is_the_folders_and_the_config_may_lie_beside_the_file(sd: Path, tmp_path: Path) -> None:
    file = write_original(sd, tmp_path / "fine-tune.safetensors")
    copy_config(sd, tmp_path / "fine-tune")
    with Engine.load(sd, ONE_AT_A_TIME) as folder, Engine.load(file, ONE_AT_A_TIME) as engine:
        assert list(engine.base_models) == ["fine-tune"]
        assert (finish(engine, [REQUEST])["k"].image == finish(folder, [REQUEST])["k"].image).all()  # pyright: ignore


def test_a_file_without_a_config_is_one_clear_error(sd: Path, tmp_path: Path) -> None:
    file = write_original(sd, tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: .* config a diffusers folder of the same arch"):
        Engine.load(file, ONE_AT_A_TIME)
    with pytest.raises(FileNotFoundError, match=r"elsewhere holds no model_index.json"):
        Engine.load(Checkpoint(file, tmp_path / "elsewhere"), ONE_AT_A_TIME)


ZERO_SNR = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True}
NOOBAI = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
PLAYGROUND = {"edm_mean": torch.tensor([[-1.7, 1.9, -1.4, 2.5]]), "edm_std": torch.tensor([[8.5, 5.9, 6.5, 5.2]])}
COSXL = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.002)}


def change(file: Path, tensors: Mapping[str, Tensor], *, without: str = "nothing") -> Path:
    """Rewrite a single file with more tensors, without those whose names match."""
    kept = {name: tensor for name, tensor in load_file(file).items() if not re.search(without, name)}
    save_file({**kept, **tensors}, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "markers", "asked"),
    [
        ("sdxl", NOOBAI, lambda own: type(own).from_config(own.config, **ZERO_SNR)),
        ("sd", {"v_pred": torch.tensor([])}, lambda own: type(own).from_config(own.config, prediction_type="v_prediction")),
        ("sdxl", PLAYGROUND, lambda _: diffusers.EDMDPMSolverMultistepScheduler()),
        (
            "sdxl",
            COSXL,
            lambda _: diffusers.EDMEulerScheduler(
                sigma_min=0.002, sigma_max=120.0, sigma_data=1.0, prediction_type="v_prediction",
                sigma_schedule="exponential",
            ),
        ),
    ],
    ids=["noobai", "v_pred", "playground", "cosxl"],
)  # fmt: skip
def test_what_a_file_says_of_its_training_is_obeyed(
    family: str,
    markers: Mapping[str, Tensor],
    asked: Callable[[Any], Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(family)
    file = change(write_original(folder, tmp_path / "model.safetensors"), markers)
    config = copy_config(folder, tmp_path / "config")
    scheduler = config / "scheduler" / "scheduler_config.json"
    said = {name: value for name, value in json.loads(scheduler.read_text()).items() if name not in ZERO_SNR}
    scheduler.write_text(json.dumps(said))  # as published configs, which leave out what is a default
    model = load(Checkpoint(file, config))
    one = replace(REQUEST, steps=3)
    made = final_latents(model, [one])["k"]
    reference = DiffusersReference(folder)
    unmarked = reference.latents(one)
    reference.pipeline.scheduler = asked(reference.pipeline.scheduler)
    expected = reference.latents(one)
    assert (expected - unmarked).abs().max() > 0.1
    assert (made - expected).abs().max() < TOLERANCE * max(1.0, float(expected.abs().max()))
    if "edm_mean" in markers:
        reference.pipeline.vae.register_to_config(
            latents_mean=[-1.7, 1.9, -1.4, 2.5], latents_std=[8.5, 5.9, 6.5, 5.2], scaling_factor=0.5
        )
        image = model.family.autoencoder.decode(made, one).astype(int)
        assert abs(image - reference.image(one)).max() <= 1
        with pytest.raises(ValueError, match="an EDM model draws with its own scheduler only"):
            start(model, replace(one, sampler="euler"))


@pytest.mark.parametrize(
    ("marker", "lacking"), [("edm_mean", "edm_std"), ("edm_vpred.sigma_max", "edm_vpred.sigma_min")]
)
def test_half_of_a_pair_of_markers_is_refused_by_name(sdxl: Path, tmp_path: Path, marker: str, lacking: str) -> None:
    file = change(write_original(sdxl, tmp_path / "model.safetensors"), {marker: {**PLAYGROUND, **COSXL}[marker]})
    with pytest.raises(ValueError, match=f"base model m: .*{lacking}"):
        load(Checkpoint(file, sdxl))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale_name", "marks"),
    [
        ("scale_weight", {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}),
        ("weight_scale", {"scaled_fp8": torch.tensor([])}),
    ],
)
def test_scaled_float8_weights_are_rescaled(
    scale_name: str, marks: Mapping[str, Tensor], sd: Path, tmp_path: Path
) -> None:
    whole = load_file(write_original(sd, tmp_path / "whole.safetensors"))
    scaled, plain = {**whole, **marks}, dict(whole)
    for number, (name, weight) in enumerate(whole.items()):
        if weight.dim() == 2 and re.search("attn|mlp", name) and name.endswith(".weight"):
            dims = (1,) if number % 2 else tuple(range(1, weight.dim()))
            scale = weight.abs().amax(dim=dims, keepdim=True) / 448 if number % 2 else weight.abs().max() / 448
            scaled[name] = (weight / scale).to(torch.float8_e4m3fn)
            plain[name] = scaled[name].float() * scale
            layer = name.removesuffix(".weight")
            scaled[f"{layer}.{scale_name}"] = scale.flatten() if number % 2 else scale
            scaled[f"{layer}.scale_input"] = torch.tensor(1.0)
    save_file(scaled, tmp_path / "scaled.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    made, expected = (
        final_latents(
            load(Checkpoint(tmp_path / f"{name}.safetensors", sd)),
            [REQUEST],
        )["k"]
        for name in ("scaled", "plain")
    )
    assert torch.equal(made, expected)


LACKS = "lacks weights that"
CUT = [
    (r"model\.diffusion_model\.middle_block\.0\.in_layers\.2\.weight", {}, LACKS),
    (r"text_model\.final_layer_norm\.bias", {}, LACKS),
    (r"decoder\.conv_in\.weight", {}, LACKS),
    ("^first_stage", {}, "holds no vae of its config's architecture; name one with `vae:`"),
    ("^cond_stage", {}, "holds no text_encoder of its config's architecture; give the whole checkpoint"),
    (r"^model\.", {"model_ema.diffusion_modelout0weight": torch.ones(1)}, "only the averages of training"),
    ("nothing", {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(32, 9, 3, 3)}, "9 channels .* inpainting"),
    ("nothing", {"model.diffusion_model.extra.weight": torch.ones(1)}, "no part .* reads: model.diffusion_model.extra"),
    ("nothing", {"first_stage_model.decoder.up.9.block.0.norm1.bias": torch.ones(1)}, r"no part .* reads: .*up\.9"),
    ("nothing", {"something.else": torch.ones(1)}, r"reads: something\.else\. Give as its config"),
    ("nothing", {"conditioner.embedders.0.model.ln_final.bias": torch.ones(1)}, "an SDXL refiner"),
    ("nothing", {"control_model.zero_convs.0.0.bias": torch.ones(1)}, "a ControlNet"),
    ("nothing", {"model.diffusion_model.double_blocks.0.img_mod.lin.weight": torch.ones(1)}, "is a FLUX.1, and its config"),
    ("nothing", {"cond_stage_model.transformer.text_model.final_layer_norm.weight": torch.ones(1, dtype=torch.int8)},
     "quantized as int8"),
    ("nothing", {"model.diffusion_model.out.2.weight_scale": torch.ones(3)}, "weight_scale is no scale for"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(sd, tmp_path_factory.mktemp("whole") / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("without", "more", "complaint"), CUT)
def test_a_file_that_lacks_weights_or_has_others_is_refused_by_name(
    whole: Path, sd: Path, tmp_path: Path, without: str, more: Mapping[str, Tensor], complaint: str
) -> None:
    file = change(Path(shutil.copy(whole, tmp_path)), more, without=without)
    with pytest.raises(ValueError, match=f"base model model: .*model.safetensors: .*{complaint}"):
        Engine.load(Checkpoint(file, sd), ONE_AT_A_TIME)


@pytest.mark.slow
def test_what_is_known_to_be_unused_is_left_out(whole: Path, sd: Path, tmp_path: Path) -> None:
    unused = ("model_ema.decay", "alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_mean_coef1", "logvar",
              "log_one_minus_alphas_cumprod", "betas", "first_stage_model.loss.logvar", "denoiser.sigmas",
              "cond_stage_model.transformer.text_model.embeddings.position_ids", "cond_stage_model.logit_scale")  # fmt: skip
    file = change(Path(shutil.copy(whole, tmp_path)), {name: torch.ones(1) for name in unused})
    old = {name.replace("transformer.text_model.", "transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(old, file)
    made = final_latents(load(Checkpoint(file, sd)), [REQUEST])
    assert torch.equal(made["k"], final_latents(load(sd), [REQUEST])["k"])


@pytest.mark.slow
def test_the_catalogs_vae_takes_the_place_of_one_that_is_missing(whole: Path, sd: Path, tmp_path: Path) -> None:
    file = change(Path(shutil.copy(whole, tmp_path)), {}, without="^first_stage")
    pieces = load_file(whole).items()
    vae = {
        name.removeprefix("first_stage_model."): one for name, one in pieces if name.startswith("first_stage_model.")
    }
    save_file(vae, tmp_path / "vae.safetensors")
    folder = Path(shutil.copytree(sd, tmp_path / "folder", ignore=shutil.ignore_patterns("vae")))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vae": [None, None]}))
    with pytest.raises(ValueError, match="folder: has no vae; name one with `vae:`"):
        Engine.load(folder, ONE_AT_A_TIME)
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        expected = finish(engine, [REQUEST])["k"].image
    for source in (
        Checkpoint(file, sd, vae=sd),
        Checkpoint(file, sd, vae=tmp_path / "vae.safetensors"),
        Checkpoint(folder, vae=sd / "vae"),
    ):
        with Engine.load(source, ONE_AT_A_TIME) as engine:
            assert (finish(engine, [REQUEST])["k"].image == expected).all()  # pyright: ignore
    for vae_path, complaint in (
        (tmp_path / "no.safetensors", "no such"),
        (tmp_path, "no config.json"),
        (file, "is not of"),
    ):
        with pytest.raises((OSError, ValueError), match=f"vae: .*{complaint}"):
            Engine.load(Checkpoint(sd, vae=vae_path), ONE_AT_A_TIME)


@pytest.mark.slow
def test_a_folder_of_fp16_files_alone_is_taken_and_one_of_bin_files_refused(sd: Path, tmp_path: Path) -> None:
    open_pipeline(sd).to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    expected = DiffusersReference(sd).latents(REQUEST)
    made = final_latents(load(tmp_path / "half"), [REQUEST])["k"]
    assert (made - expected).abs().max() < 0.01 * expected.abs().max()
    open_pipeline(sd).save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(FileNotFoundError, match=r"pickled/unet: holds no .safetensors file; .* convert them"):
        Engine.load(tmp_path / "pickled", ONE_AT_A_TIME)


@pytest.mark.slow
def test_an_sdxl_folder_without_its_first_encoder_is_refused(sdxl: Path, tmp_path: Path) -> None:
    pipeline = open_pipeline(sdxl)
    pipeline.text_encoder = pipeline.tokenizer = None
    pipeline.save_pretrained(tmp_path / "refiner")
    with pytest.raises(ValueError, match=r"has no text_encoder, no tokenizer \(an SDXL refiner"):
        Engine.load(tmp_path / "refiner", ONE_AT_A_TIME)


EARLY = {"_class_name": "DDIMScheduler", **tiny_models.TRAINING, "set_alpha_to_one": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "scheduler", "steps_offset"), [("sd", EARLY, 1), ("sdxl", {**EARLY, "clip_sample": False}, 0)]
)
def test_what_the_pipeline_corrects_in_a_scheduler_is_kept(
    family: str, scheduler: Mapping[str, Any], steps_offset: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Early checkpoints name neither `steps_offset` nor `clip_sample`, whose defaults SD's pipeline overrules."""
    folder = Path(shutil.copytree(request.getfixturevalue(family), tmp_path / "early"))
    written = folder / "scheduler" / "scheduler_config.json"
    written.write_text(json.dumps(scheduler))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "DDIMScheduler"]}))
    one, reference = replace(REQUEST, steps=4), DiffusersReference(folder)
    assert reference.pipeline.scheduler.config.steps_offset == steps_offset
    expected = reference.latents(one)
    for sampler in ("", "ddim"):
        model = load(Checkpoint(folder, sampler=sampler))
        assert (final_latents(model, [one])["k"] - expected).abs().max() < TOLERANCE * expected.abs().max()
    if family == "sdxl":
        written.write_text(json.dumps(EARLY))
        with pytest.raises(ValueError, match=r"base model m: .*clip_sample and thresholding must be off"):
            load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_clip_skip_is_that_of_the_pipeline(family: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(family)
    reference = DiffusersReference(folder)
    # diffusers 0.42 asks SD's encoder for `text_model`, which transformers 5 no longer puts between
    if family == "sd":
        object.__setattr__(reference.pipeline.text_encoder, "text_model", reference.pipeline.text_encoder)
    plain, call = reference.latents(REQUEST), type(reference.pipeline).__call__
    for clip_skip in (1, 2):
        model = load(Checkpoint(folder, clip_skip=clip_skip))
        expected = call(
            reference.pipeline, REQUEST.prompt, negative_prompt=REQUEST.negative_prompt, clip_skip=clip_skip,
            generator=torch.Generator().manual_seed(REQUEST.seed), num_inference_steps=REQUEST.steps,
            guidance_scale=REQUEST.guidance, width=64, height=64, output_type="latent",
        ).images[0]  # fmt: skip
        assert (expected - plain).abs().max() > 100 * TOLERANCE
        assert (final_latents(model, [REQUEST])["k"] - expected).abs().max() < TOLERANCE
    with pytest.raises(ValueError, match=r"base model m: clip_skip: must be 0 to 2 .* not 3"):
        load(Checkpoint(folder, clip_skip=3))


@pytest.mark.slow
def test_tokens_of_several_vectors_are_those_of_the_pipeline(sd: Path, tmp_path: Path) -> None:
    pipeline = open_pipeline(sd)
    pipeline.load_textual_inversion(torch.randn(3, 32, generator=torch.Generator().manual_seed(0)), token="<cat>")
    pipeline.save_pretrained(tmp_path / "baked")
    one = replace(REQUEST, prompt="a <cat> b", negative_prompt="<cat>")
    made = final_latents(load(tmp_path / "baked"), [one])["k"]
    expected = DiffusersReference(tmp_path / "baked").latents(one)
    assert (made - expected).abs().max() < TOLERANCE


@pytest.mark.slow
def test_a_file_of_another_architecture_is_refused(sd: Path, sd2: Path, tmp_path: Path) -> None:
    file = write_original(sd2, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: is not of the architecture at"):
        Engine.load(Checkpoint(file, sd), ONE_AT_A_TIME)


def test_what_is_no_stable_diffusion_is_refused_by_name(sd: Path, tmp_path: Path) -> None:
    folder = copy_config(sd, tmp_path / "sd3")
    name = "StableDiffusion3Pipeline"
    (folder / "model_index.json").write_text(f'{{"_class_name": "{name}", "transformer": ["diffusers", "X"]}}')
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        Engine.load(folder, ONE_AT_A_TIME)
    with pytest.raises(FileNotFoundError, match=r"model.ckpt: no such safetensors"):
        Engine.load(Checkpoint(tmp_path / "model.ckpt", sd), ONE_AT_A_TIME)
