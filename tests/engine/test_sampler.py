"""Every pass of every table is the step of diffusers' own scheduler."""

import inspect
import logging
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.domain.families import UNET_SAMPLERS as SAMPLERS
from serve_app.domain.samplers import Sampler, SigmaSpacing, parse_sampler, spacings_of
from serve_app.engine.sampler import DIFFUSERS, SPACING, Schedule, advance, make_schedule, make_scheduler, scaled_input
from tests.engine.diffusers_reference import BrownianPath
from tests.engine.tiny_models import TRAINING, diffusers

OTHERS = ("v_prediction", "sample")
"""Predictions other than epsilon."""
NO_SAMPLE = ("pndm", "dpm++sde", "euler-a", "dpm2", "dpm2-a")
"""Samplers that diffusers computes for epsilon and v_prediction only."""
STEPS = (1, 2, 4, 8, 25)
SPACINGS = (None, *(spacing for spacing in SigmaSpacing if spacing is not SigmaSpacing.SGM_UNIFORM))
"""SGM-uniform is trailing under another name."""
SHAPE = (1, 2, 4, 4)
ROUNDED = ("euler-a", "heun", "dpm2", "dpm2-a", "dpm++sde")
"""Samplers whose float32 in diffusers loses digits where latents of size 4096 are subtracted from each other: against
float64 their error is three to fifteen times that of the table."""
ROUNDED_AWAY = (
    (Sampler.DPM2_A, SigmaSpacing.BETA),
    *((Sampler.DPMPP_SDE, spacing) for spacing in (SigmaSpacing.KARRAS, SigmaSpacing.EXPONENTIAL, SigmaSpacing.BETA)),
)
"""Samplers and spacings that are refused with zero terminal SNR, where diffusers' float32 leaves too few digits."""


def own_scheduler(**config: Any) -> Any:
    return diffusers.DDIMScheduler.from_config({**TRAINING, "clip_sample": False, "steps_offset": 1, **config})


def worst_difference(scheduler: Any, schedule: Schedule, steps: int, **timing: Any) -> float:
    """Return the largest difference of all passes, as a part of the latents' size, under a denoiser that is not linear."""
    scheduler.set_timesteps(steps, **timing)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)
    generator, noises = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    if hasattr(scheduler, "noise_sampler"):
        scheduler.noise_sampler = BrownianPath(generator, SHAPE)
    takes = inspect.signature(scheduler.step).parameters
    extra = {name: value for name, value in (("generator", generator), ("eta", 0.0)) if name in takes}
    theirs = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * schedule.noise_scale
    state = [theirs, *[torch.zeros_like(theirs)] * (schedule.size - 1)]
    worst = 0.0
    assert torch.allclose(schedule.timesteps, scheduler.timesteps.float())
    for i, timestep in enumerate(scheduler.timesteps):

        def denoised(seen: Tensor, timestep: Tensor = timestep) -> Tensor:
            return torch.tanh(seen) + 1e-4 * float(timestep)

        seen = scaled_input(scheduler, theirs, timestep)
        theirs = scheduler.step(denoised(seen), timestep, theirs, **extra).prev_sample
        noise = torch.randn(SHAPE, generator=noises) if schedule.noisy[i] else None
        table = schedule.table[i : i + 1, : schedule.size, : 2 + schedule.size]
        state = advance(state, denoised(state[0] * schedule.inputs[i, 0]), table, noise)
        worst = max(worst, float((state[0] - theirs).abs().max() / max(1.0, float(theirs.abs().max()))))
    return worst


