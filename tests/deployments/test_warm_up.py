"""A generator replica warms up for the sizes on offer before its first job, as its args allow."""

import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from deployments.args import GeneratorArgs
from serve_app.api.variant_a.schemas import Side
from serve_app.domain.catalog import BaseModel
from serve_app.engine import Engine, EngineOptions
from serve_app.engine.adapters.layer_table import outlined_table
from serve_app.loras.weights import LAYER_TABLES
from serve_app.worker.generation import SIZES, keep_layer_tables, load_engine, warm_up
from tests.composition import Resources
from tests.support import POCKET


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, threads=1)) as engine:
        yield engine


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
    warm_up(engine, None)
    assert len(set(seen)) == 1
    seen.clear()
    engine.generate("a cat", steps=1)
    assert len(seen) == 1, "the first image waited for something else than its step"


@pytest.mark.parametrize(("seconds", "sizes"), [(0, 0), (600, 4)])
def test_the_operator_may_say_how_long(engine: Engine, seconds: float, sizes: int) -> None:
    seen = passes(engine)
    warm_up(engine, timedelta(seconds=seconds))
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
    warm_up(engine, timedelta(minutes=10))
    assert len(set(seen)) == 4


def test_a_replica_that_can_draw_no_image_does_not_start(engine: Engine) -> None:
    """So that a cluster without any that can does not take the place of another."""

    def refuse(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("out of memory")

    (model,) = engine.base_models.values()
    model.denoiser.register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError):
        warm_up(engine, None)


async def test_a_replica_warms_up_before_it_works(resources: Resources, tmp_path: Path) -> None:
    base_models = await resources.applied_catalog.base_models()
    engine = load_engine(base_models, EngineOptions(max_rows=2), threads=1, findings=tmp_path / "found")
    seen = passes(engine)
    engine.generate("a cat", steps=1)
    engine.close()
    assert len(seen) == 1
    assert len(list((tmp_path / "found").iterdir())) == 1, "what was measured is kept"


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ValidationError, match="warm_up_s"):
        GeneratorArgs(warm_up_s=-1)
