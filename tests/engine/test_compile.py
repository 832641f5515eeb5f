"""A compiled denoiser has one graph per forward shape and makes no other, whatever the batch holds."""

import importlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from serve_app.engine import AdapterFile
from serve_app.engine.adapter_slots import AdapterSlots, ModuleWeights
from serve_app.engine.base_model import BaseModel
from serve_app.engine.lanes import compile_denoiser
from serve_app.engine.lora_layers import wrap_layers
from serve_app.engine.run import RunRequest
from serve_app.engine_options import EngineOptions
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import start
from tests.engine.test_lora_layers import new_store, place

COMPOSITIONS = 1000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # tracing, not running, takes the time


class Compiled:
    """A compiled model that is warm for one size, and the graphs that were made."""

    def __init__(self, folder: Path, adapters: list[AdapterFile]) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.is_replaying = False
        self.adapters = adapters
        importlib.import_module("torch._dynamo").register_backend(self._backend(), name="counting")
        options = EngineOptions(device="cpu", dtype="float32", compile="counting", max_rows=4)
        self.model = BaseModel.load("m", folder, options, lambda: None)
        # the first adapter that changes a layer beyond attention brings graphs of its own
        start(
            self.model, RunRequest(run_id="first", prompt="a cat", adapter=adapters[1], steps=50, width=64, height=64)
        )
        self.model.warm_up(64, 64)

    def _backend(self) -> Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]:
        def counting(graph: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
            """While `is_replaying`, run a graph once more, then repeat its output: that test counts graphs."""
            self.graphs.append(graph)
            answers: list[Any] = []

            def run_or_replay(*inputs: Any) -> Any:
                if not self.is_replaying:
                    return graph(*inputs)
                if not answers:
                    answers.append(graph(*inputs))
                return answers[0]

            return run_or_replay

        return counting


@pytest.fixture(scope="module")
def compiled(small_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    """Share one between both tests: tracing its three graphs takes 7 s.

    They are more than torch makes by default before it gives up.
    """
    folder = tmp_path_factory.mktemp("compiled")
    targets = (tiny_models.ATTENTION, tiny_models.EVERYTHING, tiny_models.EVERYTHING)
    adapters = [
        tiny_models.write_lora(folder / f"{i}.safetensors", small_sd, rank=4 + 6 * i, seed=i, targets=targets[i])
        for i in range(3)
    ]
    dynamo: Any = importlib.import_module("torch._dynamo")
    with dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        yield Compiled(small_sd, adapters)


def test_compiled_and_eager_agree(compiled: Compiled, small_sd: Path) -> None:
    request = RunRequest(run_id="k", prompt="a cat", adapter=compiled.adapters[2], steps=3, width=64, height=64)
    latents: list[np.ndarray] = []
    for model in (compiled.model, BaseModel.load("m", small_sd, EXACT_FLOAT32, lambda: None)):
        run = start(model, request)
        with torch.inference_mode():
            while not run.is_done:
                model.runner.denoise([run])
        latents.append(run.latents.numpy())
    assert np.allclose(*latents, atol=1e-4)


def test_a_warm_size_has_all_its_graphs_over_a_thousand_compositions(compiled: Compiled) -> None:
    graphs, model, files = compiled.graphs, compiled.model, compiled.adapters
    assert len(graphs) == 3, "one, two and four rows"
    compiled.is_replaying = True
    requests = [
        RunRequest(run_id=f"{i}", prompt="a cat", adapter=files[i % 4] if i % 4 < 3 else None, scale=0.1 * i,
                   guidance=[1.0, 5.0][i % 2], steps=50, width=64, height=64, sampler="euler")
        for i in range(8)
    ]  # fmt: skip
    chance = random.Random(0)
    runs = [start(model, request) for request in requests]
    single, double = [run for run in runs if run.rows == 1], [run for run in runs if run.rows == 2]
    with torch.inference_mode():
        for _ in range(COMPOSITIONS):
            batch = chance.sample(single, chance.randint(0, 2)) + chance.sample(double, chance.randint(0, 1))
            for run in batch:
                run.step = chance.randrange(49)
            if batch:
                model.runner.denoise(batch)
    assert len(graphs) == 3


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on a CPU")
@torch.inference_mode()
def test_inductor_compiles_layers_whose_rows_have_adapters_and_none() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())
    adapter_slots = AdapterSlots([wrap_layers(net)], 3, new_store())
    place(adapter_slots, 1, {"0": ModuleWeights(torch.randn(4, 16), torch.randn(8, 4), 0.5)})
    adapter_slots.bind([1, 0], [0.7, 0.0])
    x = torch.randn(2, 5, 16)
    assert torch.allclose(compile_denoiser(net, "inductor")(x), net(x), atol=1e-5)
