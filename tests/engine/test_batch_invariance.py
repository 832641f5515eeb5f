"""A seed gives the same bytes alone, in any batch and row, on any engine of the same machine."""

import hashlib
import itertools
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from serve_app.engine import AdapterFile, Engine, EngineOptions, RunRequest, base_model, batch_invariance
from serve_app.engine.base_model import BaseModel
from serve_app.engine.batch_invariance import PROCESSORS
from tests.engine import simulated_device, tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import add_together, final_latents, finish, load


class Adapter(NamedTuple):
    """An adapter that may stand beside another in a batch."""

    rank: int
    targets: tuple[str, ...]
    text: bool = False
    dora: bool = False
    input_gains: bool = False


ADAPTERS = {
    "low rank": Adapter(4, tiny_models.ATTENTION),
    "convolutions": Adapter(16, tiny_models.EVERYTHING),
    "text encoder": Adapter(24, tiny_models.ATTENTION, text=True),
    "high rank, everything": Adapter(40, tiny_models.EVERYTHING, text=True),
    "DoRA": Adapter(8, tiny_models.ATTENTION, dora=True),
    "DoRA, everything": Adapter(20, tiny_models.EVERYTHING, text=True, dora=True),
    "DoRA per input, everything": Adapter(12, tiny_models.EVERYTHING, text=True, input_gains=True),
}
"""Ranks of every bucket that the tiny layers have, layers of every kind, text encoders, gains of both sides."""
REQUEST = RunRequest(run_id="k", prompt="a cat", steps=2, width=64, height=64)


@pytest.fixture(scope="module")
def files(small_sd: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    into = tmp_path_factory.mktemp("adapters")
    return [
        tiny_models.write_lora(into / f"{i}.safetensors", small_sd, seed=i, size=0.05, **one._asdict())
        for i, one in enumerate(ADAPTERS.values())
    ]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Return an engine that measures, since these tests change what there is to find."""
    folder: Path = request.getfixturevalue(getattr(request, "param", "small_sd"))
    with Engine.load({"sd": folder}, EXACT_FLOAT32) as engine:
        yield engine


@pytest.fixture
def model(engine: Engine) -> BaseModel:
    return engine.base_models["sd"]


def digest(image: object) -> str:
    return hashlib.sha256(bytes(memoryview(image))).hexdigest()  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_every_adapter_keeps_its_latents_beside_every_other(small_sd: Path, files: list[AdapterFile]) -> None:
    """Compare to the last bit of float32, which 8-bit pixels may hide."""
    model = load(small_sd, EXACT_FLOAT32)
    runs = [REQUEST, *(replace(REQUEST, run_id=n, seed=1, adapter=f) for n, f in zip(ADAPTERS, files, strict=True))]
    alone = {run.run_id: final_latents(model, [run])[run.run_id] for run in runs}
    for batch in [runs, runs[::-1], *itertools.combinations(runs, 2)]:
        beside = final_latents(model, batch)
        assert [run_id for run_id in beside if not torch.equal(beside[run_id], alone[run_id])] == [], list(beside)


def depend_on_batch(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
    """Depends on the row count as a kernel that adds in another order does, only more."""
    return answer * (1 + inputs[0].shape[0] / 32)


def depend_on_eight(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: Any) -> Any:
    """Depend on the row count at eight rows alone, which neither four nor sixteen tell."""
    return (answer[0] * 1.1, *answer[1:]) if len(inputs[0]) == 8 else answer


def depend_on_threads(_: torch.nn.Module, __: tuple[torch.Tensor, ...], answer: Any) -> Any:
    return (answer[0] * (1 + torch.get_num_threads() / 32), *answer[1:])


def depend_on_place(_: torch.nn.Module, __: tuple[torch.Tensor, ...], answer: Any) -> Any:
    """Depend on a row's place, as operators do that divide few rows among several threads."""
    places = torch.arange(len(answer[0])) if torch.get_num_threads() > 1 else torch.zeros(len(answer[0]))
    return (answer[0] * (1 + places[:, None, None, None] / 32), *answer[1:])


def alone_and_beside_others(engine: Engine, request: RunRequest, count: int = 3) -> tuple[str, str]:
    others = [replace(request, run_id=f"{i}", seed=i) for i in range(count)]
    alone = digest(finish(engine, [request])[request.run_id].image)
    return alone, digest(finish(engine, [*others, request])[request.run_id].image)


@pytest.mark.slow
@pytest.mark.usefixtures("two_lanes")
@pytest.mark.parametrize(
    ("hook", "others"),
    [(depend_on_eight, 3), (depend_on_eight, 7), (depend_on_threads, 3), (depend_on_place, 3)],
)
def test_every_row_count_and_number_of_threads_in_use_is_measured(small_sd: Path, hook: Any, others: int) -> None:
    """Eight rows come in one pass of four runs with one lane, of eight with two."""
    with Engine.load({"sd": small_sd}, EXACT_FLOAT32) as engine:
        for lane in engine.base_models["sd"].family.lanes:
            lane.module.register_forward_hook(hook)
        alone, together = alone_and_beside_others(engine, REQUEST, others)
    assert alone == together


def simulated() -> EngineOptions:
    simulated_device.register()
    return replace(EXACT_FLOAT32, device=simulated_device.NAME, adapter_memory=2**26)


def depend_on_being_last(_: torch.nn.Module, __: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
    return torch.cat([answer[:-1], answer[-1:] * 1.1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "rows"),
    [("", 4), ("down_blocks.0.downsamplers.0.conv", 4), ("mid_block.resnets.0.conv1", 1)],
    ids=["by rows alone", "a convolution with strides by its place", "another by its place"],
)
def test_all_passes_of_a_gpu_have_one_shape(
    sd: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, last: str, rows: int
) -> None:
    """The hooks do as cuDNN on an H200, where rows of small images differ by their number, or by being the last."""
    request = replace(REQUEST, width=96)
    plain = load(sd, replace(simulated(), exact=False))
    with FlopCounterMode(display=False) as counter:
        final_latents(plain, [replace(request, steps=1, guidance=1.0)])
    monkeypatch.setattr(batch_invariance, "FLOPS_PER_PROCESSOR", 3 * counter.get_total_flops() / PROCESSORS)
    with Engine.load({"sd": sd}, simulated()) as engine:
        model = engine.base_models["sd"]
        layers = model.family.components["unet"].layers
        layers["up_blocks.0.resnets.0.conv1"].base.register_forward_hook(depend_on_batch)
        if last:
            layers[last].base.register_forward_hook(depend_on_being_last)
        passes: list[int] = []
        model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[0]))
        alone, together = alone_and_beside_others(engine, request)
        assert alone == together
        passes.clear()
        finish(engine, [request])
    assert passes == [rows] * (2 if rows == 4 else 4)
    assert "may depend" not in caplog.text


