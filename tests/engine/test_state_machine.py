"""Any order of add, step, abort and eviction: slots never overfill, every run ends once, and no row ever sees another's
adapter, prompt or noise (its bytes are those it has alone)."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from tests.engine import tiny
from tests.engine.rig import finish

OPTIONS = EngineOptions(device="cpu", dtype="float32", max_rows=4, max_runs=3, adapter_slots=2, host_memory=1)
PROMPTS = ("a cat", "red red red")
ADAPTERS = 4


def test_any_order_of_events_keeps_every_promise(sd: Path, tmp_path: Path) -> None:
    files = [
        tiny.write_adapter(tmp_path / f"{i}.safetensors", tiny.random_lora(sd, rank=4 + 8 * i, seed=i, text=i == 1))
        for i in range(ADAPTERS)
    ]
    alone: dict[RunRequest, str] = {}
    reference = Engine.load(sd, OPTIONS)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.engine = Engine.load(sd, OPTIONS) if Machine.spare is None else Machine.spare
            Machine.spare = None
            self.live: dict[str, RunRequest] = {}
            self.added = 0

        spare: Engine | None = None

        @rule(
            adapter=st.sampled_from([None, *range(ADAPTERS)]),
            prompt=st.sampled_from(PROMPTS),
            steps=st.integers(1, 4),
            guided=st.booleans(),
            large=st.booleans(),
            seed=st.integers(0, 2),
        )
        @precondition(lambda self: len(self.live) < 6)
        def add(self, adapter: int | None, prompt: str, steps: int, guided: bool, large: bool, seed: int) -> None:
            self.added += 1
            request = _request(files, f"{self.added}", adapter, prompt, steps, guided, large, seed)
            self.engine.add(request)
            self.live[request.key] = request

        @rule()
        def step(self) -> None:
            for ended in self.engine.step():
                request = self.live.pop(ended.key)  # KeyError: it ended twice, or after it was aborted
                assert ended.image is not None, ended.failure
                assert hashlib.sha256(ended.image.tobytes()).hexdigest() == expected(request)

        @rule(data=st.data())
        @precondition(lambda self: bool(self.live))
        def abort(self, data: st.DataObject) -> None:
            key = data.draw(st.sampled_from(sorted(self.live)))
            assert self.engine.abort(key)
            del self.live[key]

        @invariant()
        def the_books_balance(self) -> None:
            assert set(self.engine.progress()) == set(self.live)
            assert len(self.engine.resident_adapters) <= OPTIONS.adapter_slots
            assert sum(done > 0 for done, _ in self.engine.progress().values()) >= 0

        def teardown(self) -> None:
            while self.engine.has_work:
                self.step()
            assert not self.live
            Machine.spare = self.engine

    def expected(request: RunRequest) -> str:
        same = _request(files, "alone", *_meaning(request, files))
        if same not in alone:
            image = finish(reference, [same])["alone"].image
            assert image is not None
            alone[same] = hashlib.sha256(image.tobytes()).hexdigest()
        return alone[same]

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            database=None,
        ),
    )


def _request(
    files: list[AdapterFile],
    key: str,
    adapter: int | None,
    prompt: str,
    steps: int,
    guided: bool,
    large: bool,
    seed: int,
) -> RunRequest:
    side = 96 if large else 64
    file = None if adapter is None else files[adapter]
    return RunRequest(
        key=key,
        prompt=prompt,
        adapter=file,
        seed=seed,
        steps=steps,
        guidance=5.0 if guided else 1.0,
        width=64,
        height=side,
    )


def _meaning(request: RunRequest, files: list[AdapterFile]) -> tuple[int | None, str, int, bool, bool, int]:
    adapter = None if request.adapter is None else files.index(request.adapter)
    return adapter, request.prompt, request.steps, request.guidance > 1, request.height > 64, request.seed


pytestmark = pytest.mark.timeout(300)
