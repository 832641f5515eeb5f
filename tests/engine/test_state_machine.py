"""Any order of add, step, abort and eviction keeps slots within bounds and ends every run once.

No row ever sees another's adapter, prompt or noise: its bytes are those it has alone.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from serve_app.engine import Engine, EngineOptions, RunRequest
from tests.engine import tiny_models
from tests.engine.run_engine import finish

OPTIONS = EngineOptions(device="cpu", dtype="float32", max_rows=4, max_runs=3, adapter_slots=2, host_memory=1)
PROMPTS = ("a cat", "red red red")
ADAPTERS = 4
MAX_LIVE = 6


def test_any_order_of_events_keeps_every_promise(small_sd: Path, tmp_path: Path) -> None:
    files = [
        tiny_models.write_lora(tmp_path / f"{i}.safetensors", small_sd, rank=4 + 8 * i, seed=i, text=i == 1)
        for i in range(ADAPTERS)
    ]
    alone: dict[RunRequest, str] = {}
    reference = Engine.load(small_sd, OPTIONS)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.engine = Engine.load(small_sd, OPTIONS) if Machine.spare is None else Machine.spare
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
        def add(self, adapter: int | None, prompt: str, steps: int, guided: bool, large: bool, seed: int) -> None:
            if len(self.live) == MAX_LIVE:
                return
            self.added += 1
            request = RunRequest(
                run_id=f"{self.added}",
                prompt=prompt,
                adapter=None if adapter is None else files[adapter],
                seed=seed,
                steps=steps,
                guidance=5.0 if guided else 1.0,
                width=64,
                height=96 if large else 64,
            )
            self.engine.add(request)
            self.live[request.run_id] = request

        @rule()
        def step(self) -> None:
            for ended in self.engine.step():
                request = self.live.pop(ended.run_id)  # KeyError: it ended twice, or after it was aborted
                assert ended.image is not None, ended.failure
                assert hashlib.sha256(ended.image.tobytes()).hexdigest() == expected(request)

        @rule(index=st.integers(0, MAX_LIVE - 1))
        def abort(self, index: int) -> None:
            """Abort by index: what Hypothesis draws must not depend on what is live."""
            if self.live:
                run_id = sorted(self.live)[index % len(self.live)]
                assert self.engine.abort(run_id)
                del self.live[run_id]

        @invariant()
        def the_counts_agree(self) -> None:
            assert set(self.engine.progress()) == set(self.live)
            assert len(self.engine.resident_adapters) <= OPTIONS.adapter_slots
            assert len(self.engine.scheduler) <= OPTIONS.runs
            assert 0 <= self.engine.free_runs <= OPTIONS.runs

        def teardown(self) -> None:
            while self.engine.has_work:
                self.step()
            assert not self.live
            Machine.spare = self.engine

    def expected(request: RunRequest) -> str:
        same = replace(request, run_id="alone")
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


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