def test_a_sampler_has_the_spacings_that_diffusers_has_for_it() -> None:
    for sampler in Sampler:
        known = inspect.signature(getattr(diffusers, DIFFUSERS[sampler][0]).__init__).parameters
        assert spacings_of(sampler) == tuple(each for each in SigmaSpacing if SPACING[each].keys() <= known.keys())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prediction", "spacing"), [*product(["epsilon"], SPACINGS), *product(OTHERS, (None, SigmaSpacing.KARRAS))]
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_pass_is_the_step_of_diffusers(sampler: Sampler, spacing: SigmaSpacing | None, prediction: str) -> None:
    """The soak of test_parity has every prediction with every spacing and number of steps, of which few are here."""
    name = sampler if spacing is None else f"{sampler}-{spacing}"
    own = own_scheduler(prediction_type=prediction)
    if spacing not in (None, *spacings_of(sampler)):
        with pytest.raises(ValueError, match=f"{re.escape(sampler)} may be alone or with -.*, not '"):
            make_scheduler(name, own)
        return
    scheduler = make_scheduler(name, own)
    if prediction == "sample" and sampler in NO_SAMPLE:
        with pytest.raises(ValueError, match="prediction_type"):
            make_schedule(scheduler, 4)
        return
    for steps in STEPS if (prediction, spacing) == ("epsilon", None) else (1, 2, 8):
        assert worst_difference(scheduler, make_schedule(scheduler, steps), steps) < 2e-5, steps


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_zero_terminal_snr_is_kept_by_every_sampler_with_every_spacing(sampler: Sampler) -> None:
    own = own_scheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction", timestep_spacing="trailing")
    for spacing in (spacing for spacing in SPACINGS if spacing in (None, *spacings_of(sampler))):
        scheduler = make_scheduler(sampler if spacing is None else f"{sampler}-{spacing}", own)
        assert float(scheduler.alphas_cumprod[-1]) < 1e-6
        if (sampler, spacing) in ROUNDED_AWAY:
            with pytest.raises(ValueError, match="with zero terminal SNR, another sampler or spacing may do"):
                make_schedule(scheduler, 8)
            continue
        bound = 6e-3 if sampler in ROUNDED else 1e-3 if spacing is SigmaSpacing.BETA else 1e-4
        assert worst_difference(scheduler, make_schedule(scheduler, 8), 8) < bound


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_diffusers_has_nothing_to_warn_of(sampler: Sampler, caplog: pytest.LogCaptureFixture) -> None:
    """Published configurations, such as that of SDXL, carry settings of other classes' schedulers."""
    config = {**TRAINING, "skip_prk_steps": True, "set_alpha_to_one": False, "clip_sample": False, "steps_offset": 1}
    own = diffusers.EulerDiscreteScheduler.from_config(config)
    logger = logging.getLogger("diffusers")  # it passes nothing on to the root, which caplog listens to
    logger.addHandler(caplog.handler)
    try:
        make_schedule(make_scheduler(sampler, own), 9)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.messages


OWN = [
    ("PNDMScheduler", {"skip_prk_steps": False}),
    ("DPMSolverMultistepScheduler", {"solver_order": 3}),
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"}),
    ("DPMSolverSinglestepScheduler", {"solver_order": 3, "algorithm_type": "sde-dpmsolver++"}),
    ("DEISMultistepScheduler", {"solver_order": 3}),
    ("UniPCMultistepScheduler", {"solver_order": 3}),
    ("EDMEulerScheduler", None),
    ("EDMDPMSolverMultistepScheduler", None),
]


@pytest.mark.parametrize(("name", "extra"), OWN)
def test_a_base_model_s_own_scheduler_is_followed_whatever_it_is(name: str, extra: dict[str, Any] | None) -> None:
    own = getattr(diffusers, name)(**({} if extra is None else {**TRAINING, **extra}))
    scheduler = make_scheduler("", own)
    assert worst_difference(scheduler, make_schedule(scheduler, 12), 12) < 2e-5


