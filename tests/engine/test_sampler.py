"""Every row of every table against a step of diffusers' scheduler object."""

from itertools import product
from typing import Any

import pytest
import torch

from serve_app.engine.families.unet import SAMPLERS
from serve_app.engine.sampler import advance, diffusers_scheduler, make_schedule
from serve_app.engine_options import Sampler
from tests.engine.tiny_models import TRAINING

SPACINGS = ("leading", "linspace", "trailing")


@pytest.mark.parametrize(("sampler", "prediction", "spacing"), [
    (sampler, prediction, spacing)
    for sampler, prediction, spacing in product(SAMPLERS, ("epsilon", "v_prediction", "sample"), SPACINGS)
    if not (sampler is Sampler.LCM and spacing != "leading")
])  # fmt: skip
@pytest.mark.parametrize("steps", [1, 4, 30])
def test_each_step_is_the_step_of_diffusers(sampler: Sampler, prediction: str, spacing: str, steps: int) -> None:
    config: dict[str, Any] = {
        **TRAINING,
        "prediction_type": prediction,
        "timestep_spacing": spacing,
        "clip_sample": False,
        "steps_offset": 1,
    }
    reference = diffusers_scheduler(sampler, config)
    reference.set_timesteps(steps)
    schedule = make_schedule(sampler, config, steps)
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(1, 2, 4, 4, generator=generator) * reference.init_noise_sigma
    ours, before = theirs.clone(), torch.zeros_like(theirs)
    for i, timestep in enumerate(reference.timesteps):
        seen = reference.scale_model_input(theirs, timestep)
        size = max(1.0, float(theirs.abs().max()))
        assert torch.allclose(ours * schedule.table[i, 0], seen, atol=1e-5 * size)
        output = torch.tanh(seen) + 0.001 * float(timestep)
        noise_seed = torch.Generator().manual_seed(100 + i)
        extra = {} if sampler is Sampler.DPMPP_2M else {"generator": noise_seed}
        theirs = reference.step(output, timestep, theirs, **extra).prev_sample
        noise = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(100 + i)) if schedule.noisy[i] else None
        ours, before = advance(ours, output, before, schedule.table[i : i + 1], noise)
        assert torch.allclose(ours, theirs, atol=2e-5 * size), i


@pytest.mark.parametrize(
    "extra",
    [
        {"use_karras_sigmas": True},
        {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"},
    ],
)
@pytest.mark.parametrize("sampler", [Sampler.EULER, Sampler.DPMPP_2M])
def test_noise_schedules_of_the_folder_are_followed(sampler: Sampler, extra: dict[str, Any]) -> None:
    reference = diffusers_scheduler(sampler, {**TRAINING, **extra})
    reference.set_timesteps(12)
    schedule = make_schedule(sampler, {**TRAINING, **extra}, 12)
    assert torch.allclose(schedule.timesteps, reference.timesteps.float())
    x = torch.ones(1, 1, 2, 2) * reference.init_noise_sigma
    ours, before = x.clone(), torch.zeros_like(x)
    for i, timestep in enumerate(reference.timesteps):
        output = reference.scale_model_input(x, timestep) * 0.3
        x = reference.step(output, timestep, x).prev_sample
        ours, before = advance(ours, output, before, schedule.table[i : i + 1], None)
    assert torch.allclose(ours, x, atol=1e-4)


@pytest.mark.parametrize(("sampler", "setting"), [
    (Sampler.DDIM, {"clip_sample": True, **TRAINING}),
    (Sampler.DDIM, {"thresholding": True, "clip_sample": False, **TRAINING}),
    (Sampler.FLOW_EULER, {"stochastic_sampling": True}),
    (Sampler.FLOW_EULER, {"invert_sigmas": True}),
])  # fmt: skip
def test_a_setting_that_cannot_be_honored_is_refused_by_name(sampler: Sampler, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        make_schedule(sampler, setting, 10)


@pytest.mark.parametrize("sampler", [Sampler.EULER, Sampler.DDIM, Sampler.DPMPP_2M])
def test_a_step_count_that_the_spacing_rounds_to_another_is_refused(sampler: Sampler) -> None:
    """diffusers' trailing spacing makes 62 steps of 61."""
    with pytest.raises(ValueError, match="cannot make 61 steps"):
        make_schedule(sampler, {**TRAINING, "clip_sample": False, "timestep_spacing": "trailing"}, 61)


def test_rows_of_different_samplers_advance_together() -> None:
    config = {**TRAINING, "clip_sample": False}
    schedules = [make_schedule(sampler, config, 6) for sampler in SAMPLERS]
    x, output, before = torch.randn(3, len(schedules), 2, 4, 4)
    table = torch.stack([schedule.table[2] for schedule in schedules])
    together, _ = advance(x, output, before, table, None)
    for i in range(len(schedules)):
        alone, _ = advance(x[i : i + 1], output[i : i + 1], before[i : i + 1], table[i : i + 1], None)
        assert torch.equal(together[i], alone[0])


FLOW_SETTINGS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({}, {}),
    ({"shift": 3.0}, {}),
    ({"use_dynamic_shifting": True}, {"mu": 0.8}),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.1}, {"mu": 1.1}),
    ({"use_karras_sigmas": True}, {}),
]


@pytest.mark.parametrize(("config", "timing", "levels"), [
    (config, timing, levels)
    for (config, timing), levels in product(FLOW_SETTINGS, (1, 4, 30))
    if not ("shift_terminal" in config and levels == 1)  # the last level of one is the first
])  # fmt: skip
def test_each_step_of_flow_matching_is_the_step_of_diffusers(
    config: dict[str, Any], timing: dict[str, float], levels: int
) -> None:
    sigmas = [1 - i / levels for i in range(levels)]
    reference = diffusers_scheduler(Sampler.FLOW_EULER, config)
    reference.set_timesteps(sigmas=sigmas, **timing)
    schedule = make_schedule(Sampler.FLOW_EULER, config, levels, sigmas=sigmas, **timing)
    assert torch.equal(schedule.timesteps, reference.timesteps)
    theirs = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    ours, before = theirs * schedule.noise_scale, torch.zeros_like(theirs)
    for i, timestep in enumerate(reference.timesteps):
        assert torch.allclose(ours * schedule.table[i, 0], theirs, atol=1e-5)
        output = torch.tanh(theirs) + 0.001 * float(timestep)
        theirs = reference.step(output, timestep, theirs).prev_sample
        ours, before = advance(ours, output, before, schedule.table[i : i + 1], None)
        assert torch.allclose(ours, theirs, atol=1e-5), i
