"""What a step asks of a device, at true size: 6 rows of SDXL or 4 of a transformer, each with an adapter, on no numbers.

The bounds are what the engine did when they were written. Whoever lowers a figure lowers its bound too.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from serve_app.engine import AdapterFile, EngineOptions, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.families.anima import AnimaFamily
from serve_app.engine.families.family import Family
from serve_app.engine.families.flux1 import Flux1Family
from serve_app.engine.families.flux2_klein import Flux2KleinFamily
from serve_app.engine.families.krea2 import Krea2Family
from serve_app.engine.families.qwen_image21 import QwenImage21Family
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine.families.z_image import ZImageFamily
from serve_app.engine.run import Run
from tests.engine import simulated_device, tiny_anima, tiny_flux1, tiny_flux2_klein, tiny_krea2, true_models
from tests.engine.run_engine import start
from tests.engine.simulated_device import CountedCalls, Record, recorded


class Budget(NamedTuple):
    launches: dict[str, int]
    """Launches of a step, by who adds the adapters' changes: torch's products, or the kernel."""
    change_launches: int
    """Launches beyond those of a step when the batch's company changes. Goal: 12."""
    moved_inputs: int
    """Inputs of the denoiser's operations that then lie elsewhere than before. Goal: 0."""
    admit_launches: int
    """Launches to admit the first run with its prompt."""
    admit_waits: int
    """Waits for the device then."""


BUDGETS = {
    "sdxl": Budget({"torch": 2519, "kernel": 2023}, 14, 145, 1069, 11),
    "z_image": Budget({"torch": 1263, "kernel": 943}, 14, 71, 2098, 10),
    "flux2_klein": Budget({"torch": 781, "kernel": 551}, 14, 66, 2012, 10),
    "krea2": Budget({"torch": 1200, "kernel": 1088}, 14, 63, 2188, 10),
    "anima": Budget({"torch": 1569, "kernel": 1373}, 14, 172, 1874, 11),
    "flux1": Budget({"torch": 2373, "kernel": 1798}, 14, 159, 1140, 10),
    "qwen_image21": Budget({"torch": 1360, "kernel": 1040}, 14, 71, 2028, 10),
}
"""SDXL's goals for a step are 2,600 launches where torch's products add the adapters, and 2,400 where the kernel does. A
block of Z-Image has more to launch: three more norms, queries and keys that are turned, and scales. Most of its
admission is transformers' Qwen3. Anima's 454 layers take three launches each, where klein's 109 take six; its blocks
read the caption and the places of tokens anew. FLUX.1 has 57 blocks, of 504 layers with modulations of their own."""
CHANGE_UPLOADS = 2
"""Copies to the device when the company changes. Goal: 1."""
CHANGE_WAITS = 0
"""Waits for the device then. Goal: 0."""
CHANGE_CALLS = 150
"""Calls of the engine's Python functions outside the denoiser then (124 when this was written): none for each layer."""

ADAPTERS = {"sdxl": 6, "z_image": 4, "flux2_klein": 4, "krea2": 4, "anima": 4, "flux1": 4, "qwen_image21": 4}
SIDE = 1024
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Stepping(NamedTuple):
    """A model in the middle of runs with an adapter each, one of them not in the batch yet."""

    family: str
    added_by: str
    """Who adds the adapters' changes, as in `Budget.launches`."""
    model: BaseModel
    runs: list[Run]
    admitted: Record


def _stepped(family: str, by: str) -> Any:
    """Torch's own products stand in for the kernel where it lacks: one family in the main suite, all in `make soak`."""
    marks = pytest.mark.soak if by == "torch" and family != "flux2_klein" else ()
    return pytest.param((family, by), id=f"{family}-{by}", marks=marks)


@pytest.fixture(scope="module", params=[_stepped(family, by) for family in BUDGETS for by in ("torch", "kernel")])
def stepping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepping]:
    family, added_by = request.param
    simulated_device.register()
    folder, adapters = tmp_path_factory.mktemp("adapters"), ADAPTERS[family]
    options = EngineOptions(
        device=simulated_device.NAME, dtype="bfloat16", max_rows=adapters, max_runs=adapters + 1,
        adapter_slots=adapters + 1, adapter_memory=2**36, exact=False,
    )  # fmt: skip
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with simulated_device.hollow(), pytest.MonkeyPatch.context() as patch:
            if added_by == "kernel":
                request.getfixturevalue("kernels").use(patch)
            make, file = hollow(family, folder / "lora.safetensors")
            model = BaseModel(family, make(options), options, lambda: None)
            with recorded() as record:
                runs = [start(model, run_request(0, file))]
            runs += [start(model, run_request(i, file)) for i in range(1, adapters + 1)]
            yield Stepping(family, added_by, model, runs, record)
            model.pool.close()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def hollow(family: str, file: Path) -> tuple[Callable[[EngineOptions], Family], Path]:
    """Return what makes a family of the true size, and an adapter of its attention and feed-forward layers."""
    meta = torch.device("meta")
    if family == "sdxl":
        pipeline = true_models.random_pipeline("sdxl", meta).to(dtype=torch.bfloat16)
        return partial(UNetFamily, pipeline), true_models.random_adapter(pipeline.unet, file, 1, 0)
    if family == "z_image":
        pipeline, kind = true_models.random_z_image(meta), ZImageFamily
        targets = (*true_models.ATTENTION, "w1", "w2", "w3")
    elif family == "krea2":
        pipeline, kind = true_models.random_krea2(meta), Krea2Family
        targets = tiny_krea2.BLOCK_LINEARS
    elif family == "flux2_klein":
        pipeline, kind = true_models.random_flux2_klein(meta), Flux2KleinFamily
        targets = tiny_flux2_klein.BLOCK_LINEARS
    elif family == "flux1":
        pipeline, kind = true_models.random_flux1(meta), Flux1Family
        targets = tiny_flux1.BLOCK_LINEARS
    elif family == "qwen_image21":
        pipeline, kind = true_models.random_qwen_image21(meta), QwenImage21Family
        pipeline.tokenizer = pipeline.processor.tokenizer
        targets = (*true_models.ATTENTION, "gate_layer", "proj", "img_mlp.out")
    else:
        pipeline, kind = true_models.random_anima(meta), AnimaFamily
        targets = tiny_anima.BLOCK_LINEARS
    for part in vars(pipeline).values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype=torch.bfloat16)
    file = true_models.random_adapter(pipeline.transformer, file, 1, 0, targets, "transformer")
    return partial(kind, pipeline), file


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


def test_a_step_and_a_change_of_company_keep_to_their_budgets(stepping: Stepping) -> None:
    family, added_by, model, runs, admitted = stepping
    budget = BUDGETS[family]
    before, changed, steady = step(model, runs[:-1]), step(model, runs[1:]), step(model, runs[1:])
    extra = changed.record.launches - steady.record.launches
    moved = sum(old != new for old, new in zip(before.within.reads, changed.within.reads, strict=True))
    assert steady.record.total <= budget.launches[added_by], steady.record.launches
    assert steady.record.uploads == []
    assert steady.record.waits == []
    assert extra.total() <= budget.change_launches, extra
    assert len(changed.record.uploads) <= CHANGE_UPLOADS, changed.record.uploads
    assert len(changed.record.waits) <= CHANGE_WAITS, changed.record.waits
    assert changed.calls.total() <= CHANGE_CALLS, changed.calls
    assert moved <= budget.moved_inputs
    assert admitted.total <= budget.admit_launches, admitted.launches
    assert len(admitted.waits) <= budget.admit_waits, admitted.waits
