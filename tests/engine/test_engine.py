"""Joining, leaving and failing, through the engine's public interface."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Failure
from serve_app.engine import AdapterFile, Engine, EngineOptions, Finished, RunRequest
from serve_app.engine.device import OUT_OF_MEMORY_MESSAGE
from serve_app.engine.families.unet import UNetFamily
from tests.engine import tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.run_engine import ONE_AT_A_TIME, add_together, finish

SHORT = RunRequest(run_id="short", prompt="a cat", steps=3, width=64, height=64)
LONG = replace(SHORT, run_id="long", steps=40)


@pytest.fixture
def alone(engine: Engine) -> Finished:
    """Return what the short run gives when nothing else runs."""
    return finish(engine, [SHORT])["short"]


@pytest.fixture
def exploding(sd: Path, tmp_path: Path) -> AdapterFile:
    """Return one of finite weights that overflow the forward pass."""
    path = tmp_path / "exploding.safetensors"
    return tiny_models.write_lora(path, sd, rank=4, seed=1, targets=tiny_models.EVERYTHING, size=1e19)


def same(one: Finished, other: Finished) -> bool:
    return one.image is not None and other.image is not None and np.array_equal(one.image, other.image)


@pytest.mark.slow
def test_a_run_joining_mid_batch_gets_the_same_image_as_alone(engine: Engine, alone: Finished) -> None:
    engine.add(LONG)
    for _ in range(5):
        engine.step()
    engine.add(SHORT)
    ended = finish(engine)
    assert same(ended["short"], alone)
    assert ended["long"].image is not None


@pytest.mark.slow
def test_a_run_starts_at_the_step_after_its_prompt_was_encoded(engine: Engine) -> None:
    """It waits for nothing else, since it needs no adapter."""
    engine.warm_up(LONG.width, LONG.height)  # or the first step may only measure
    for request in (LONG, SHORT):
        engine.add(request)
        while not all(waiting.conditioning for waiting in engine.live.waiting()):
            engine.live.wait_for_change(engine.live.changes, within_s=1.0)
        engine.step()
    assert engine.progress() == {"long": (2, 40), "short": (1, 3)}


def test_prompts_are_encoded_ahead_for_twice_as_many_runs_as_fit(sd: Path) -> None:
    all_added = threading.Event()
    with Engine.load(sd, EngineOptions(device="cpu", dtype="float32", max_rows=4)) as engine:
        encoder = engine.base_models["sd"].family.components["text_encoder"].module
        encoder.register_forward_pre_hook(lambda *_: (all_added.wait(60), None)[1])
        for i in range(7):
            engine.add(replace(SHORT, run_id=f"{i}", prompt=f"a cat {i}"))
        all_added.set()
        while not engine.live.waiting()[3].conditioning:
            engine.live.wait_for_change(engine.live.changes, within_s=1.0)
    assert [run.conditioning is not None for run in engine.live.waiting()] == [True] * 4 + [False] * 3


def test_closing_ends_every_thread(sd: Path, loras: list[AdapterFile]) -> None:
    def ours() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if not thread.daemon}  # progress bars begin a daemon

    before = ours()
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        assert finish(engine, [replace(SHORT, adapter=loras[0])])["short"].image is not None
        assert ours() > before
    assert ours() <= before


def test_who_waits_for_a_change_goes_on_at_any(engine: Engine) -> None:
    since = engine.live.changes
    engine.live.wake()
    waiting = threading.Thread(target=engine.live.wait_for_change, args=(since,), kwargs={"within_s": 90}, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.slow
def test_runs_go_on_while_a_prompt_is_encoded(engine: Engine) -> None:
    finish(engine, [replace(LONG, steps=1)])
    encoded = threading.Event()
    (model,) = engine.base_models.values()
    model.family.components["text_encoder"].module.register_forward_pre_hook(lambda *_: (encoded.wait(60), None)[1])
    engine.add(LONG)
    engine.add(replace(SHORT, prompt="a dog"))
    while engine.progress()["long"] != (20, 40):
        engine.step()
    assert engine.progress()["short"] == (0, 3)
    encoded.set()
    assert all(one.image is not None for one in finish(engine).values())


@pytest.mark.slow
def test_an_aborted_run_frees_its_place_within_a_step_and_is_not_returned(engine: Engine) -> None:
    engine.add(LONG)
    engine.step()
    free = engine.free_runs
    assert engine.abort("long")
    assert not engine.abort("long")
    assert engine.free_runs == free + 1
    assert engine.step() == []
    assert not engine.has_work
    assert set(finish(engine, [SHORT])) == {"short"}


@pytest.mark.slow
def test_a_key_may_be_used_again_right_after_abort(engine: Engine, alone: Finished) -> None:
    engine.add(replace(LONG, run_id="short"))
    engine.step()
    assert engine.abort("short")
    assert same(finish(engine, [SHORT])["short"], alone)


@pytest.mark.slow
def test_a_live_key_is_refused(engine: Engine) -> None:
    engine.add(SHORT)
    with pytest.raises(ValueError, match="short"):
        engine.add(SHORT)
    finish(engine)


@pytest.mark.slow
def test_abort_while_waiting_for_an_adapter(engine: Engine, loras: list[AdapterFile]) -> None:
    engine.add(replace(SHORT, adapter=loras[0]))
    assert engine.abort("short")
    assert engine.step() == []
    assert not engine.has_work


@pytest.mark.slow
def test_runs_beyond_the_capacity_wait_their_turn(sd: Path) -> None:
    with Engine.load(sd, replace(ONE_AT_A_TIME, max_rows=4)) as engine:
        add_together(engine, [replace(SHORT, run_id=f"{i}") for i in range(5)])
        assert engine.free_runs == 0
        engine.step()
        assert sum(done > 0 for done, _ in engine.progress().values()) == 2
        assert set(finish(engine)) == {"0", "1", "2", "3", "4"}


def test_guidance_over_half_of_the_steps_takes_three_quarters_of_the_rows_and_another_run_the_freed_ones(
    sd: Path,
) -> None:
    with Engine.load(sd, replace(ONE_AT_A_TIME, max_rows=4)) as engine:
        add_together(engine, [replace(SHORT, run_id=f"{i}", steps=8, guidance_end=0.5) for i in range(3)])
        assert all(one.image is not None for one in finish(engine).values())
    rows = [step.rows for step in engine.measured.steps]
    assert rows == [4] * 4 + [2 + 1 + 1] * 4 + [1] * 4, "the third joins where the guidance of two has ended"
    assert sum(rows) == 0.75 * 3 * 8 * 2


@pytest.mark.slow
@pytest.mark.parametrize(("request_", "code", "reason"), [
    (replace(SHORT, base_model="other"), FailureCode.GENERATION_FAILED, "other"),
    (replace(SHORT, sampler="magic"), FailureCode.GENERATION_FAILED, "magic"),
    (replace(SHORT, sampler="lcm", steps=999), FailureCode.GENERATION_FAILED, "999"),
    (replace(SHORT, guidance_start=0.5, guidance_end=0.5), FailureCode.GENERATION_FAILED, "not 0.5 and 0.5"),
    (replace(SHORT, guidance_end=float("nan")), FailureCode.GENERATION_FAILED, "guidance_end: must be above"),
    (replace(SHORT, adapter=AdapterFile("no", Path("/no/such.safetensors"))), FailureCode.LORA_UNAVAILABLE, "file"),
])  # fmt: skip
def test_what_cannot_be_made_fails_by_name_and_alone(
    engine: Engine, alone: Finished, request_: RunRequest, code: FailureCode, reason: str
) -> None:
    ended = finish(engine, [replace(request_, run_id="bad"), SHORT])
    failure = ended["bad"].failure
    assert failure is not None
    assert failure.code is code
    assert reason in failure.message
    assert "/no/such" not in failure.message, "a customer reads it"
    assert same(ended["short"], alone)


@pytest.mark.slow
def test_an_adapter_that_comes_back_is_read_again(engine: Engine, loras: list[AdapterFile], tmp_path: Path) -> None:
    late = AdapterFile("late", tmp_path / "late.safetensors")
    assert finish(engine, [replace(SHORT, adapter=late)])["short"].failure is not None
    late.path.write_bytes(loras[0].path.read_bytes())
    assert finish(engine, [replace(SHORT, adapter=late)])["short"].image is not None


@pytest.mark.slow
def test_a_poisonous_adapter_fails_its_own_run_and_touches_no_other(
    engine: Engine, alone: Finished, exploding: AdapterFile, sd: Path, tmp_path: Path
) -> None:
    """Finite weights that overflow the forward pass, and weights that are no numbers."""
    tensors = tiny_models.random_lora(sd, rank=4, seed=1)
    poison = tiny_models.write_adapter(
        tmp_path / "n.safetensors", {name: tensor * float("nan") for name, tensor in tensors.items()}
    )
    ended = finish(
        engine,
        [replace(SHORT, run_id="exploding", adapter=exploding), replace(SHORT, run_id="nan", adapter=poison), SHORT],
    )
    assert same(ended["short"], alone)
    failures = {key: one.failure.code for key, one in ended.items() if one.failure is not None}
    assert failures == {"exploding": FailureCode.GENERATION_FAILED, "nan": FailureCode.LORA_UNAVAILABLE}


@pytest.mark.slow
def test_the_slot_of_a_poisonous_adapter_is_clean_for_the_next(
    sd: Path, exploding: AdapterFile, loras: list[AdapterFile]
) -> None:
    good = replace(SHORT, adapter=loras[0])
    with Engine.load(sd, replace(ONE_AT_A_TIME, adapter_slots=1)) as engine:
        finish(engine, [replace(SHORT, adapter=exploding)])
        after = finish(engine, [good])["short"]
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        assert same(after, finish(engine, [good])["short"])


class _Forward:
    """Stands before the UNet's own forward and raises as a device would."""

    def __init__(self, engine: Engine, error: Exception, *, rows_above: int) -> None:
        self.error, self.rows_above, self.widths = error, rows_above, list[int]()
        (model,) = engine.base_models.values()
        model.denoiser.register_forward_pre_hook(self)

    def __call__(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.widths.append(inputs[0].shape[0])
        if inputs[0].shape[0] > self.rows_above:
            raise self.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_makes_batches_smaller_and_loses_nothing(sd: Path, error: Exception) -> None:
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        expected = finish(engine, [replace(SHORT, run_id=f"{i}", seed=i) for i in range(4)])
        device = _Forward(engine, error, rows_above=4)
        add_together(engine, [replace(SHORT, run_id=f"{i}", seed=i) for i in range(4)])
        ended = finish(engine)
    assert all(one.image is not None for one in ended.values())
    for key, one in ended.items():
        assert abs(np.asarray(one.image, int) - np.asarray(expected[key].image, int)).max() <= 1
    assert device.widths.count(8) == 1, "the batch that did not fit was tried again"


class _FullAfterTheForwardPass(TorchFunctionMode):
    """Runs out of memory once, where a batch of more than two runs is moved along the noise schedule."""

    failed = False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.failed and func is torch.mul and "out" in (kwargs or {}) and len(args[1]) > 2:
            self.failed = True
            raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_out_of_memory_after_the_forward_pass_changes_no_noise(sd: Path, findings: Path) -> None:
    requests = [replace(SHORT, run_id=f"{i}", seed=i, sampler="euler-a") for i in range(4)]
    with Engine.load(sd, EXACT_FLOAT32, findings=findings) as engine:
        expected = finish(engine, requests)
        add_together(engine, requests)
        with _FullAfterTheForwardPass() as device:
            ended = finish(engine)
    assert device.failed
    for key, one in ended.items():
        assert same(one, expected[key])


def test_an_error_of_a_batch_that_is_no_lack_of_memory_leaves_batches_as_wide(sd: Path) -> None:
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        device = _Forward(engine, RuntimeError("not today"), rows_above=2)
        add_together(engine, [replace(SHORT, run_id=f"{i}", seed=i) for i in range(2)])
        ended = finish(engine)
    assert all(one.image is not None for one in ended.values())
    assert device.widths == [4, 2, 2] * SHORT.steps


@pytest.mark.slow
def test_out_of_memory_while_shapes_are_measured_makes_them_narrower(sd: Path) -> None:
    with Engine.load(sd, EXACT_FLOAT32) as engine:
        device = _Forward(engine, torch.OutOfMemoryError("out of memory"), rows_above=4)
        ended = finish(engine, [replace(SHORT, run_id=f"{i}", seed=i) for i in range(4)])
        (alone,) = finish(engine, [replace(SHORT, run_id="2", seed=2)]).values()
    assert device.widths[0] > 4, "the widest shape was measured first"
    assert all(one.image is not None for one in ended.values())
    assert same(ended["2"], alone), "exact at the shapes that fit"


@pytest.mark.slow
def test_out_of_memory_in_padding_makes_it_less(sd: Path) -> None:
    def depend_on_batch(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], answer: Any) -> Any:
        return (answer[0] * (1 + inputs[0].shape[0] * 1e-4), *answer[1:])

    with Engine.load(sd, EXACT_FLOAT32) as engine:
        (model,) = engine.base_models.values()
        model.denoiser.register_forward_hook(depend_on_batch)
        finish(engine, [SHORT])
        device = _Forward(engine, torch.OutOfMemoryError("out of memory"), rows_above=4)
        ended = finish(engine, [SHORT])
    assert device.widths[0] == EXACT_FLOAT32.max_rows, "no narrower shape agrees with the widest"
    assert ended["short"].image is not None


