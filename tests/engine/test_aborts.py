"""Another thread aborts runs in the middle of a step: slots are freed, and no result is returned.

The hooks call `abort` from inside the networks, where another thread's call would come.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.families.unet import UNetFamily
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import finish

pytestmark = pytest.mark.slow

SHORT = RunRequest(run_id="short", prompt="a cat", steps=3, width=64, height=64)


@pytest.fixture
def engine(sd: Path) -> Iterator[Engine]:
    """Load an engine of one adapter slot: a slot that is not freed is missed at once."""
    with Engine.load(sd, replace(EXACT_FLOAT32, adapter_slots=1, exact=False)) as engine:
        yield engine


@contextmanager
def before_forward(module: nn.Module, call: Callable[[], object]) -> Generator[None]:
    hook = module.register_forward_pre_hook(lambda *_: (call(), None)[1])
    try:
        yield
    finally:
        hook.remove()


def component(engine: Engine, name: str) -> nn.Module:
    (model,) = engine.base_models.values()
    return model.family.components[name].module


def aborts_then(engine: Engine, error: Exception | None = None) -> Callable[[], None]:
    def call() -> None:
        engine.abort("short")
        if error is not None:
            raise error

    return call


@pytest.mark.parametrize(("part", "error"), [
    ("text_encoder", None), ("text_encoder", RuntimeError("not today")), ("unet", RuntimeError("not today")),
], ids=["encoding succeeds", "encoding fails", "a step fails"])  # fmt: skip
def test_an_abort_while_a_part_computes(
    engine: Engine, loras: list[AdapterFile], part: str, error: Exception | None
) -> None:
    with before_forward(component(engine, part), aborts_then(engine, error)):
        assert finish(engine, [replace(SHORT, adapter=loras[0])]) == {}
    after = finish(engine, [replace(SHORT, adapter=loras[1])])
    assert after["short"].image is not None


@pytest.mark.parametrize("done", [1, 2], ids=["the second", "the last"])
def test_an_abort_during_a_step(engine: Engine, loras: list[AdapterFile], done: int) -> None:
    def abort_in_step() -> None:
        if engine.progress().get("short") == (done, 3):
            engine.abort("short")

    with before_forward(component(engine, "unet"), abort_in_step):
        assert finish(engine, [replace(SHORT, adapter=loras[0])]) == {}
    after = finish(engine, [replace(SHORT, adapter=loras[1])])
    assert after["short"].image is not None


def test_an_abort_while_the_image_is_decoded(engine: Engine) -> None:
    (model,) = engine.base_models.values()
    assert isinstance(model.family, UNetFamily)
    aborted: list[bool] = []
    with before_forward(model.family.vae.decoder, lambda: aborted.append(engine.abort("short"))):
        assert finish(engine, [SHORT]) == {}
    assert aborted == [True]
