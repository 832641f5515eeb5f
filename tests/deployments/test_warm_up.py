"""A generator replica is ready once it has drawn an image, and then warms up for the sizes on offer, as its args allow."""

import re
import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from deployments.args import GeneratorArgs
from serve_app.api.variant_a import Side
from serve_app.domain.catalog import BaseModel
from serve_app.engine import Engine, EngineOptions, RunRequest
from serve_app.engine import engine as engine_module
from serve_app.engine.families.outlines import outlined_table
from serve_app.loras.weights import LAYER_TABLES
from serve_app.worker.executor import Pixels
from serve_app.worker.generation import SIZES, GenerationExecutor, keep_layer_tables, load_engine, warm_up
from tests.composition import Resources
from tests.support import POCKET


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, threads=1)) as engine:
        yield engine


def finish(warming: Iterator[None]) -> None:
    for _ in warming:
        pass


def passes(engine: Engine) -> list[tuple[int, int]]:
    """A list that is filled with the latent height and width of every forward pass from now on."""
    seen: list[tuple[int, int]] = []
    (model,) = engine.base_models.values()
    model.denoiser.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[2:])))
    return seen


def test_the_sizes_are_those_of_the_interfaces() -> None:
    sides = typing.get_args(Side)
    assert set(SIZES) == {(width, height) for width in sides for height in sides}


def test_a_cpu_prepares_for_the_smallest_size_alone(engine: Engine) -> None:
    seen = passes(engine)
    finish(warm_up(engine, None))
    assert len(set(seen)) == 1
    seen.clear()
    engine.generate("a cat", steps=1)
    assert len(seen) == 1, "the first image waited for something else than its step"


@pytest.mark.parametrize(("seconds", "sizes"), [(0, 0), (600, 4)])
def test_the_operator_may_say_how_long(engine: Engine, seconds: float, sizes: int) -> None:
    seen = passes(engine)
    finish(warm_up(engine, timedelta(seconds=seconds)))
    assert len(set(seen)) == sizes


def test_a_replica_makes_the_layer_tables_that_uploads_are_checked_against(tmp_path: Path) -> None:
    known, unknown = BaseModel(id="pocket", source=str(POCKET)), BaseModel(id="none", source=str(tmp_path / "none"))
    keep_layer_tables([unknown, known], tmp_path)
    (table,) = (tmp_path / LAYER_TABLES).iterdir()
    assert outlined_table(POCKET, table.parent).denoiser == "unet"


def test_a_size_that_does_not_fit_does_not_keep_the_replica_from_starting(engine: Engine) -> None:
    def refuse_wide(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[3] > inputs[0].shape[2]:
            raise torch.OutOfMemoryError("out of memory")

    seen = passes(engine)
    (model,) = engine.base_models.values()
    model.denoiser.register_forward_pre_hook(refuse_wide)
    finish(warm_up(engine, timedelta(minutes=10)))
    assert len(set(seen)) == 4


def test_a_replica_that_can_draw_no_image_does_not_start(engine: Engine) -> None:
    """So that a cluster without any that can does not take the place of another."""

    def refuse(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("out of memory")

    (model,) = engine.base_models.values()
    model.denoiser.register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError):
        engine.try_out(*SIZES[0])


async def test_a_start_tells_how_long_measuring_will_take_unless_that_is_known(
    resources: Resources, tmp_path: Path
) -> None:
    base_models = await resources.applied_catalog.base_models()
    told: list[list[str]] = []
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        said: list[str] = []
        told.append(said)
        with load_engine(
            base_models, EngineOptions(max_rows=2), threads=1, findings=tmp_path / "found", tell=said.append
        ) as engine:
            seen = passes(engine)
            finish(warm_up(engine, None))
            engine.generate("a cat", steps=1)
    first, second = told
    assert re.fullmatch(
        r"loaded pocket: 2\d\.\d MB in \d+ s; jobs of 512x512 wait until exact shapes are measured, once for this machine: "
        r"pocket about \d+ s",
        first[-1],
    )
    assert re.fullmatch(r"loaded pocket: 2\d\.\d MB in \d+ s", second[-1])
    assert len(seen) == 1, "what was measured is kept"


async def test_a_job_that_comes_while_a_replica_warms_up_waits_for_its_own_shape_alone(
    engine: Engine, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those of a replica that had finished, and the other shape is measured to its end."""
    monkeypatch.setattr(engine_module, "MEASURING_S", 0.0)
    executor = GenerationExecutor(engine, resources.catalog, resources.weights, resources.images, warm_up(engine, None))
    seen = passes(engine)
    assert executor.step() == ()
    small = seen.pop()
    assert not seen, "one pass is a step"
    engine.add(RunRequest(run_id="wide", prompt="a cat", steps=2, width=768, height=512))
    image = iterate(executor, "wide")
    assert small not in seen
    while executor.has_work:
        executor.step()
    assert small in seen
    engine.add(RunRequest(run_id="again", prompt="a cat", steps=2, width=768, height=512))
    assert np.array_equal(image, iterate(executor, "again"))


def iterate(executor: GenerationExecutor, run_id: str) -> Pixels:
    """Step until a run has ended; return its image."""
    while True:
        for ended in executor.step():
            assert ended.run_id == run_id
            assert ended.image is not None, ended.failure
            return ended.image


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValidationError, match="warm_up_s"):
        GeneratorArgs(warm_up_s=-1)
