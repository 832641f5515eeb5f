"""The engine runs a diffusion transformer as it runs the UNets, and beside them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from serve_app.domain import families
from serve_app.domain.errors import FailureCode
from serve_app.domain.prompt_weights import literal
from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.clip_text import TextEncoder, encode_prompt
from serve_app.engine.families.registry import FAMILIES
from tests.engine import tiny_dit, tiny_models
from tests.engine.conftest import EXACT_FLOAT32, WIDE_FLOAT32
from tests.engine.run_engine import final_latents, finish
from tests.engine.tiny_models import diffusers, transformers

TOLERANCE = 1e-4
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "add_q_proj")
EVERY_LINEAR = (*ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out", "x_embedder", "norm1.linear")


@pytest.fixture(scope="module", params=[True, False], ids=["guidance as an input", "classifier-free guidance"])
def dit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dit.write_dit(tmp_path_factory.mktemp("models") / "dit", embeds_guidance=request.param)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = families.Family((tiny_dit.PIPELINE_CLASS,), families.Abilities(), [])
    monkeypatch.setitem(families.FAMILIES, "tiny", entry)
    monkeypatch.setitem(FAMILIES, "tiny", cast(Any, tiny_dit.TinyDiTFamily))


@pytest.fixture(scope="module")
def loras(dit: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    """Attention alone, every kind of linear, text encoder too; the last under kohya's names."""
    into = tmp_path_factory.mktemp("adapters")
    plain = tiny_models.random_lora(dit, rank=4, seed=1, targets=ATTENTION, denoiser="transformer", size=0.2)
    whole = tiny_models.random_lora(dit, rank=20, seed=2, targets=EVERY_LINEAR, denoiser="transformer", size=0.1)
    texts = tiny_models.random_lora(dit, rank=6, seed=3, targets=ATTENTION, denoiser="transformer", text=True, size=0.2)
    prefixes = {"transformer": "lora_transformer", "text_encoder": "lora_te1"}
    return [
        tiny_models.write_adapter(into / "plain.safetensors", plain),
        tiny_models.write_adapter(into / "whole.safetensors", whole),
        tiny_models.write_adapter(
            into / "texts.safetensors", tiny_models.kohya_names(texts, alpha=3.0, prefixes=prefixes)
        ),
    ]


def requests_over(loras: list[AdapterFile]) -> list[RunRequest]:
    """Return every adapter and none, at different scales, guidance, step counts and prompts."""
    return [
        RunRequest(run_id=f"{i}", prompt=f"a red cat {i}", negative_prompt="dull" if i % 2 else "", adapter=adapter,
                   scale=(0.3, 1.0, 0.75)[i % 3], seed=i, steps=2 + i % 3, guidance=(3.5, 1.0, 5.0)[i % 3], width=64,
                   height=64)
        for i, adapter in enumerate([*loras, None, *reversed(loras), None])
    ]  # fmt: skip