@pytest.mark.parametrize(("name", "prediction"), [
    *product(("DDIMScheduler", "EulerDiscreteScheduler"), ("epsilon", "v_prediction")),
    ("DDIMScheduler", "sample"),
    *product(("EDMEulerScheduler",), ("epsilon", "v_prediction")),
])  # fmt: skip
def test_a_preview_is_what_diffusers_takes_for_the_finished_latents(name: str, prediction: str) -> None:
    training = {} if name.startswith("EDM") else {**TRAINING, "timestep_spacing": "leading", "clip_sample": False}
    scheduler = getattr(diffusers, name).from_config({**training, "prediction_type": prediction})
    schedule = make_schedule(scheduler, 6)
    scheduler.set_timesteps(6)
    sample = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * schedule.noise_scale
    for i, timestep in enumerate(scheduler.timesteps):
        seen = scaled_input(scheduler, sample, timestep)
        output = torch.tanh(seen)
        step = scheduler.step(output, timestep, sample)
        _, of_input, of_output = schedule.inputs[i].tolist()
        assert torch.allclose(of_input * seen + of_output * output, step.pred_original_sample, atol=1e-4, rtol=1e-3), i
        sample = step.prev_sample


def test_what_the_pipeline_corrected_is_kept() -> None:
    """A scheduler without `steps_offset` gets 1 from the pipeline of SD 1, which stays a default by its class's books."""
    own = diffusers.PNDMScheduler.from_config({**TRAINING, "skip_prk_steps": True})
    own._internal_dict = type(own._internal_dict)({**own.config, "steps_offset": 1})
    assert "steps_offset" in own.config["_use_default_values"]
    for sampler in ("", "euler", "ddim"):
        assert make_scheduler(sampler, own).config["steps_offset"] == 1
    assert make_scheduler("euler", own).config["timestep_spacing"] == "linspace", "PNDM's default is not Euler's"


@pytest.mark.parametrize(("setting", "reason"), [
    ({"clip_sample": True}, "clip_sample"),
    ({"thresholding": True}, "thresholding"),
    ({"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, "not finite"),
])  # fmt: skip
def test_a_scheduler_that_is_no_table_is_refused_by_what_is_wrong(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"DDIMScheduler cannot make 10 steps .*{reason}"):
        make_schedule(own_scheduler(**setting), 10)


@pytest.mark.parametrize("name", ["eular", "euler-", "-karras", "euler-karras-karras", "EULER"])
def test_an_unknown_sampler_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=r"euler-a, heun.* -karras, -exponential"):
        parse_sampler(name)


def test_runs_of_different_samplers_advance_together_as_alone() -> None:
    schedules = [make_schedule(make_scheduler(sampler, own_scheduler()), 6) for sampler in SAMPLERS]
    size = max(schedule.size for schedule in schedules)
    state = torch.randn(size, len(schedules), 2, 4, 4)
    output, noise = torch.randn(2, len(schedules), 2, 4, 4)
    for i, schedule in enumerate(schedules):
        state[schedule.size :, i] = 0
        noise[i] *= schedule.noisy[2]
    table = torch.stack([one.table[2, :size, : 2 + size] for one in schedules])
    together = advance(list(state), output, table, noise)
    for i, schedule in enumerate(schedules):
        own, one = schedule.size, slice(i, i + 1)
        its_noise = noise[one] if schedule.noisy[2] else None
        alone = advance(list(state[:own, one]), output[one], table[one, :own, : 2 + own], its_noise)
        assert all(torch.equal(ours[i], single[0]) for ours, single in zip(together[:own], alone, strict=True))


FLOW_SETTINGS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({}, {}),
    ({"shift": 3.0}, {}),
    ({"use_dynamic_shifting": True}, {"mu": 0.8}),
    ({"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.1}, {"mu": 1.1}),
    ({"use_karras_sigmas": True}, {}),
    ({"stochastic_sampling": True}, {}),
]


@pytest.mark.parametrize(("config", "timing", "levels"), [
    (config, timing, levels)
    for (config, timing), levels in product(FLOW_SETTINGS, (1, 4, 30))
    if not ("shift_terminal" in config and levels == 1)  # the last level of one is the first
])  # fmt: skip
def test_each_pass_of_flow_matching_is_the_step_of_diffusers(
    config: dict[str, Any], timing: dict[str, Any], levels: int
) -> None:
    sigmas = [1 - i / levels for i in range(levels)]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**config)
    schedule = make_schedule(scheduler, levels, sigmas=sigmas, **timing)
    assert worst_difference(scheduler, schedule, levels, sigmas=sigmas, **timing) < 1e-5
