"""What a step of SDXL asks of a device, at true size: 16 rows with 16 different adapters, on tensors without numbers.

The bounds are what the engine did when they were written. Whoever lowers a figure lowers its bound too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from serve_app.engine import AdapterFile, EngineOptions, RunRequest, base_model
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.run import Run
from tests.engine import simulated_device, true_models
from tests.engine.run_engine import start
from tests.engine.simulated_device import CountedCalls, Record, recorded

STEP_LAUNCHES = {"torch": 2519, "kernel": 2099}
"""Goals: 2,600 where torch's products add the adapters, and 2,400 where the kernel does."""
CHANGE_LAUNCHES = 14
"""Launches beyond those of a step when the batch's company changes. Goal: 12."""
CHANGE_UPLOADS = 2
"""Copies to the device then. Goal: 1."""
CHANGE_WAITS = 0
"""Waits for the device then. Goal: 0."""
CHANGE_CALLS = 240
"""Calls of the engine's Python functions outside the denoiser then (202 when this was written): none for each layer."""
MOVED_INPUTS = 145
"""Inputs of the denoiser's operations that then lie elsewhere than before. Goal: 0."""
ADMIT_LAUNCHES = 1069
"""Launches to admit the first run with its prompt."""
ADMIT_WAITS = 11
"""Waits for the device then."""

ADAPTERS, SIDE = 16, 1024
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Stepping(NamedTuple):
    """A model in the middle of runs with an adapter each, one of them not in the batch yet."""

    added_by: str
    """Who adds the adapters' changes, as in `STEP_LAUNCHES`."""
    model: BaseModel
    runs: list[Run]
    admitted: Record


@pytest.fixture(scope="module", params=STEP_LAUNCHES)
def sdxl_stepping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepping]:
    add_lora = request.getfixturevalue("kernels").add_lora if request.param == "kernel" else None
    simulated_device.register()
    folder = tmp_path_factory.mktemp("adapters")
    options = EngineOptions(
        device=simulated_device.NAME, dtype="bfloat16", max_rows=ADAPTERS, max_runs=ADAPTERS + 1,
        adapter_slots=ADAPTERS + 1, adapter_memory=2**36, exact=False,
    )  # fmt: skip
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with simulated_device.hollow(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(base_model, "lora_kernel", lambda _: add_lora)  # as on a GPU
            pipeline = true_models.random_pipeline("sdxl", torch.device("meta"))
            pipeline.to(dtype=torch.bfloat16)
            file = true_models.random_adapter(pipeline.unet, folder / "lora.safetensors", 1, 0)
            model = BaseModel("sdxl", UNetFamily(pipeline, options), options, lambda: None)
            with recorded() as record:
                runs = [start(model, run_request(0, file))]
            runs += [start(model, run_request(i, file)) for i in range(1, ADAPTERS + 1)]
            yield Stepping(request.param, model, runs, record)
            model.pool.close()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def run_request(i: int, file: Path) -> RunRequest:
    return RunRequest(
        run_id=f"{i}", prompt="a cat", adapter=AdapterFile(f"{i}", file), scale=0.5 + i / 100, seed=i, steps=20,
        guidance=1.0, width=SIDE, height=SIDE,
    )  # fmt: skip


class Step(NamedTuple):
    record: Record
    within: Record
    """What the denoiser's own pass asked for."""
    calls: Counter[str]
    """Calls of the engine's functions outside that pass."""


@torch.inference_mode()
def step(model: BaseModel, runs: list[Run]) -> Step:
    passes: list[Record] = []
    with ExitStack() as within, recorded() as record, CountedCalls() as calls:

        def begin(*_: Any) -> None:
            calls.pause()
            passes.append(within.enter_context(recorded()))

        def end(*_: Any) -> None:
            within.close()
            calls.resume()

        hooks = model.denoiser.register_forward_pre_hook(begin), model.denoiser.register_forward_hook(end)
        model.runner.denoise(runs)
    for hook in hooks:
        hook.remove()
    return Step(record, passes[0], calls.found())


def test_a_step_and_a_change_of_company_keep_to_their_budgets(sdxl_stepping: Stepping) -> None:
    added_by, model, runs, admitted = sdxl_stepping
    before, changed, steady = step(model, runs[:ADAPTERS]), step(model, runs[1:]), step(model, runs[1:])
    assert steady.record.total <= STEP_LAUNCHES[added_by], steady.record.launches
    assert steady.record.uploads == []
    assert steady.record.waits == []
    extra = changed.record.launches - steady.record.launches
    assert extra.total() <= CHANGE_LAUNCHES, extra
    assert len(changed.record.uploads) <= CHANGE_UPLOADS, changed.record.uploads
    assert len(changed.record.waits) <= CHANGE_WAITS, changed.record.waits
    assert changed.calls.total() <= CHANGE_CALLS, changed.calls
    moved = sum(old != new for old, new in zip(before.within.reads, changed.within.reads, strict=True))
    assert moved <= MOVED_INPUTS
    assert admitted.total <= ADMIT_LAUNCHES, admitted.launches
    assert len(admitted.waits) <= ADMIT_WAITS, admitted.waits