@pytest.mark.slow
def test_a_pass_that_does_not_fit_on_a_gpu_is_halved_down_to_one_row(sd: Path) -> None:

    def hold_one_row(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        passes.append(inputs[0].shape[0])
        if passes[-1] > 1:
            raise torch.OutOfMemoryError("a card that is full")

    passes: list[int] = []
    with Engine.load({"sd": sd}, simulated()) as engine:
        engine.base_models["sd"].denoiser.register_forward_pre_hook(hold_one_row)
        ended = finish(engine, [replace(REQUEST, run_id=f"{i}") for i in range(3)])
    assert all(each.image is not None for each in ended.values()), ended
    assert passes[-6:] == [1] * 6, "three guided runs"


@pytest.mark.slow
def test_each_start_warns_where_no_division_keeps_bits(
    small_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    passes: list[int] = []

    def depend_on_being_last(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: Any) -> Any:
        passes.append(inputs[0].shape[0])
        return (torch.cat([answer[0][:-1], answer[0][-1:] * 1.1]), *answer[1:])

    for _ in range(2):
        passes.clear()
        caplog.clear()
        with Engine.load({"sd": small_sd}, replace(EXACT_FLOAT32, max_rows=4), findings=tmp_path) as engine:
            engine.base_models["sd"].denoiser.register_forward_hook(depend_on_being_last)
            engine.warm_up(64, 64)
        assert "may depend on the other images of its batch" in caplog.text
    assert passes == [4], "the second start has it from what the first found"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [16, 32])
def test_every_rank_in_use_is_measured(engine: Engine, model: BaseModel, files: list[AdapterFile], rank: int) -> None:
    """Compare a rank of 4 beside one of 16, while slots have ranks up to 24, or beside one of 24 that comes later."""
    layer = model.family.components["unet"].layers["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"]

    def depend_on_rank(_: torch.nn.Module, __: tuple[torch.Tensor, ...], answer: torch.Tensor) -> torch.Tensor:
        return answer * 1.1 if layer.rank == rank else answer

    layer.register_forward_hook(depend_on_rank)
    low, middle, high = (
        replace(REQUEST, run_id=name, steps=4, adapter=files[list(ADAPTERS).index(name)])
        for name in ("low rank", "convolutions", "text encoder")
    )
    # What waits for its adapter would not stand beside the other.
    for known in [[high, middle]] if rank == 16 else [[low, middle], [low, middle], [high]]:
        finish(engine, known)
    alone = finish(engine, [low])[low.run_id].image
    together = finish(engine, [low, middle if rank == 16 else high])
    assert digest(alone) == digest(together[low.run_id].image)


@pytest.mark.slow
def test_factors_whose_bits_depend_on_the_rows_beside_them_are_stepped_by_themselves(
    engine: Engine, model: BaseModel, files: list[AdapterFile], small_sd: Path
) -> None:
    name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    layer = model.family.components["unet"].layers[name]

    def depend_with_factors(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> Any:
        return depend_on_batch(net, inputs, answer) if layer.change is not None and layer.change.factors else answer

    layer.register_forward_hook(depend_with_factors)
    stem, draw = f"lora_unet_{name.replace('.', '_')}", partial(torch.randn, generator=torch.Generator().manual_seed(0))
    factors = {f"{stem}.lokr_w1": draw(8, 8) * 0.2, f"{stem}.lokr_w2": draw(4, 4) * 0.2}
    lokr = tiny_models.write_adapter(small_sd.with_name("lokr.safetensors"), factors)
    runs = [replace(REQUEST, run_id="lokr", adapter=lokr), REQUEST, replace(REQUEST, run_id="l", adapter=files[0])]
    alone = {run.run_id: digest(finish(engine, [run])[run.run_id].image) for run in runs}
    together = {run_id: digest(ended.image) for run_id, ended in finish(engine, runs).items()}
    assert alone == together
    assert alone["lokr"] != alone["k"]


@pytest.mark.slow
def test_ranks_of_8_and_16_share_a_pass_and_keep_their_bits(small_sd: Path, files: list[AdapterFile]) -> None:
    """The probe finds that they agree, since products narrower than a rank of 16 are padded to it."""
    model = load(small_sd, EXACT_FLOAT32)
    chosen = {name: files[list(ADAPTERS).index(name)] for name in ("low rank", "DoRA", "convolutions")}
    runs = [REQUEST, *(replace(REQUEST, run_id=name, seed=1, adapter=file) for name, file in chosen.items())]
    alone = {run.run_id: final_latents(model, [run])[run.run_id] for run in runs}
    final_latents(model, runs)  # measures
    passes: list[int] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[0]))
    beside = final_latents(model, runs)
    assert len(passes) == REQUEST.steps, "no run waits for those of another rank"
    assert [run_id for run_id in beside if not torch.equal(beside[run_id], alone[run_id])] == []


