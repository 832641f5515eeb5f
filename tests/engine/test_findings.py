"""What a process measured about exactness serves the next one, on the same machine and under the same options alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import Engine, EngineOptions
from tests.engine.conftest import EXACT_FLOAT32

pytestmark = pytest.mark.slow

OPTIONS = replace(EXACT_FLOAT32, max_rows=4)


def passes_of_warm_up(sd: Path, folder: Path, options: EngineOptions = OPTIONS) -> list[int]:
    """Return the row counts that a new engine computes before its first image of a size, that of the image last."""
    with Engine.load(sd, options, findings=folder) as engine:
        passes: list[int] = []
        (model,) = engine.base_models.values()
        model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
        engine.warm_up(64, 64)
    return passes


def test_the_next_engine_measures_nothing(sd: Path, tmp_path: Path) -> None:
    assert len(passes_of_warm_up(sd, tmp_path)) > 1
    assert len(passes_of_warm_up(sd, tmp_path)) == 1
    assert len(passes_of_warm_up(sd, tmp_path, replace(OPTIONS, max_rows=6))) > 1, "other options are measured"
    assert len(list(tmp_path.iterdir())) == 2


def _foreign(content: str) -> str:
    parts = json.loads(content)
    parts["circumstances"]["versions"]["torch"] = "1.0"
    return json.dumps(parts)


def _impossible(content: str) -> str:
    parts = json.loads(content)
    return json.dumps(parts | {"found": dict.fromkeys(parts["found"], 99)})


@pytest.mark.parametrize(
    "spoil",
    [lambda content: content[:-20], lambda _: "[]", lambda _: '{"found": 3}', _foreign, _impossible],
    ids=["cut off", "a list", "no findings", "of another version", "impossible"],
)
def test_a_file_that_cannot_hold_is_ignored(sd: Path, tmp_path: Path, spoil: Callable[[str], str]) -> None:
    passes_of_warm_up(sd, tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_text()
    file.write_text(spoil(good))
    assert len(passes_of_warm_up(sd, tmp_path)) > 1
    assert json.loads(file.read_text()) == json.loads(good)


def test_an_engine_measures_where_nothing_can_be_kept(sd: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(passes_of_warm_up(sd, tmp_path / "file")) > 1
