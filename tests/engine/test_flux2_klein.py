"""FLUX.2 klein draws what diffusers' own pipeline draws, from a folder and from a file, alone and in any company."""

import random
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_app.domain.errors import FailureCode
from serve_app.engine import AdapterFile, Checkpoint, Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.autoencoder import begun
from serve_app.engine.run import Run
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32, ONE_AT_A_TIME
from tests.engine.diffusers_reference import PeftReference
from tests.engine.original_checkpoint import copy_config
from tests.engine.run_engine import final_latents, finish, start
from tests.engine.tiny_flux2_klein import BLOCK_LINEARS, original_weights, tiny_vae, write_flux2_klein
from tests.engine.tiny_models import diffusers, transformers
from tests.engine.tiny_z_image import write_z_image

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
OPTIONS = replace(EXACT_FLOAT32, max_rows=6, adapter_slots=10)
EVERY_LINEAR = (
    *BLOCK_LINEARS, "x_embedder", "context_embedder", "linear_1", "linear_2", "modulation_img.linear",
    "modulation_txt.linear", "stream_modulation.linear", "norm_out.linear", "proj_out",
)  # fmt: skip
REQUEST = RunRequest(run_id="r", prompt="a red cat", seed=3, steps=2, guidance=1.0, width=64, height=64)
WORDS = "a red cat sits on an old wall in the rain and looks at the lights of the town below"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, which is guided."""
    return write_flux2_klein(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distilled model, which has no guidance, of another shape."""
    return write_flux2_klein(tmp_path_factory.mktemp("models") / "distilled", distilled=True, heads=3, blocks=2, seed=1)


class Reference(PeftReference):
    """diffusers' pipeline with a negative prompt, which it takes encoded alone, and latents of its own shape."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.caption = cache(lambda prompt: self.pipeline.encode_prompt(prompt)[0])

    def scale(self, scale: float) -> None:
        super().scale(scale)
        self.caption.cache_clear()

    def _call(self, request: RunRequest, output: str) -> Any:
        self.trace: list[Tensor] = []
        sides = [-(-side // 16) * 16 for side in (request.height, request.width)]

        def keep(_pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            self.trace.append(tensors["latents"][0].T.unflatten(1, [side // 16 for side in sides]).clone())
            return tensors

        negative = self.caption(request.negative_prompt) if request.guidance > 1 else None
        return self.pipeline(
            image=None if request.image is None else Image.fromarray(request.image),
            prompt_embeds=self.caption(request.prompt),
            negative_prompt_embeds=negative,
            generator=torch.Generator().manual_seed(request.seed),
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            height=sides[0],
            width=sides[1],
            output_type=output,
            callback_on_step_end=keep,
        ).images

    def latents(self, request: RunRequest) -> Tensor:
        self._call(request, "latent")
        return self.trace[-1]


def noise(height: int, width: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (height, width, 3), np.uint8)


def seen(one: RunRequest) -> RunRequest:
    """Return a request with its picture as the engine takes it; diffusers' pipeline takes the picture itself."""
    if one.image is None:
        return one
    return replace(one, image=begun(Image.fromarray(one.image), None, one.width, one.height, is_seen=True)[0])


CASES = [
    replace(REQUEST, run_id="plain"),
    replace(REQUEST, run_id="guided", guidance=4.0, negative_prompt="dull", steps=4),
    replace(REQUEST, run_id="wide", width=96, prompt=WORDS, seed=5),
    replace(REQUEST, run_id="wide guided", width=96, guidance=2.5),
    replace(REQUEST, run_id="odd", width=72, height=60, prompt=WORDS * 8, guidance=3.0),
    replace(REQUEST, run_id="odd plain", width=72, height=60, prompt=""),
    replace(REQUEST, run_id="looking", guidance=4.0, image=noise(64, 64)),
    replace(REQUEST, run_id="looking at another shape", width=96, image=noise(100, 230)),
    replace(REQUEST, run_id="looking at a large one", steps=1, image=noise(1100, 1300)),
]


