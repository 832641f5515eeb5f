"""Runs requests on an engine as its step thread does."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from serve_app.engine import Checkpoint, Engine, EngineOptions, Finished, RunRequest
from serve_app.engine.base_model import BaseModel
from serve_app.engine.run import Run

STEP_LIMIT = 2000
ONE_AT_A_TIME = EngineOptions(device="cpu", dtype="float32", exact=False)
"""Options of tests whose runs meet no others: what keeps their bits beside others is not measured, which takes 1 s."""


def finish(engine: Engine, requests: Iterable[RunRequest] = ()) -> dict[str, Finished]:
    """Adds the requests and steps until nothing is left. A run that ends twice fails the test."""
    for request in requests:
        engine.add(request)
    ended: dict[str, Finished] = {}
    for _ in range(STEP_LIMIT):
        for one in engine.step():
            assert one.run_id not in ended, f"{one.run_id} ended twice"
            ended[one.run_id] = one
        if not engine.has_work:
            return ended
    raise AssertionError(f"still at work after {STEP_LIMIT} steps: {engine.progress()}")


def add_together(engine: Engine, requests: Iterable[RunRequest]) -> None:
    """Add requests that need no adapter, and wait until their prompts are encoded: as many as may join the next step."""
    for request in requests:
        engine.add(request)
    wait_for_prompts(engine)


def wait_for_prompts(engine: Engine) -> None:
    """Wait until the prompts of as many runs as may join the next step are encoded, and so their adapters read."""
    while True:
        changes = engine.live.changes
        if all(waiting.conditioning is not None for waiting in engine.live.waiting()[: engine.options.runs]):
            return
        engine.live.wait_for_change(changes, within_s=1.0)


def load(source: Path | Checkpoint, options: EngineOptions = ONE_AT_A_TIME) -> BaseModel:
    return BaseModel.load("m", source, options, lambda: None)


@torch.inference_mode()
def start(model: BaseModel, request: RunRequest) -> Run:
    """Return a run at its first step, its prompt encoded, its adapter read and in a slot."""
    for _ in range(STEP_LIMIT):
        model.pool.read_ahead([] if request.adapter is None else [request.adapter])
        model.pool.wait_for_loader()
        conditioning = model.encode(request)
        run = None if conditioning is None else model.start(request, conditioning, 0.0)
        if run is not None:
            return run
    raise AssertionError("the adapter never arrived")


@torch.inference_mode()
def final_latents(model: BaseModel, requests: Iterable[RunRequest]) -> dict[str, torch.Tensor]:
    """Final latents of the requests in one batch, each at its own step, by run id."""
    runs = [start(model, request) for request in requests]
    while live := [run for run in runs if not run.is_done]:
        model.runner.denoise(live)
    for run in runs:
        model.pool.release(run.slot)
    return {run.request.run_id: run.latents for run in runs}


def begun_at_random(request: RunRequest, chance: random.Random, *, masks: bool = True) -> RunRequest:
    """Return the request so that half of them begin from an image, and half of those keep a part of it."""
    numbers, sides = np.random.RandomState(chance.getrandbits(32)), (request.height, request.width)
    image, mask = numbers.randint(0, 256, (*sides, 3), np.uint8), numbers.randint(0, 256, sides, np.uint8)
    strength = chance.choice([0.5, 0.9, 1.0])
    choices = [{}, {}, {"image": image}, {"image": image, "mask": mask} if masks else {"image": image}]
    return replace(request, strength=strength, **chance.choice(choices))


def same_alone(
    folder: Path, options: EngineOptions, requests: Sequence[RunRequest], chance: random.Random
) -> tuple[int, int]:
    """Make runs in whatever company comes; return how many have the bytes they have alone, and the widest batch."""
    waiting, together, widest = list(requests), dict[str, Finished](), 0
    with TemporaryDirectory() as findings, Engine.load(folder, options, findings=Path(findings)) as engine:
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), chance.randint(0, 4))):
                engine.add(waiting.pop())
            wait_for_prompts(engine)
            together |= {one.run_id: one for one in engine.step()}
            widest = max([widest, *(step.rows for step in engine.measured.steps)])
        with Engine.load(folder, options, findings=Path(findings)) as another:
            alone = {one.run_id: finish(another, [one])[one.run_id] for one in requests}
    failures = [one.failure for one in (*together.values(), *alone.values()) if one.failure]
    assert not failures
    same = sum(np.array_equal(np.asarray(alone[name].image), np.asarray(one.image)) for name, one in together.items())
    return same, widest