@pytest.mark.slow
def test_every_shape_is_measured(engine: Engine, model: BaseModel) -> None:
    def depend_when_tall(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: Any) -> Any:
        tall = inputs[0].shape[2] > inputs[0].shape[3]
        return (depend_on_batch(net, inputs, answer[0]),) if tall else answer

    model.denoiser.register_forward_hook(depend_when_tall)
    request = RunRequest(run_id="k", prompt="a cat", steps=2, width=64, height=96)
    for side in (64, 96, 112, 128):
        finish(engine, [replace(request, width=side, height=side)])
    alone, together = alone_and_beside_others(engine, request)
    assert alone == together


@pytest.mark.slow
def test_runs_of_other_shapes_go_on_while_one_is_measured(
    engine: Engine, model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step takes more than a pass, and the images are those of an engine that has measured before."""
    monkeypatch.setattr(base_model, "MEASURING_S", 0.0)
    passes: list[torch.Size] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[2:]))
    known = RunRequest(run_id="known", prompt="a cat", steps=40, width=64, height=64)
    new = replace(known, run_id="new", steps=2, height=96)
    finish(engine, [replace(known, steps=1)])
    add_together(engine, [known, new])
    before: dict[str, int] = {}
    while engine.progress().get("new", (1, 0))[0] == 0:
        passes.clear()
        engine.step()
        assert len(passes) == 1
        before = {run_id: done for run_id, (done, _) in engine.progress().items()}
    assert before["known"] > 1
    images = {run_id: ended.image for run_id, ended in finish(engine).items()}
    assert digest(finish(engine, [new])["new"].image) == digest(images["new"])


@pytest.mark.slow
def test_prompts_are_encoded_by_one_thread_at_a_time(engine: Engine, model: BaseModel) -> None:
    """A warm-up encodes on another thread than the runs that come meanwhile, whose adapters change the encoders."""
    both = threading.Barrier(2)
    met: list[bool] = []

    def meet(*_: object) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)
            met.append(True)

    model.family.components["text_encoder"].module.register_forward_pre_hook(meet)
    requests = [RunRequest(run_id=prompt, prompt=prompt, width=64, height=64) for prompt in ("a cat", "a dog")]
    threads = [threading.Thread(target=torch.inference_mode()(model.encode), args=(each,)) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not met


@pytest.mark.slow
def test_layers_that_no_adapter_has_changed_yet_are_measured(
    engine: Engine, model: BaseModel, files: list[AdapterFile]
) -> None:
    """A replica warms up before it knows any adapter."""
    layer = model.family.components["unet"].layers["mid_block.attentions.0.transformer_blocks.0.attn1.to_q"]

    def depend_with_adapter(net: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: torch.Tensor) -> Any:
        return depend_on_batch(net, inputs, answer) if layer.rank else answer

    layer.register_forward_hook(depend_with_adapter)
    engine.warm_up(64, 64)
    alone, together = alone_and_beside_others(
        engine, RunRequest(run_id="k", prompt="a cat", adapter=files[0], steps=2, width=64, height=64)
    )
    assert alone == together


@pytest.mark.slow
def test_the_first_image_of_a_warm_size_waits_only_for_its_steps(engine: Engine, model: BaseModel) -> None:
    passes: list[int] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: passes.append(inputs[0].shape[0]))
    engine.warm_up(64, 64)
    assert EXACT_FLOAT32.max_rows in passes
    passes.clear()
    finish(engine, [RunRequest(run_id="k", prompt="a cat", steps=3, width=64, height=64)])
    assert len(passes) == 3
