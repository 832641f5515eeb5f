"""What a process measured about exactness serves the next one, on any machine, under the same circumstances alone."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from serve_app.engine import Engine, EngineOptions, findings
from serve_app.engine.findings import Findings, Shelf
from serve_app.settings import Settings
from serve_app.store.storage import StoredFiles
from tests.engine.conftest import EXACT_FLOAT32
from tests.support import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("findings")]

OPTIONS = replace(EXACT_FLOAT32, max_rows=4)


def passes_of_warm_up(model: Path, shelf: Shelf | Path, options: EngineOptions = OPTIONS) -> list[int]:
    """Return the row counts that a new engine computes before its first image of a size, that of the image last."""
    with Engine.load(model, options, findings=shelf) as engine:
        passes: list[int] = []
        (loaded,) = engine.base_models.values()
        loaded.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(len(inputs[0])))
        engine.warm_up(64, 64)
    return passes


@pytest.fixture(scope="module")
def found(small_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the circumstances, with the file of what a first engine measured."""
    shelf = tmp_path_factory.mktemp("found")
    assert len(passes_of_warm_up(small_sd, shelf)) > 1
    (folder,) = shelf.iterdir()
    return folder


def test_the_next_engine_measures_nothing(small_sd: Path, found: Path, tmp_path: Path) -> None:
    shutil.copytree(found, tmp_path / found.name)
    assert len(passes_of_warm_up(small_sd, tmp_path)) == 1
    assert len(passes_of_warm_up(small_sd, tmp_path, replace(OPTIONS, max_rows=6))) > 1, "other options are measured"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture(params=["file", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], StoredFiles]]:
    """Return what opens the storage as each new pod does: a folder that is mounted, and a storage of objects."""
    url = (tmp_path / "storage").as_uri() if request.param == "file" else "memory://pods"
    yield lambda: StoredFiles(Settings(storage_url=url, data_dir=tmp_path), "findings")
    memory = fsspec.filesystem("memory")
    if memory.exists("/pods"):
        memory.rm("/pods", recursive=True)


async def test_a_new_pod_measures_nothing_again(small_sd: Path, stored: Callable[[], StoredFiles]) -> None:
    assert len(passes_of_warm_up(small_sd, stored())) > 1
    circumstances = {"card": "a card"}
    pods = [Findings(stored(), circumstances) for _ in range(2)]  # neither sees what the other finds meanwhile
    for number, pod in enumerate(pods):
        pod.keep(f"shape {number}", number)
        pod.keep("both", True)
    for number in range(2):  # each is written in a thread of its own
        await wait_until(lambda n=number: Findings(stored(), circumstances).found(f"shape {n}", int) == n)
    third = Findings(stored(), circumstances)
    assert third.found("both", bool) is True
    assert Findings(stored(), {"card": "another"}).found("both", bool) is None
    assert len(passes_of_warm_up(small_sd, stored())) == 1


def _foreign(content: str) -> str:
    parts = json.loads(content)
    parts["circumstances"]["versions"]["torch"] = "1.0"
    return json.dumps(parts)


def _impossible(content: str) -> str:
    return json.dumps(json.loads(content) | {"value": 99})


@pytest.mark.parametrize(
    "spoil",
    [lambda content: content[:-20], lambda _: "[]", lambda _: '{"found": 3}', _foreign, _impossible],
    ids=["cut off", "a list", "no finding", "of another version", "impossible"],
)
def test_a_file_that_cannot_hold_is_ignored(
    small_sd: Path, found: Path, tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    (file,) = found.iterdir()
    copy = tmp_path / found.name / file.name
    copy.parent.mkdir()
    copy.write_text(spoil(file.read_text()))
    assert len(passes_of_warm_up(small_sd, tmp_path)) > 1
    assert json.loads(copy.read_text()) == json.loads(file.read_text())


def test_an_engine_measures_where_nothing_can_be_kept(small_sd: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(passes_of_warm_up(small_sd, tmp_path / "file")) > 1
    nowhere = StoredFiles(Settings(storage_url=(tmp_path / "file" / "in").as_uri(), data_dir=tmp_path), "findings")
    assert len(passes_of_warm_up(small_sd, nowhere)) > 1


def test_a_card_is_known_by_its_driver_and_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Card:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card)
    monkeypatch.setattr(findings, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)

    def of_card() -> object:
        device, net = torch.device("cuda"), torch.nn.Linear(2, 2)
        return findings.circumstances(net, device, OPTIONS, lanes=1, by_kernel=True, attention="")["hardware"]

    seen = [of_card()]
    (tmp_path / "version").write_text("NVRM version: Kernel Module 580.159.04\nGCC version: 12")
    seen.append(of_card())
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92100)
    seen.append(of_card())
    assert seen[1] == [
        "NVIDIA H200",
        "9.0, 132 multiprocessors",
        "NVRM version: Kernel Module 580.159.04",
        "cuDNN 92000",
    ]
    assert len({str(each) for each in seen}) == 3


class Stuck(MemoryFileSystem):
    """A storage that takes as long as the test wants."""

    protocol = "stuck"
    goes_on = threading.Event()

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self.goes_on.wait()


def test_a_step_does_not_wait_for_a_storage_that_hangs(tmp_path: Path) -> None:
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    pod = Findings(StoredFiles(Settings(storage_url="stuck://pods", data_dir=tmp_path), "findings"), {})
    try:
        pod.keep("shape", 1)  # returns
        assert pod.found("shape", int) == 1
    finally:
        Stuck.goes_on.set()