@pytest.mark.slow
def test_out_of_memory_with_one_run_fails_that_run_by_name(sd: Path) -> None:
    with Engine.load(sd, ONE_AT_A_TIME) as engine:
        _Forward(engine, torch.OutOfMemoryError("out of memory"), rows_above=1)
        ended = finish(engine, [SHORT, replace(SHORT, run_id="one row", guidance=1.0)])
    assert ended["short"].failure is not None
    assert ended["short"].failure.code is FailureCode.OUT_OF_MEMORY
    assert ended["one row"].image is not None


@pytest.mark.slow
def test_out_of_memory_at_the_start_fails_that_run_and_frees_its_slot(sd: Path, loras: list[AdapterFile]) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with Engine.load(sd, replace(ONE_AT_A_TIME, adapter_slots=1)) as engine:
        (model,) = engine.base_models.values()
        hook = model.family.components["text_encoder"].module.register_forward_pre_hook(refuse)
        ended = finish(engine, [replace(SHORT, adapter=loras[0])])
        hook.remove()
        after = finish(engine, [replace(SHORT, run_id="after", adapter=loras[1])])
    assert ended["short"].failure is not None
    assert ended["short"].failure == Failure(code=FailureCode.OUT_OF_MEMORY, message=OUT_OF_MEMORY_MESSAGE)
    assert after["after"].image is not None


