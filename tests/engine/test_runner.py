"""The runner's warm-up, eager and compiled, in a service that does not ask for exact images."""

import platform
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_app.engine.base_model import BaseModel
from serve_app.engine.device import reuse_freed_memory
from serve_app.engine.findings import Findings
from serve_app.engine.runner import Runner
from tests.engine.conftest import EXACT_FLOAT32


def test_nothing_but_one_image_is_computed_where_forwards_are_neither_exact_nor_compiled(sd: Path) -> None:
    model = BaseModel.load("m", sd, replace(EXACT_FLOAT32, exact=False), lambda: None)
    widths: list[int] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[0]))
    model.warm_up(64, 64)
    assert widths == [2]


def test_every_static_width_is_computed_once_without_exact_mode(sd: Path) -> None:
    model = BaseModel.load("m", sd, replace(EXACT_FLOAT32, exact=False, max_rows=8), lambda: None)
    model.runner = Runner(
        model.family, model.runner.adapter_slots, Findings(None, {}), max_rows=8, exact=False, static=True
    )
    widths: list[int] = []
    model.denoiser.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[0]))
    model.warm_up(64, 64)
    *warm, step = widths
    assert warm == [1, 2, 4, 8]
    assert step == 2, "the step of the warm-up's own image, with guidance"


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
