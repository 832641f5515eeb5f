"""The runner's warm-up in a service that does not ask for exact images, and what a pass leaves."""

import platform
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_app.engine import RunRequest
from serve_app.engine.device import reuse_freed_memory
from tests.engine.run_engine import load, start


def test_nothing_but_one_image_is_computed_where_forwards_are_not_exact(sd: Path) -> None:
    model = load(sd)
    widths: list[int] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[0]))
    model.warm_up(64, 64)
    assert widths == [2]


def test_a_step_draws_noise_for_the_samplers_that_add_any(sd: Path) -> None:
    model = load(sd)
    request = RunRequest(run_id="k", prompt="a cat", steps=2, width=64, height=64)
    runs = [start(model, replace(request, run_id=name, sampler=name)) for name in ("euler-a", "ddim")]
    before = [run.generator.get_state() for run in runs]
    with torch.inference_mode():
        model.runner.denoise(runs[1:])
        model.runner.denoise(runs[:1])
    assert [torch.equal(run.generator.get_state(), state) for run, state in zip(runs, before, strict=True)] == [
        False,
        True,
    ]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep what was freed")
def test_a_pass_reuses_the_memory_that_the_pass_before_it_freed() -> None:
    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(10):
            torch.ones(2**20).add(torch.ones(2**20))  # three tensors of 1,024 pages each
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    reuse_freed_memory()
    page_faults()
    assert page_faults() < 1024