@pytest.mark.slow
def test_a_text_encoder_that_fails_costs_one_run_alone(engine: Engine, alone: Finished) -> None:
    def refuse(*_: object) -> None:
        hook.remove()
        raise RuntimeError("not today")

    (model,) = engine.base_models.values()
    hook = model.family.components["text_encoder"].module.register_forward_pre_hook(refuse)
    ended = finish(engine, [replace(SHORT, run_id="first", prompt="a dog"), SHORT])
    assert ended["first"].failure == Failure(
        code=FailureCode.GENERATION_FAILED, message="making the image failed: RuntimeError"
    )
    assert same(ended["short"], alone)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["denoiser", "text encoder", "decoder"])
def test_a_lost_device_is_no_runs_fault(engine: Engine, part: str) -> None:
    """Reported as a run's own failure, it would fail every job this process ever claims."""

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    family = engine.base_models["sd"].family
    assert isinstance(family, UNetFamily)
    encoder = family.components["text_encoder"].module
    modules = {"denoiser": family.components["unet"].module, "text encoder": encoder, "decoder": family.vae.decoder}
    modules[part].register_forward_pre_hook(fail)
    for request in (SHORT, LONG):
        engine.add(request)
    with pytest.raises(torch.AcceleratorError):
        finish(engine)
    assert set(engine.progress()) - {"short"} == {"long"}
    assert part != "denoiser" or "short" in engine.progress()