@pytest.mark.parametrize("name", ["base", "distilled"])
def test_prompts_steps_and_pixels_are_those_of_diffusers(name: str, request: pytest.FixtureRequest) -> None:
    """One prompt is longer than 512 tokens; the distilled model ignores guidance."""
    folder: Path = request.getfixturevalue(name)
    reference, model = Reference(folder), BaseModel.load("m", folder, ONE_AT_A_TIME, lambda: None)
    family: Any = model.family
    decoded: list[Tensor] = []
    for vae in (family.vae, reference.pipeline.vae):
        vae.decoder.register_forward_hook(lambda _module, _inputs, output: decoded.append(output))
    for one in CASES if name == "base" else CASES[1:3]:
        encoded = family.encode(seen(one), "")
        prompts = [one.negative_prompt, one.prompt][0 if name == "base" and one.guidance > 1 else 1 :]
        expected = torch.cat([reference.caption(prompt) for prompt in prompts])
        assert encoded.context.shape == expected.shape == (len(prompts), 512, 48)
        assert (encoded.context - expected).abs().max() < TOLERANCE
        run, steps = start(model, seen(one)), list[Tensor]()
        while not run.is_done:
            model.runner.denoise([run])
            steps.append(run.latents)
        image, expected = model.decode(run), reference.image(one)
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


