"""What a process measured about exactness serves the next one, on the same machine and under the same options alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import Engine, EngineOptions
from tests.engine.conftest import EXACT_FLOAT32

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("findings")]

OPTIONS = replace(EXACT_FLOAT32, max_rows=4)


def passes_of_warm_up(model: Path, folder: Path, options: EngineOptions = OPTIONS) -> list[int]:
    """Return the row counts that a new engine computes before its first image of a size, that of the image last."""
    with Engine.load(model, options, findings=folder) as engine:
        passes: list[int] = []
        (loaded,) = engine.base_models.values()
        loaded.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
        engine.warm_up(64, 64)
    return passes


@pytest.fixture(scope="module")
def found(small_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of what a first engine measured."""
    folder = tmp_path_factory.mktemp("found")
    assert len(passes_of_warm_up(small_sd, folder)) > 1
    (file,) = folder.iterdir()
    return file


def test_the_next_engine_measures_nothing(small_sd: Path, found: Path, tmp_path: Path) -> None:
    shutil.copy(found, tmp_path)
    assert len(passes_of_warm_up(small_sd, tmp_path)) == 1
    assert len(passes_of_warm_up(small_sd, tmp_path, replace(OPTIONS, max_rows=6))) > 1, "other options are measured"
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
def test_a_file_that_cannot_hold_is_ignored(
    small_sd: Path, found: Path, tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    good, file = found.read_text(), tmp_path / found.name
    file.write_text(spoil(good))
    assert len(passes_of_warm_up(small_sd, tmp_path)) > 1
    assert json.loads(file.read_text()) == json.loads(good)


def test_an_engine_measures_where_nothing_can_be_kept(small_sd: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(passes_of_warm_up(small_sd, tmp_path / "file")) > 1
