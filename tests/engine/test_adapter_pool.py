"""Adapters move between disk, host memory and slots, and no run waits for another's."""

import gc
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.engine import AdapterFile, Engine, Finished, RunRequest
from serve_app.engine.adapter_slots import AdapterSlots, LayerWeights, PackedRow
from serve_app.engine.base_model import BaseModel
from tests.engine import tiny_models
from tests.engine.run_engine import ONE_AT_A_TIME, finish, load, start

pytestmark = pytest.mark.slow

SHORT = RunRequest(run_id="short", prompt="a cat", steps=2, width=64, height=64)
COMMON = (*tiny_models.ATTENTION, "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
"""What most adapters change."""


@pytest.fixture(scope="module")
def big(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterFile:
    """Return one of a high rank for every layer."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    return tiny_models.write_lora(path, sd, rank=60, seed=9, targets=tiny_models.EVERYTHING, text=True)


@pytest.fixture
def small(sd: Path) -> BaseModel:
    """Two slots."""
    return load(sd, replace(ONE_AT_A_TIME, adapter_slots=2))


def test_the_least_recently_used_adapter_leaves_and_one_in_use_never(
    small: BaseModel, loras: list[AdapterFile]
) -> None:
    pool = small.pool
    first = start(small, replace(SHORT, adapter=loras[0]))
    second = start(small, replace(SHORT, adapter=loras[1]))
    pool.read_ahead([loras[2]])
    pool.wait_for_loader()
    assert pool.acquire(loras[2]) is None, "both slots are in use"
    pool.release(first.slot)
    assert start(small, replace(SHORT, adapter=loras[2])).slot == first.slot
    assert pool.resident == {loras[1].id, loras[2].id}
    assert second.slot != first.slot
    for slot in (first.slot, second.slot, start(small, replace(SHORT, adapter=loras[1])).slot):
        pool.release(slot)
    start(small, replace(SHORT, adapter=loras[3]))
    assert pool.resident == {loras[1].id, loras[3].id}, "the other was used again"


def test_an_adapter_in_a_slot_is_shared_by_its_runs(small: BaseModel, loras: list[AdapterFile]) -> None:
    runs = [start(small, replace(SHORT, adapter=loras[0], scale=weight)) for weight in (0.1, 1.0)]
    assert runs[0].slot == runs[1].slot
    small.pool.release(runs[0].slot)
    start(small, replace(SHORT, adapter=loras[1]))
    small.pool.read_ahead([loras[2]])
    small.pool.wait_for_loader()
    assert small.pool.acquire(loras[2]) is None, "one run still holds it"


def test_slots_give_way_to_the_memory_they_were_given(sd: Path, loras: list[AdapterFile], big: AdapterFile) -> None:
    with Engine.load(sd, replace(ONE_AT_A_TIME, max_runs=1, adapter_slots=64, adapter_memory=16 * 2**20)) as engine:
        finish(engine, [replace(SHORT, run_id=f"{i}", adapter=lora) for i, lora in enumerate(loras)])
        assert len(engine.resident_adapters) == len(engine.measured.loads) == 5
        assert finish(engine, [replace(SHORT, adapter=big)])["short"].image is not None
        (model,) = engine.base_models.values()
        assert model.store.size_bytes <= 16 * 2**20
        assert big.id in engine.resident_adapters
        ended = finish(engine, [replace(SHORT, run_id=f"{i}", adapter=lora) for i, lora in enumerate(loras)])
        assert all(one.image is not None for one in ended.values())


def test_base_models_share_the_devices_memory(
    sd: Path, loras: list[AdapterFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 4 * 2**20
    monkeypatch.setattr("serve_app.engine.device.CPU_ADAPTER_MEMORY", memory)
    with Engine.load({"a": sd, "b": sd}, replace(ONE_AT_A_TIME, max_runs=1)) as engine:
        for name in "ab":
            finish(engine, [replace(SHORT, base_model=name, adapter=loras[0])])
        assert 0.49 * memory < sum(model.store.most_bytes for model in engine.base_models.values()) <= memory


def test_the_rows_that_a_full_batch_gathers_are_counted_in_the_adapters_memory(sd: Path, tmp_path: Path) -> None:
    """Eight guided runs, each with an adapter of the highest rank that is common, in two batches."""
    memory = 32 * 2**20
    files = [
        tiny_models.write_lora(tmp_path / f"{i}.safetensors", sd, rank=32, seed=i, targets=COMMON) for i in range(9)
    ]
    model = load(sd, replace(ONE_AT_A_TIME, adapter_memory=memory))
    empty = model.adapter_slots.size_bytes
    runs = [start(model, replace(SHORT, run_id=f"{i}", adapter=file)) for i, file in enumerate(files)]
    for batch in (runs[:8], runs[1:]):
        with torch.inference_mode():
            model.runner.denoise(batch)
    gathered = model.adapter_slots.size_bytes - empty
    assert gathered > memory / 4
    assert model.store.most_bytes + gathered <= memory
    assert model.store.most_bytes + gathered > 0.9 * memory, "no more is kept for them than they take"


def test_an_adapter_beyond_the_memory_is_refused_and_others_go_on(
    sd: Path, loras: list[AdapterFile], big: AdapterFile
) -> None:
    with Engine.load(sd, replace(ONE_AT_A_TIME, adapter_memory=2**20)) as engine:
        runs = [replace(SHORT, run_id=f"{i}", adapter=lora) for i, lora in enumerate([big, *loras])]
        refused, *others = finish(engine, runs).values()
    assert refused.failure is not None
    assert "MB of memory, and this server has 0.5 MB" in refused.failure.message
    assert all(one.image is not None for one in others)


def test_each_adapter_takes_its_own_size_beside_a_larger_one(
    sd: Path, loras: list[AdapterFile], big: AdapterFile
) -> None:
    model = load(sd)
    start(model, replace(SHORT, adapter=big))
    before = model.store.size_bytes
    for lora in loras:
        start(model, replace(SHORT, adapter=lora))
    assert model.store.size_bytes - before <= 1.2 * sum(lora.path.stat().st_size for lora in loras)


def held_bytes(model: BaseModel) -> int:
    """Return what the store has given out, and bytes of all other tensors in this process."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del sizes[model.store.lines.data_ptr()]
    return sum(sizes.values()) + model.store.size_bytes


def test_a_lora_is_held_once_at_its_own_size_and_the_first_takes_a_batchs_rows_besides(
    sd: Path, tmp_path: Path
) -> None:
    files = [
        tiny_models.write_lora(tmp_path / f"{i}.safetensors", sd, rank=64, seed=i, targets=tiny_models.EVERYTHING)
        for i in range(5)
    ]
    model = load(sd, replace(ONE_AT_A_TIME, max_rows=2))
    empty, rows, held = model.store.size_bytes, model.adapter_slots.size_bytes, list[int]()
    for file in (None, *files):
        run = start(model, replace(SHORT, adapter=file))
        with torch.inference_mode():
            model.runner.denoise([run])
        model.pool.release(run.slot)
        del run
        held.append(held_bytes(model))
    first, *further = np.diff(held)
    packed, rows = (model.store.size_bytes - empty) / len(files), model.adapter_slots.size_bytes - rows
    assert max(further) <= 1.2 * packed
    assert first <= 1.2 * (packed + rows)


def test_adapters_are_preloaded_into_free_host_memory_only(sd: Path, loras: list[AdapterFile]) -> None:
    model = load(sd, replace(ONE_AT_A_TIME, adapter_slots=2))
    assert model.pool.preload(loras[0])
    model.pool.wait_for_loader()
    assert not model.pool.preload(loras[0]), "it is here"
    assert (model.pool.in_memory, model.pool.resident) == ({loras[0].id}, frozenset())
    size = model.pool.host_bytes
    run = start(model, replace(SHORT, adapter=loras[0]))
    assert model.pool.resident == {loras[0].id}
    assert run.slot
    full = load(sd, replace(ONE_AT_A_TIME, host_memory=2 * size))
    assert [full.pool.preload(lora) for lora in loras[:2]] == [True, False], "how large they are is not known yet"
    full.pool.wait_for_loader()
    assert not full.pool.preload(loras[1]), "two do not fit"
    assert full.pool.in_memory == {loras[0].id}


def test_host_memory_is_used_whole(sd: Path, loras: list[AdapterFile]) -> None:
    """A CPU's slots are host memory, too: what leaves the only slot is held beside it."""
    one = load(sd)
    one.pool.read_ahead([loras[0]])
    one.pool.wait_for_loader()
    size = one.pool.host_bytes
    for_three = load(sd, replace(ONE_AT_A_TIME, adapter_slots=1, host_memory=3 * size))
    held: list[int] = []
    for lora in loras:
        run = start(for_three, replace(SHORT, adapter=lora))
        for_three.pool.release(run.slot)
        held.append(for_three.pool.host_bytes // size)
        if len(held) == 2:
            assert for_three.pool.has_space(), "two more fit"
    assert held == [0, 1, 2, 3, 3]


def test_an_adapter_is_in_memory_once(sd: Path, loras: list[AdapterFile]) -> None:
    model = load(sd)
    empty = model.store.size_bytes
    model.pool.read_ahead([loras[0]])
    model.pool.wait_for_loader()
    packed = model.pool.host_bytes
    start(model, replace(SHORT, adapter=loras[0]))
    assert (model.pool.host_bytes, model.store.size_bytes - empty) == (0, packed)


def test_a_preloaded_adapter_beside_one_of_high_rank_takes_its_own_size(
    sd: Path, loras: list[AdapterFile], big: AdapterFile
) -> None:
    """Packed for the slots it would take that of the largest."""
    small = replace(SHORT, run_id="small", adapter=loras[0])
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        expected = finish(engine, [small])["small"].image
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        finish(engine, [replace(SHORT, adapter=big)])
        ((name, model),) = engine.base_models.items()
        packed = model.pool.host_bytes
        assert engine.preload(loras[0], name)
        model.pool.wait_for_loader()
        assert model.pool.host_bytes - packed <= 1.2 * loras[0].path.stat().st_size
        assert np.array_equal(np.asarray(finish(engine, [small])["small"].image), np.asarray(expected))


def test_waiting_runs_read_each_adapter_once_however_small_host_memory_is(small_sd: Path, tmp_path: Path) -> None:
    """24 jobs of as many adapters take turns in four slots, with one that cannot be read among them."""
    loras = [tiny_models.write_lora(tmp_path / f"{i}.safetensors", small_sd, rank=4, seed=i) for i in range(24)]
    requests = [replace(SHORT, run_id=f"{i}", adapter=lora) for i, lora in enumerate(loras)]
    gone = replace(SHORT, run_id="gone", adapter=AdapterFile("gone", tmp_path / "gone.safetensors"))
    with Engine.load(small_sd, replace(ONE_AT_A_TIME, adapter_slots=4, host_memory=1)) as engine:
        ended = finish(engine, [*requests[:3], gone, *requests[3:]])
        assert {run_id for run_id, one in ended.items() if one.image is None} == {"gone"}
        assert len(engine.measured.loads) == 24


def test_runs_go_on_while_an_adapter_is_being_read(sd: Path, loras: list[AdapterFile], tmp_path: Path) -> None:
    """The file is a pipe that gives nothing until the test writes."""
    pipe = tmp_path / "slow.safetensors"
    os.mkfifo(pipe)
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        engine.add(replace(SHORT, run_id="slow", adapter=AdapterFile("slow", pipe)))
        ended = {one.run_id: one for one in finish_one(engine, replace(SHORT, run_id="quick", adapter=loras[0]))}
        assert ended["quick"].image is not None
        assert engine.progress() == {"slow": (0, 2)}
        threading.Thread(target=pipe.write_bytes, args=(b"",)).start()
        assert finish(engine)["slow"].failure is not None


def test_adapters_are_packed_once_and_not_by_the_step_thread(
    sd: Path, loras: list[AdapterFile], big: AdapterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    packers: list[str] = []
    pack = AdapterSlots.pack

    def watched(adapter_slots: AdapterSlots, weights: LayerWeights) -> PackedRow:
        packers.append(threading.current_thread().name)
        return pack(adapter_slots, weights)

    monkeypatch.setattr(AdapterSlots, "pack", watched)
    with Engine.load(sd, replace(ONE_AT_A_TIME, adapter_slots=1)) as engine:
        before = finish(engine, [replace(SHORT, adapter=loras[0])])["short"].image
        finish(engine, [replace(SHORT, adapter=big)])
        after = finish(engine, [replace(SHORT, adapter=loras[0])])["short"].image
    assert np.array_equal(np.asarray(before), np.asarray(after))
    assert sum(name.startswith("adapter-loader") for name in packers) == 2
    assert threading.current_thread().name not in packers


def finish_one(engine: Engine, request: RunRequest) -> list[Finished]:
    engine.add(request)
    while True:
        ended = engine.step()
        if any(one.run_id == request.run_id for one in ended):
            return ended
