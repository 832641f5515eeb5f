"""A batch is divided over lanes: passes side by side, each on its own thread, over the same weights."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from serve_app.engine import AdapterFile, Engine, Finished, RunRequest
from serve_app.engine.device import module_bytes
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import add_together, final_latents, finish, load

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_lanes")]

GUIDED = RunRequest(run_id="guided", prompt="a cat", steps=3, width=64, height=64, sampler="euler-a")


@pytest.fixture
def engine(sd: Path, findings: Path) -> Iterator[Engine]:
    with Engine.load(sd, EXACT_FLOAT32, findings=findings) as engine:
        yield engine


class Pass(NamedTuple):
    """What a lane's module sees of one pass."""

    lane: int
    rows: int
    thread: str
    threads: int
    """How many threads an operator takes."""


def watch(engine: Engine) -> list[Pass]:
    seen: list[Pass] = []
    (model,) = engine.base_models.values()
    for lane, component in enumerate(model.family.lanes):

        def see(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], lane: int = lane) -> None:
            seen.append(Pass(lane, len(inputs[0]), threading.current_thread().name, torch.get_num_threads()))

        component.module.register_forward_pre_hook(see)
    return seen


def four(adapters: list[AdapterFile]) -> list[RunRequest]:
    return [replace(GUIDED, run_id=f"{i}", seed=i, adapter=adapter) for i, adapter in enumerate([None, *adapters][:4])]


def different(some: dict[str, Finished], others: dict[str, Finished]) -> list[str]:
    assert all(one.image is not None for one in some.values())
    return [name for name, one in some.items() if not np.array_equal(one.image, others[name].image)]  # pyright: ignore[reportArgumentType]


def test_lanes_share_every_weight_and_no_layer(sd: Path) -> None:
    one, other = load(sd, EXACT_FLOAT32).family.lanes
    weights, same = (dict(lane.module.state_dict(keep_vars=True)) for lane in (one, other))
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == {
        name: tensor.data_ptr() for name, tensor in same.items()
    }
    assert module_bytes([one.module, other.module], torch.device("cpu")) == module_bytes(
        [one.module], torch.device("cpu")
    )
    assert one.layers.keys() == other.layers.keys()
    assert {id(layer) for layer in one.module.modules()}.isdisjoint(id(layer) for layer in other.module.modules())


def test_a_batch_is_divided_and_a_lone_row_takes_all_threads(sd: Path) -> None:
    with Engine.load(sd, replace(EXACT_FLOAT32, exact=False)) as engine:
        seen = watch(engine)
        add_together(engine, [replace(GUIDED, run_id=f"{i}", steps=1) for i in range(3)])
        finish(engine)
        assert sorted(seen) == [Pass(0, 3, "lane-0_0", 1), Pass(1, 3, "lane-1_0", 1)]
        seen.clear()
        finish(engine, [replace(GUIDED, steps=1, guidance=1.0)])
        assert seen == [Pass(0, 1, threading.current_thread().name, 2)]


def test_runs_keep_their_latents_in_any_lane_and_when_others_leave(engine: Engine, loras: list[AdapterFile]) -> None:
    """Compare to the last bit of float32: of these adapters 8-bit pixels show little."""
    requests = [replace(request, seed=0) for request in four(loras)]
    (model,) = engine.base_models.values()
    alone = {one.run_id: final_latents(model, [one])[one.run_id] for one in requests}
    assert not any(torch.equal(*two) for two in combinations(alone.values(), 2)), "each adapter has its effect"
    seen = watch(engine)
    for together in (requests, requests[::-1], requests[1:]):
        beside = final_latents(model, together)
        assert [run_id for run_id in beside if not torch.equal(beside[run_id], alone[run_id])] == []
    if {each.lane for each in seen} == {0}:
        pytest.skip("on this machine bits need passes that do not run side by side")
    expected = finish(engine, requests)
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.abort("1")
    assert different(finish(engine), expected) == []


@pytest.mark.parametrize("error", [RuntimeError("not today"), torch.OutOfMemoryError("out of memory")])
def test_a_pass_that_fails_in_one_lane_loses_nothing(
    engine: Engine, loras: list[AdapterFile], error: Exception
) -> None:
    expected = finish(engine, four(loras))
    (model,) = engine.base_models.values()

    def refuse(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > 2:
            raise error

    model.family.lanes[1].module.register_forward_pre_hook(refuse)
    assert different(finish(engine, four(loras)), expected) == []


def test_a_run_at_fault_is_lost_alone_in_whichever_lane(engine: Engine, loras: list[AdapterFile]) -> None:
    expected = finish(engine, four(loras))
    (model,) = engine.base_models.values()
    poison = replace(GUIDED, run_id="poison", seed=9, steps=7)

    def refuse(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if ((inputs[1] > 700) & (inputs[1] < 900)).any():  # at these times is only the run of seven steps
            raise RuntimeError("not today")

    for lane in model.family.lanes:
        lane.module.register_forward_pre_hook(refuse)
    ended = finish(engine, [*four(loras)[:2], poison, *four(loras)[2:]])
    assert ended.pop("poison").failure is not None
    assert different(ended, expected) == []


def test_a_device_lost_in_one_lane_is_no_runs_fault(sd: Path, loras: list[AdapterFile]) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with Engine.load(sd, replace(EXACT_FLOAT32, exact=False)) as engine:
        engine.base_models["sd"].family.lanes[1].module.register_forward_pre_hook(fail)
        with pytest.raises(torch.AcceleratorError):
            finish(engine, four(loras))
        assert set(engine.progress()) == {"0", "1", "2", "3"}


def test_threads_that_start_later_keep_all_of_the_process(engine: Engine) -> None:
    finish(engine, [replace(GUIDED, run_id=f"{i}") for i in range(2)])
    threads: list[int] = []
    thread = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert threads == [2]
    assert torch.get_num_threads() == 2
