"""A compiled denoiser has one graph per forward shape and makes no other, whatever the batch holds."""

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from serve_app.engine.base_model import BaseModel
from serve_app.engine.run import RunRequest
from serve_app.engine_options import EngineOptions
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import start

COMPOSITIONS = 1000


@pytest.mark.slow
@pytest.mark.timeout(600)  # tracing, not running, takes the time
def test_a_warm_size_has_all_its_graphs_over_a_thousand_compositions(small_sd: Path, tmp_path: Path) -> None:
    """Also past the number of graphs at which torch gives up by default."""
    graphs: list[fx.GraphModule] = []
    is_warm = False

    def counting(graph: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        """Run a warm graph once more, then repeat its output: the test counts graphs, whatever they compute."""
        graphs.append(graph)
        answers: list[Any] = []

        def run_or_replay(*inputs: Any) -> Any:
            if not is_warm:
                return graph(*inputs)
            if not answers:
                answers.append(graph(*inputs))
            return answers[0]

        return run_or_replay

    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.register_backend(counting, name="counting")
    files = [
        tiny_models.write_adapter(
            tmp_path / f"{i}.safetensors",
            tiny_models.random_lora(
                small_sd, rank=4 + 6 * i, seed=i, targets=tiny_models.EVERYTHING if i else tiny_models.ATTENTION
            ),
        )
        for i in range(3)
    ]
    requests = [
        RunRequest(run_id=f"{i}", prompt="a cat", adapter=files[i % 4] if i % 4 < 3 else None, scale=0.1 * i, guidance=[1.0, 5.0][i % 2], steps=50, width=64, height=64, sampler="euler")
        for i in range(8)
    ]  # fmt: skip
    chance = random.Random(0)
    with dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        options = EngineOptions(device="cpu", dtype="float32", compile="counting", max_rows=4)
        model = BaseModel.load("m", small_sd, options, lambda: None)
        start(model, requests[1])  # the first adapter that changes a layer beyond attention brings graphs of its own
        model.warm_up(64, 64)
        assert len(graphs) == 3, "one, two and four rows"
        is_warm = True
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_and_eager_agree(small_sd: Path, tmp_path: Path) -> None:
    file = tiny_models.write_adapter(
        tmp_path / "a.safetensors", tiny_models.random_lora(small_sd, rank=4, seed=1, targets=tiny_models.EVERYTHING)
    )
    request = RunRequest(run_id="k", prompt="a cat", adapter=file, steps=3, width=64, height=64)
    latents: list[np.ndarray] = []
    for options in (replace(EXACT_FLOAT32, compile="eager", max_rows=2), EXACT_FLOAT32):
        model = BaseModel.load("m", small_sd, options, lambda: None)
        run = start(model, request)
        with torch.inference_mode():
            while not run.is_done:
                model.runner.denoise([run])
        latents.append(run.latents.numpy())
    assert np.allclose(*latents, atol=1e-4)
