"""Passes that are replayed give the bits of eager ones: a recorder of torch's operators stands in for CUDA graphs."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serve_app.engine import AdapterFile, RunRequest, graphs
from serve_app.engine.base_model import BaseModel
from serve_app.engine.graphs import Capture, StepGraphs
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import final_latents, load


class Recording(TorchDispatchMode):
    """Records operators with the very tensors they read and wrote, as a CUDA graph records kernels and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = func(*args, **kwargs)
        taken = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [(i, each) for i, each in enumerate(tree_leaves(answer)) if isinstance(each, Tensor)]
        self.operators.append((func, args, kwargs, [(i, each) for i, each in made if _memory(each) not in taken]))
        return answer

    def replay(self) -> None:
        """Do the same again at the same places in memory."""
        for func, args, kwargs, made in self.operators:
            again = tree_leaves(func(*args, **kwargs))
            for i, tensor in made:
                tensor.copy_(again[i])

    def forget(self) -> None:
        """Spoil what was computed: a capture records and does not compute."""
        for *_, made in self.operators:
            for _, tensor in made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder:
    """A `GraphDevice` on a CPU."""

    def __init__(self, *, memory: int = 10**9) -> None:
        self.memory = memory
        """Latents of more rows than this cannot be captured."""
        self.captured = self.replayed = self.released = 0

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def capture(self, work: Callable[[], Tensor]) -> Capture:
        recording = Recording()
        with recording:
            output = work()
        if len(output) > self.memory:
            raise torch.OutOfMemoryError("no memory for the graph")
        recording.forget()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            recording.replay()

        return Capture(replay, output)

    def release(self) -> None:
        self.released += 1


def model_with_graphs(folder: Path, recorder: Recorder) -> BaseModel:
    model = load(folder, replace(EXACT_FLOAT32, max_rows=8))
    runner = model.runner
    runner.graphs = StepGraphs(model.family.denoise, runner.adapter_slots, recorder, max_rows=8)
    return model


@pytest.fixture
def files(small_sd: Path, tmp_path: Path) -> list[AdapterFile]:
    def write(seed: int, rank: int, targets: tuple[str, ...], **more: bool) -> AdapterFile:
        path = tmp_path / f"{seed}.safetensors"
        return tiny_models.write_lora(path, small_sd, seed=seed, rank=rank, targets=targets, size=0.05, **more)

    return [
        write(1, 4, tiny_models.ATTENTION),
        write(2, 8, tiny_models.ATTENTION),
        write(3, 24, tiny_models.EVERYTHING),
        write(4, 12, tiny_models.EVERYTHING, dora=True),
        write(5, 16, tiny_models.EVERYTHING, input_gains=True),
    ]


def request(seed: int, file: AdapterFile | None, steps: int = 3, side: int = 64, prompt: str = "a cat") -> RunRequest:
    return RunRequest(
        run_id=f"{seed}",
        prompt=prompt,
        adapter=file,
        seed=seed,
        steps=steps,
        width=side,
        height=64,
        scale=0.5 + seed / 8,
    )


def test_replayed_passes_give_the_bits_of_eager_ones_in_changing_company(
    small_sd: Path, files: list[AdapterFile]
) -> None:
    companies = [
        [request(i, file, steps=2 + i % 3) for i, file in enumerate([None, *files[:2]])],
        [request(i, file, prompt="a red cat") for i, file in enumerate([files[1], None, files[0]])],
        [request(i, file) for i, file in enumerate(files[2:])],  # gains, more layers, a larger buffer: other addresses
        [request(7, None, side=96)],
        [request(i, file, steps=2) for i, file in enumerate([None, *files[:2]], 8)],
    ]
    recorder = Recorder()
    replayed = model_with_graphs(small_sd, recorder)
    eager = load(small_sd, replace(EXACT_FLOAT32, max_rows=8))
    for company in companies:
        expected, latents = final_latents(eager, company), final_latents(replayed, company)
        assert [key for key in expected if not torch.equal(expected[key], latents[key])] == []
    assert recorder.replayed > 0
    before = recorder.captured
    final_latents(replayed, companies[4])
    assert recorder.captured == before, "a batch like an earlier one is captured again"


def test_a_shape_that_cannot_be_captured_stays_eager_and_the_log_says_so_once(
    small_sd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(memory=2)
    model = model_with_graphs(small_sd, recorder)
    eager = load(small_sd, replace(EXACT_FLOAT32, max_rows=8))
    many, one = [request(i, None) for i in range(4)], [request(5, None)]
    with caplog.at_level(logging.WARNING):
        for company in (one, many, one):
            expected, latents = final_latents(eager, company), final_latents(model, company)
            assert all(torch.equal(expected[key], latents[key]) for key in expected)
    assert [line.getMessage() for line in caplog.records if line.name == graphs.__name__] == [
        "a pass of 8 rows stays eager: its CUDA graph cannot be captured"
    ]
    assert (recorder.captured, recorder.released) == (2, 1), "memory is given back, and what fits is captured again"


def test_at_most_so_many_graphs_are_held_and_they_go_together(small_sd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    recorder = Recorder()
    model = model_with_graphs(small_sd, recorder)
    for side in (64, 96, 128):
        final_latents(model, [request(1, None, side=side)])
    assert (recorder.captured, recorder.released) == (3, 1)
    final_latents(model, [request(1, None, side=64)])
    assert recorder.captured == 4


def test_a_failed_pass_gives_the_memory_of_all_graphs_back(small_sd: Path) -> None:
    recorder = Recorder()
    model = model_with_graphs(small_sd, recorder)
    final_latents(model, [request(1, None)])
    model.runner.invalidate()
    assert recorder.released == 1
    final_latents(model, [request(1, None)])
    assert recorder.captured == 2