@pytest.mark.slow
def test_a_size_the_factor_does_not_divide_is_cropped_from_the_next_one_up(engine: Engine) -> None:
    larger = finish(engine, [replace(SHORT, width=64, height=72)])["short"].image
    exact = finish(engine, [replace(SHORT, width=60, height=66)])["short"].image
    assert larger is not None
    assert exact is not None
    assert exact.shape == (66, 60, 3)
    assert np.array_equal(exact, larger[3:69, 2:62])


@pytest.mark.slow
def test_add_and_abort_from_many_threads_while_stepping(engine: Engine) -> None:
    barrier = threading.Barrier(4)
    aborted: list[str] = []

    def customer(name: int) -> None:
        barrier.wait()
        for i in range(5):
            key = f"{name}-{i}"
            engine.add(replace(SHORT, run_id=key))
            if i % 2 and engine.abort(key):
                aborted.append(key)

    threads = [threading.Thread(target=customer, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    barrier.wait()
    ended: dict[str, Finished] = {}
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        ended |= {one.run_id: one for one in engine.step()}
    assert set(ended) | set(aborted) == {f"{name}-{i}" for name in range(3) for i in range(5)}
    assert not set(ended) & set(aborted)


@pytest.mark.slow
def test_generate_needs_no_server(sd: Path, loras: list[AdapterFile], findings: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Engine.load(sd, EXACT_FLOAT32, findings=findings) as engine:
        images = engine.generate("a cat", seeds=(1, 2), adapter=loras[0].path, steps=3, width=64, height=64,
                                 on_progress=lambda done, total: seen.append((done, total)))  # fmt: skip
        with pytest.raises(RuntimeError, match="magic"):
            engine.generate("a cat", sampler="magic", width=64, height=64)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            engine.generate("a cat", adapters={str(loras[0].path): 0.5, "nowhere.safetensors": 0.5})
        with pytest.raises(IndexError):  # an interruption between two steps
            engine.generate("a cat", seeds=(3, 4), steps=3, width=64, height=64, on_progress=lambda *_: [].pop())
        again = engine.generate("a cat", seeds=(1,), adapter=str(loras[0].path), steps=3, width=64, height=64)
    assert again == images[:1]
    assert [image.size for image in images] == [(64, 64), (64, 64)]
    assert seen[-1] == (6, 6)
    assert seen == sorted(seen)


@pytest.mark.slow
def test_an_engine_needs_a_base_model_and_takes_its_threads(sd: Path) -> None:
    with pytest.raises(ValueError, match="base_models"):
        Engine.load({})
    before = torch.get_num_threads()
    try:
        with Engine.load({"a": sd}, replace(ONE_AT_A_TIME, threads=before + 1)) as engine:
            engine.warm_up(64, 64)
            assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "wrong", [{"max_rows": 1}, {"dtype": "float8"}, {"adapter_slots": 0}, {"max_rank": 999}, {"threads": -1}]
)
def test_an_impossible_option_is_named(wrong: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineOptions(**wrong)  # pyright: ignore[reportArgumentType]
