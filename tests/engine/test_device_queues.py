"""On a GPU, prompts are encoded, images decoded and adapters copied on streams of their own, in the right order.

torch's streams and events are stood in for by ones that record who waits for what; all numbers are computed.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.engine import AdapterFile, Engine, RunRequest
from serve_app.engine.adapter_store import AdapterStore
from serve_app.engine.families.unet import UNetFamily
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import finish

pytestmark = pytest.mark.slow

clock = count()
current = threading.local()


class Event:
    def record(self, stream: "Stream") -> None:
        self.stream, self.at = stream, next(clock)


@dataclass(eq=False)
class Stream:
    """Records its work, what it waited for, and when a thread waited for it."""

    device: torch.device
    priority: int
    work: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    waits: list[tuple[int, Event]] = field(default_factory=list[tuple[int, Event]])
    synchronized: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.waits.append((next(clock), event))

    def synchronize(self) -> None:
        self.synchronized.append(next(clock))


streams: list[Stream] = []


@contextmanager
def use(stream: Stream) -> Generator[None]:
    before, current.stream = getattr(current, "stream", None), stream
    yield
    current.stream = before


def note(what: str) -> None:
    current.stream.work.append((next(clock), what))  # AttributeError: it would go to the default stream


@pytest.fixture
def on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    streams.clear()
    write = AdapterStore.write

    def noted(store: AdapterStore, start: int, lines: torch.Tensor) -> None:
        if threading.current_thread().name.startswith(("adapter-loader", "Main")):  # an encoder's store is its own
            note("copy")
        write(store, start, lines)

    monkeypatch.setattr(AdapterStore, "write", noted)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr("serve_app.engine.engine.torch_device", lambda _: torch.device("cuda"))


def requests(loras: list[AdapterFile]) -> list[RunRequest]:
    one = RunRequest(run_id="", prompt="a cat", steps=3, width=64, height=64)
    return [replace(one, run_id=f"{i}", prompt="a cat " * i, adapter=lora) for i, lora in enumerate([None, *loras])]


def test_only_steps_are_on_the_first_stream_and_nothing_is_read_too_early(
    sd: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    loras = [tiny_models.write_lora(tmp_path / f"{i}", sd, rank=4, seed=i, text=i == 1) for i in range(3)]
    with Engine.load(sd, EXACT_FLOAT32) as engine:
        expected = finish(engine, requests(loras))
    request.getfixturevalue("on_streams")
    with Engine.load(sd, replace(EXACT_FLOAT32, adapter_slots=2)) as engine:
        (model,) = engine.base_models.values()
        assert isinstance(model.family, UNetFamily)
        parts = {"encode": model.family.components["text_encoder"].module, "decode": model.family.vae.decoder}
        for name, module in (parts | {"step": model.denoiser}).items():
            module.register_forward_pre_hook(lambda *_, name=name: note(name))
        made = finish(engine, requests(loras))
    for run_id, one in made.items():
        assert np.array_equal(np.asarray(one.image), np.asarray(expected[run_id].image))
    (first,) = [stream for stream in streams if stream.priority < 0]
    assert {what for _, what in first.work} == {"step"}
    assert {what for stream in streams if stream is not first for _, what in stream.work} == {
        "encode",
        "decode",
        "copy",
    }
    for stream in streams:
        for at, what in stream.work if stream is not first else []:
            assert any(done > at for done in stream.synchronized), "it is done before another stream reads it"
            if what != "encode":
                behind = [event.at for waited, event in stream.waits if waited < at and event.stream is first]
                assert behind, f"{what} waits for the steps before it"