class StraightLoop:
    """Draws one image at a time with diffusers' own scheduler and adapters merged into the weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @torch.inference_mode()
    def latents(self, request: RunRequest) -> Tensor:
        transformer = diffusers.FluxTransformer2DModel.from_pretrained(self.folder / "transformer").eval()
        model = transformers.CLIPTextModelWithProjection.from_pretrained(self.folder / "text_encoder").eval()
        if isinstance(request.adapter, AdapterFile):
            self._merge(request.adapter.path, {"transformer": transformer, "text_encoder": model}, request.scale)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(self.folder / "tokenizer")
        encoder = TextEncoder(tokenizer, model, penultimate=False)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(self.folder / "scheduler")
        height, width = request.height // 8, request.width // 8
        scheduler.set_timesteps(
            sigmas=tiny_dit.noise_levels(request.steps), mu=tiny_dit.image_shift(height * width // 4)
        )
        noise = torch.randn((1, 4, height, width), generator=torch.Generator().manual_seed(request.seed))
        tokens = tiny_dit.pack(noise)
        for timestep in scheduler.timesteps:

            def velocity(prompt: str, timestep: Tensor = timestep, tokens: Tensor = tokens) -> Tensor:
                hidden, pooled = encode_prompt([encoder], literal(prompt))
                hidden[:, tiny_dit.token_count(encoder, prompt) :] = 0
                guidance = torch.tensor([request.guidance]) if transformer.config.guidance_embeds else None
                return transformer(
                    tokens,
                    encoder_hidden_states=hidden[:1],
                    pooled_projections=pooled,
                    timestep=timestep.view(1) / 1000,
                    guidance=guidance,
                    img_ids=tiny_dit.position_ids(height, width),
                    txt_ids=torch.zeros(hidden.shape[1], 3),
                ).sample

            output = velocity(request.prompt)
            if request.guidance > 1 and not transformer.config.guidance_embeds:
                negative = velocity(request.negative_prompt)
                output = negative + request.guidance * (output - negative)
            tokens = scheduler.step(output, timestep, tokens).prev_sample
        return tiny_dit.unpack(tokens, height, width)[0]

    def _merge(self, path: Path, models: dict[str, Any], scale: float) -> None:
        """Add scale · alpha / rank · up·down to every weight that the file names, whichever way it spells it."""
        tensors = load_file(path)
        for component, model in models.items():
            prefix = {"transformer": "lora_transformer", "text_encoder": "lora_te1"}[component]
            for name, module in model.named_modules():
                of_text = "text_model." if component == "text_encoder" else ""
                kohya = f"{prefix}_{of_text}{name.removeprefix('text_model.')}".replace(".", "_")
                down = tensors.get(f"{component}.{name}.lora_A.weight", tensors.get(f"{kohya}.lora_down.weight"))
                up = tensors.get(f"{component}.{name}.lora_B.weight", tensors.get(f"{kohya}.lora_up.weight"))
                if down is not None and up is not None:
                    alpha = float(tensors.get(f"{kohya}.alpha", torch.tensor(float(len(down)))))
                    module.weight.add_(up @ down * (scale * alpha / len(down)))


@pytest.mark.slow
def test_a_mixed_batch_makes_the_latents_of_a_straight_loop(dit: Path, loras: list[AdapterFile]) -> None:
    requests = requests_over(loras)
    model = BaseModel.load("m", dit, WIDE_FLOAT32, lambda: None)
    made = final_latents(model, requests)
    loop = StraightLoop(dit)
    for one in requests:
        assert (made[one.run_id] - loop.latents(one)).abs().max() < TOLERANCE, one


@pytest.mark.slow
def test_adapters_and_guidance_change_what_is_made(dit: Path, loras: list[AdapterFile]) -> None:
    """Guards the test above, which adapters without effect would pass."""
    model = BaseModel.load("m", dit, WIDE_FLOAT32, lambda: None)
    plain = RunRequest(run_id="plain", prompt="a cat", steps=3, guidance=3.0, width=64, height=64)
    others = [replace(plain, run_id=f"{i}", adapter=lora) for i, lora in enumerate(loras)]
    others += [replace(plain, run_id="guided", guidance=9.0), replace(plain, run_id="prompt", prompt="a dog")]
    made = final_latents(model, [plain, *others])
    for one in others:
        assert (made[one.run_id] - made["plain"]).abs().max() > 100 * TOLERANCE, one


@pytest.mark.slow
def test_runs_that_join_and_leave_at_any_step_keep_their_bytes(dit: Path, loras: list[AdapterFile]) -> None:
    chance = random.Random(4)
    requests = [
        replace(one, run_id=f"{i}-{one.run_id}", seed=chance.randrange(2**32), width=chance.choice((64, 96)))
        for i in range(5)
        for one in requests_over(loras)
    ]
    together: dict[str, Any] = {}
    waiting, aborted = list(requests), set[str]()
    with Engine.load(dit, EXACT_FLOAT32) as engine:
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                engine.add(waiting.pop())
            together |= {one.run_id: one.image for one in engine.step()}
            if chance.random() < 0.1 and engine.progress():
                leaving = chance.choice(sorted(engine.progress()))
                assert engine.abort(leaving)
                aborted.add(leaving)
    assert set(together) == {one.run_id for one in requests} - aborted
    assert aborted
    with Engine.load(dit, EXACT_FLOAT32) as engine:
        alone = {one.run_id: finish(engine, [one])[one.run_id].image for one in requests if one.run_id in together}
    assert [name for name, image in alone.items() if not np.array_equal(np.asarray(image), together[name])] == []


@pytest.mark.slow
def test_two_families_serve_side_by_side(dit: Path, sd: Path) -> None:
    request = RunRequest(run_id="dit", prompt="a cat", steps=3, width=64, height=64, base_model="dit")
    with Engine.load({"dit": dit, "sd": sd}, EXACT_FLOAT32) as engine:
        together = finish(engine, [request, replace(request, run_id="sd", base_model="sd")])
    for name, folder in (("dit", dit), ("sd", sd)):
        with Engine.load(folder, EXACT_FLOAT32) as engine:
            (alone,) = finish(engine, [replace(request, base_model="")]).values()
        assert np.array_equal(together[name].image, alone.image)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_sampler_of_another_family_fails_by_name(dit: Path, sd: Path) -> None:
    request = RunRequest(run_id="r", prompt="a cat", steps=3, width=64, height=64)
    for folder, sampler in ((dit, "ddim"), (sd, "flow-euler")):
        with Engine.load(folder, EXACT_FLOAT32) as engine:
            failure = finish(engine, [replace(request, sampler=sampler)])["r"].failure
        assert failure is not None
        assert failure.code is FailureCode.GENERATION_FAILED
        assert sampler in failure.message
    with pytest.raises(ValueError, match="flow-euler"):
        Engine.load(sd, replace(EXACT_FLOAT32, sampler="flow-euler"))