def test_prompts_and_guidance_change_what_is_drawn(base: Path) -> None:
    """This guards the test before: with weights too small, a caption would change nothing that it could see.

    A picture is seen in its own shape: stretched to another, it draws something else.
    """
    model = BaseModel.load("m", base, ONE_AT_A_TIME, lambda: None)
    others = [replace(REQUEST, prompt=WORDS), replace(REQUEST, guidance=4.0), replace(REQUEST, steps=4)]
    plain, *made = (final_latents(model, [one])["r"] for one in (REQUEST, *others))
    changes = [float((each - plain).abs().max()) for each in made]
    assert min(changes) > 100 * TOLERANCE, changes
    picture = noise(48, 192)
    stretched = np.asarray(Image.fromarray(picture).resize((64, 64), Image.Resampling.LANCZOS))
    shapes = [final_latents(model, [replace(REQUEST, image=each)])["r"] for each in (picture, stretched)]
    assert (shapes[0] - shapes[1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_adapters_act_as_in_peft(part: str, base: Path, tmp_path: Path) -> None:
    targets = EVERY_LINEAR if part == "transformer" else ("none",)
    text = part == "text_encoder"
    tensors = tiny_models.random_lora(base, rank=4, seed=1, targets=targets, denoiser="transformer", text=text)
    adapter = tiny_models.write_adapter(tmp_path / "lora.safetensors", tensors)
    negated = {name: -each if "lora_B" in name else each for name, each in tensors.items()}
    other = tiny_models.write_adapter(tmp_path / "other.safetensors", negated)
    model, reference = BaseModel.load("m", base, ONE_AT_A_TIME, lambda: None), Reference(base)
    one = replace(REQUEST, prompt=WORDS, guidance=1.0 if text else 3.0)
    plain = reference.latents(one)
    reference.adapt(tensors)
    made = plain
    for scale in (0.0, 0.5, 1.0, -0.5):
        made = final_latents(model, [replace(one, adapter=adapter, scale=scale)])["r"]
        reference.scale(scale)
        expected = reference.latents(one)
        assert (made - expected).abs().max() < TOLERANCE
        assert bool(scale) == bool((expected - plain).abs().max() > 100 * TOLERANCE)
    assert not torch.equal(final_latents(model, [replace(one, adapter=other, scale=-0.5)])["r"], made)


FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "scaled fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize(("form", "prefix"), [*zip(FORMS, ("", "", "model.diffusion_model."), strict=True)])
def test_a_file_makes_the_latents_of_its_folder(form: str, prefix: str, base: Path, tmp_path: Path) -> None:
    """The folder's weights are rounded as the file's first."""
    scale = 2**-9 if form == "scaled fp8" else 1.0
    folder = Path(shutil.copytree(base, tmp_path / "folder"))
    whole = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = {name: (weight / scale).to(FORMS[form]).float() * scale for name, weight in load_file(whole).items()}
    save_file(weights, whole)
    tensors = {name: (weight / scale).to(FORMS[form]) for name, weight in original_weights(folder, prefix).items()}
    if form == "scaled fp8":
        named = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
        tensors |= {f"{name}.scale_weight": torch.tensor(scale) for name in named}
        tensors |= {name: tensor.float() * scale for name, tensor in tensors.items() if name.endswith("norm.scale")}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    requests = [replace(REQUEST, guidance=2.0)]
    expected = final_latents(BaseModel.load("m", folder, ONE_AT_A_TIME, lambda: None), requests)
    config = copy_config(base, tmp_path / "config")
    vae, encoder, tokenizer = (base / part for part in ("vae", "text_encoder", "tokenizer"))
    made = final_latents(
        BaseModel.load(
            "m",
            Checkpoint(file, config, vae=vae, text_encoder=encoder, tokenizer=tokenizer),
            ONE_AT_A_TIME,
            lambda: None,
        ),
        requests,
    )
    for key, latents in expected.items():
        assert torch.equal(made[key], latents), key


def test_parts_that_do_not_fit_are_refused_by_name(base: Path, distilled: Path, sd: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(original_weights(base), file)
    z_image = write_z_image(tmp_path / "z_image")
    short = {
        **transformers.Qwen3Config.from_pretrained(base / "text_encoder").to_dict(),
        "num_hidden_layers": 26,
        "layer_types": None,
    }
    shorter = Path(shutil.copytree(base, tmp_path / "encoder"))
    shutil.rmtree(shorter / "text_encoder")
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(short)).save_pretrained(shorter / "text_encoder")
    plain_vae = Path(shutil.copytree(base, tmp_path / "vae"))
    shutil.rmtree(plain_vae / "vae")
    config = {name: value for name, value in dict(tiny_vae().config).items() if not name.startswith("batch_norm")}
    diffusers.AutoencoderKL.from_config(config).save_pretrained(plain_vae / "vae")
    cases: list[tuple[Path | Checkpoint, str]] = [
        (Checkpoint(base, vae=sd), "takes 8 channels and the VAE makes 4: name .* `vae:`"),
        (Checkpoint(base, vae=plain_vae), "the VAE is not FLUX.2's"),
        (Checkpoint(base, vae=file), "vae: .*describes, since AutoencoderKLFlux2 is read from folders alone"),
        (shorter, "has 26 layers, and the transformer reads 27: .* `text_encoder:`"),
        (Checkpoint(base, text_encoder=z_image), "text_encoder: .*is not of the architecture at"),
        (Checkpoint(base, tokenizer=sd), "no chat template, .* `tokenizer:`"),
        (Checkpoint(file, distilled), "lacks weights that the architecture of its config has: transformer_blocks.1"),
        (Checkpoint(file, sd), "is a FLUX.2, and its config a Stable Diffusion; .* folder of FLUX.2"),
        (Checkpoint(file, z_image), "no part of its architecture reads"),
        (Checkpoint(base, clip_skip=1), "clip_skip"),
    ]
    for source, message in cases:
        with pytest.raises((ValueError, OSError), match=message):
            BaseModel.load("m", source, EXACT_FLOAT32, lambda: None)
    for spoilt, message in (
        ({"single_blocks.9.linear1.weight": torch.ones(3, 2)}, "no part of its architecture reads: single_blocks.9"),
        ({"double_blocks.0.img_attn.qkv.weight": torch.ones(3, 2)}, "attn.to_q.weight is 1 × 2 instead of 32 × 32"),
        ({"single_blocks.0.linear3.weight": torch.ones(3, 2)}, "no part of its architecture reads: single_blocks.0"),
        ({"guidance_in.in_layer.weight": torch.ones(3, 2)}, "no part of its architecture reads: guidance_in"),
        ({"double_blocks.0.img_mod.lin.weight": torch.ones(3, 2)}, "is a FLUX.1, for which there is no family"),
        ({"txt_in.weight": None}, "lacks weights .* context_embedder"),
        ({"transformer_blocks.0.attn.to_q.weight": torch.ones(2, 2)}, "has diffusers' names"),
    ):
        tensors = {**original_weights(base), **spoilt}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            BaseModel.load("m", Checkpoint(file, base), EXACT_FLOAT32, lambda: None)


@pytest.fixture(scope="module")
def loras(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    """Double blocks alone, every linear, and the text encoder too, of ranks in three buckets."""
    into = tmp_path_factory.mktemp("adapters")
    kinds = (
        (4, ("to_q", "to_k", "to_v"), False),
        (20, EVERY_LINEAR, False),
        (6, ("to_qkv_mlp_proj",), True),
        (12, ("context_embedder",), False),
    )
    return [
        tiny_models.write_lora(
            into / f"{i}.safetensors", base, rank=rank, seed=i, targets=targets, denoiser="transformer", text=text,
            size=0.1,
        )
        for i, (rank, targets, text) in enumerate(kinds)
    ]  # fmt: skip


def mixed(count: int, loras: list[AdapterFile], chance: random.Random, size: tuple[int, int]) -> list[RunRequest]:
    """Return runs of one size, with and without guidance and adapters."""
    return [
        RunRequest(
            run_id=f"{i}", prompt=(WORDS * 6)[: chance.choice((9, 90, 480))], seed=chance.randrange(2**32),
            negative_prompt=WORDS[: chance.choice((0, 0, 5))], adapter=chance.choice([*loras, None]),
            scale=chance.choice((0.3, 1.0, -0.5)), steps=chance.randint(2, 3), guidance=chance.choice((1.0, 3.5, 5.0)),
            width=size[0], height=size[1],
        )
        for i in range(count)
    ]  # fmt: skip


@torch.inference_mode()
def joining(model: BaseModel, requests: list[RunRequest]) -> dict[str, Tensor]:
    """Return the final latents of runs of which one joins before each step, by run id."""
    waiting, live, made = list(requests), list[Run](), dict[str, Tensor]()
    while waiting or live:
        live += [start(model, waiting.pop(0))] if waiting else []
        model.runner.denoise(live)
        for run in [run for run in live if run.is_done]:
            live.remove(run)
            model.pool.release(run.slot)
            made[run.request.run_id] = run.latents
    return made


@pytest.mark.parametrize("size", [(64, 64), (80, 60), (32, 64)], ids=str)
def test_mixed_runs_have_the_bits_that_they_have_alone(
    size: tuple[int, int], base: Path, loras: list[AdapterFile]
) -> None:
    """Those of the last size look at an image, each at its own, which has as many tokens in another shape."""
    requests = mixed(5, loras, random.Random(sum(size)), size)
    if size == (32, 64):
        shapes = [(64, 32), (32, 64), (16, 128)]
        requests = [replace(one, image=noise(*shapes[i % 3])) for i, one in enumerate(requests)]
    model = BaseModel.load("m", base, OPTIONS, lambda: None)
    together = joining(model, requests)
    for one in requests:
        assert torch.equal(together[one.run_id], final_latents(model, [one])[one.run_id]), one


def test_it_serves_beside_another_family_and_refuses_its_samplers(distilled: Path, sd: Path) -> None:
    one = replace(REQUEST, base_model="klein", guidance=4.0)
    with Engine.load({"klein": distilled, "sd": sd}, ONE_AT_A_TIME) as engine:
        made = finish(engine, [one, replace(one, run_id="sd", base_model="sd")])
        failure = finish(engine, [replace(one, sampler="ddim")])["r"].failure
        flow = finish(engine, [replace(one, run_id="flow", sampler="flow-euler", guidance=1.0)])["flow"]
    assert failure is not None
    assert failure.code is FailureCode.GENERATION_FAILED
    assert "ddim" in failure.message
    assert np.array_equal(np.asarray(flow.image), np.asarray(made["r"].image))
