"""A whole job of every feature runs on a device that is not the CPU, and makes the CPU's numbers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest
from tests.engine import simulated_device, tiny_models
from tests.engine.test_batch_invariance import ADAPTERS

SAMPLERS = ("euler", "euler-a", "heun", "dpm++2m-karras", "dpm++2m-sde", "dpm++2s", "lcm", "unipc")
"""One memory and two, one pass a step and two, with noise and without."""
STEPS = 2
OPTIONS = EngineOptions(dtype="float32", max_rows=16, adapter_slots=9, adapter_memory=2**27, exact=False)


class Made(NamedTuple):
    images: Mapping[str, np.ndarray]
    previews: Mapping[str, np.ndarray]


def requests(folder: Path, into: Path) -> list[RunRequest]:
    """Every kind of adapter and every sampler; guidance and none; short prompts and long."""
    kinds = [
        tiny_models.write_lora(into / f"{i}.safetensors", folder, seed=i, size=0.05, **one._asdict())
        for i, one in enumerate(ADAPTERS.values())
    ]
    adapters: list[AdapterFile | None] = [None, *kinds]
    return [
        RunRequest(
            run_id=f"{i} {sampler}", prompt="a red cat" if i % 3 else "a red cat on a mat " * 3, negative_prompt="dull",
            adapter=adapter, scale=0.5 + 0.1 * i, seed=2**33 + i, steps=STEPS, guidance=(5.0, 1.0)[i % 2],
            width=64, height=64, sampler=sampler,
        )
        for i, (adapter, sampler) in enumerate(zip(adapters, SAMPLERS, strict=True))
    ]  # fmt: skip


def make(folder: Path, runs: list[RunRequest], options: EngineOptions) -> Made:
    images: dict[str, np.ndarray] = {}
    previews: dict[str, np.ndarray] = {}
    with Engine.load(folder, options) as engine:
        for run in runs:
            engine.add(run)
        while engine.has_work:
            for ended in engine.step():
                assert ended.image is not None, ended
                images[ended.run_id] = ended.image
            for run in runs:
                unfinished = engine.unfinished(run.run_id, 8)
                if unfinished is not None:
                    previews[run.run_id] = unfinished[1]
        (model,) = engine.base_models.values()
        if not model.store.lines.is_cpu:
            assert model.pool.slot_bytes >= model.store.lines.nbytes, "a card's store counts whole"
    return Made(images, previews)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "exact"), [("small_sd", True), ("sdxl", False)], ids=["SD, exact", "SDXL, not exact"]
)
def test_a_job_of_every_feature_is_the_same_on_another_device(
    family: str, exact: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(family)
    simulated_device.register()
    runs = requests(folder, tmp_path)
    options = replace(OPTIONS, exact=exact)
    expected = make(folder, runs, replace(options, device="cpu"))
    with simulated_device.recorded() as record:
        made = make(folder, runs, replace(options, device=simulated_device.NAME))
    assert record.total > 1000, "it ran on the device"
    assert made.previews.keys() == expected.previews.keys() == {run.run_id for run in runs}
    for run in runs:
        for ours, theirs in ((made.images, expected.images), (made.previews, expected.previews)):
            assert abs(ours[run.run_id].astype(int) - theirs[run.run_id]).max() <= 1, run


def test_tensors_of_two_devices_do_not_mix() -> None:
    simulated_device.register()
    with pytest.raises(RuntimeError, match="one device"):
        torch.ones(2, device=simulated_device.NAME).add_(torch.ones(2))
