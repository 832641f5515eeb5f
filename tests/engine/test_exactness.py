"""C9: the same seed gives the same bytes alone, in any company, in any row, on any engine of the same machine."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.base_model import BaseModel
from tests.engine import tiny
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.rig import finish, start

JOBS = 200
SIZES = ((64, 64), (96, 64))


@pytest.fixture(scope="module")
def files(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    """Ranks that fall in different buckets, with and without convolutions and text encoders."""
    into = tmp_path_factory.mktemp("adapters")
    shapes = [
        (4, tiny.ATTENTION, False),
        (16, tiny.EVERYTHING, False),
        (24, tiny.ATTENTION, True),
        (40, tiny.EVERYTHING, True),
    ]
    return [
        tiny.write_adapter(
            into / f"{rank}.safetensors",
            tiny.random_lora(sd, rank=rank, seed=rank, targets=targets, text=text, size=0.05),
        )
        for rank, targets, text in shapes
    ]


def random_request(chance: random.Random, key: str, files: list[AdapterFile]) -> RunRequest:
    width, height = chance.choice(SIZES)
    return RunRequest(
        key=key,
        prompt=" ".join(chance.choices(["red", "cat", "on", "a", "mat"], k=chance.choice([1, 3, 12]))),
        negative_prompt=chance.choice(["", "dull"]),
        adapter=chance.choice([None, *files]),
        weight=chance.choice([0.1, 0.75, 1.0, 2.0]),
        seed=chance.getrandbits(64),
        steps=chance.randint(1, 5),
        guidance=chance.choice([1.0, 4.0, 7.5]),
        width=width,
        height=height,
        sampler=chance.choice([None, "euler", "ddim", "dpm++2m", "lcm"]),
    )


def digest(image: object) -> str:
    return hashlib.sha256(bytes(memoryview(image))).hexdigest()  # pyright: ignore[reportArgumentType]


@pytest.mark.timeout(600)  # four hundred images: seconds on idle cores
def test_two_hundred_runs_keep_their_bytes_in_random_company(sd: Path, files: list[AdapterFile]) -> None:
    chance = random.Random(9)
    requests = [random_request(chance, f"{i}", files) for i in range(JOBS)]
    crowd: dict[str, str] = {}
    waiting = list(requests)
    with Engine.load(sd, EXACT_FLOAT32) as engine:
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 3))):
                engine.add(waiting.pop())  # joins between two steps of the others
            crowd |= {one.key: digest(one.image) for one in engine.step()}
    with Engine.load(sd, EXACT_FLOAT32) as engine:  # another replica, whose slots fill in another order
        alone = {request.key: digest(finish(engine, [request])[request.key].image) for request in requests}
    assert [key for key in alone if alone[key] != crowd[key]] == []


def depend_on_company(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
    """As a kernel that adds in another order when it is given more rows, only more."""
    return answer * (1 + inputs[0].shape[0] / 32)


def alone_and_in_company(engine: Engine, request: RunRequest) -> tuple[str, str]:
    company = [replace(request, key=f"{i}", seed=i) for i in range(3)]
    alone = digest(finish(engine, [request])[request.key].image)
    return alone, digest(finish(engine, [*company, request])[request.key].image)


def test_every_shape_is_measured(engine: Engine) -> None:
    def depend_when_tall(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: Any) -> Any:
        tall = inputs[0].shape[2] > inputs[0].shape[3]
        return (depend_on_company(net, inputs, answer[0]),) if tall else answer

    (model,) = engine.base_models.values()
    model.family.unet.register_forward_hook(depend_when_tall)
    request = RunRequest(key="k", prompt="a cat", steps=2, width=64, height=96)
    for side in (64, 96, 112, 128):
        finish(engine, [replace(request, width=side, height=side)])
    alone, crowd = alone_and_in_company(engine, request)
    assert alone == crowd


def test_layers_that_no_adapter_has_changed_yet_are_measured(engine: Engine, files: list[AdapterFile]) -> None:
    """A replica warms up before it knows any adapter."""
    (model,) = engine.base_models.values()
    layer = model.family.layers["unet"]["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"]

    def depend_with_adapter(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> Any:
        return depend_on_company(net, inputs, answer) if layer.rank else answer

    layer.register_forward_hook(depend_with_adapter)
    engine.warm_up(64, 64)
    alone, crowd = alone_and_in_company(
        engine, RunRequest(key="k", prompt="a cat", adapter=files[0], steps=2, width=64, height=64)
    )
    assert alone == crowd


def test_the_first_image_of_a_warm_size_waits_for_nothing_but_its_steps(engine: Engine) -> None:
    passes: list[int] = []
    (model,) = engine.base_models.values()
    model.family.unet.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[0]))
    engine.warm_up(64, 64)
    assert EXACT_FLOAT32.max_rows in passes
    passes.clear()
    finish(engine, [RunRequest(key="k", prompt="a cat", steps=3, width=64, height=64)])
    assert len(passes) == 3


def test_padding_is_to_a_measured_granule(sd: Path, files: list[AdapterFile]) -> None:
    model = BaseModel.load("m", sd, EXACT_FLOAT32, lambda: None)
    run = start(model, RunRequest(key="k", prompt="", adapter=files[0], steps=2, width=64, height=64))
    assert model.runner.exactness is not None
    assert model.runner.exactness.granule(run.key, run.conditioning) in (1, 2, 4, 8, EXACT_FLOAT32.max_rows)
