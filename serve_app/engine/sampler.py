"""Steps many runs along the noise schedule at once, each at its own step of its own sampler.

Every sampler here is linear in its inputs, so a step is seven numbers per run:

    input = scale·x          x0 = p·x + q·output          x' = a·x + b·x0 + c·x0_before + d·noise

where `output` is the denoiser's output and `x0` the finished latents it predicts. The numbers are computed once per
schedule in float64 and stacked per batch. Timesteps and sigmas come from diffusers' scheduler of the same name, which
is also the reference in the tests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor

from serve_app.engine_options import Sampler

DIFFUSERS_CLASS = {
    Sampler.EULER: "EulerDiscreteScheduler",
    Sampler.DDIM: "DDIMScheduler",
    Sampler.DPMPP_2M: "DPMSolverMultistepScheduler",
    Sampler.LCM: "LCMScheduler",
    Sampler.FLOW_EULER: "FlowMatchEulerDiscreteScheduler",
}


class StepCoefficients(NamedTuple):
    """One row of a table: see the module's equation."""

    scale: float
    p: float
    q: float
    a: float
    b: float
    c: float = 0.0
    d: float = 0.0


class Schedule(NamedTuple):
    """All steps of a sampler: `table` is [steps, 7] float32, `timesteps` [steps] float32."""

    timesteps: Tensor
    table: Tensor
    noise_scale: float
    """The first latents are unit noise times this."""
    noisy: tuple[bool, ...]
    """Whether each step adds fresh noise."""

    @property
    def adds_noise(self) -> bool:
        return any(self.noisy)

    def to(self, device: torch.device) -> "Schedule":
        return self._replace(table=self.table.to(device), timesteps=self.timesteps.to(device))


def advance(x: Tensor, output: Tensor, before: Tensor, table: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute one step of every run: x, output, before, noise are [runs, …], table [runs, 7].

    Returns the new x, and x0.
    """
    _, p, q, a, b, c, d = table.view(*table.shape, *(1,) * (x.dim() - 1)).unbind(1)
    x0 = p * x + q * output
    after = a * x + b * x0 + c * before
    return (after if noise is None else after + d * noise), x0


def sampler_of(scheduler_class: str) -> Sampler | None:
    """Return the sampler that matches a diffusers scheduler class; None where there is none."""
    return next((ours for ours, theirs in DIFFUSERS_CLASS.items() if theirs == scheduler_class), None)


def make_schedule(
    sampler: Sampler,
    config: Mapping[str, Any],
    steps: int,
    *,
    sigmas: Sequence[float] | None = None,
    mu: float | None = None,
) -> Schedule:
    """Return the table of `steps` steps for a base model's scheduler `config`.

    Raises ValueError on an unsupported setting. `sigmas` and `mu` are for flow matching: the noise levels before
    shifting, and a shift that depends on the image size.
    """
    reference = diffusers_scheduler(sampler, config)
    _refuse_unsupported(sampler, reference.config)
    flow = {name: value for name, value in (("sigmas", sigmas), ("mu", mu)) if value is not None}
    reference.set_timesteps(steps, **flow)
    rows = _TABLES[sampler](reference)
    if len(rows) != steps:
        raise ValueError(f"sampler {sampler} cannot make {steps} steps of this model's schedule, only {len(rows)}")
    return Schedule(
        timesteps=reference.timesteps.to(torch.float32),
        table=torch.tensor(rows, dtype=torch.float64).to(torch.float32),
        noise_scale=float(getattr(reference, "init_noise_sigma", 1.0)),
        noisy=tuple(bool(row.d) for row in rows),
    )


def diffusers_scheduler(sampler: Sampler, config: Mapping[str, Any]) -> Any:
    """diffusers' scheduler object for `config`."""
    return getattr(diffusers, DIFFUSERS_CLASS[sampler]).from_config(dict(config))


_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "clip_sample": (False, None),
    "thresholding": (False, None),
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "algorithm_type": ("dpmsolver++", None),
    "solver_type": ("midpoint", None),
    "solver_order": (1, 2, None),
}
_SUPPORTED_FLOW: dict[str, tuple[Any, ...]] = {"stochastic_sampling": (False, None), "invert_sigmas": (False, None)}


def _refuse_unsupported(sampler: Sampler, config: Mapping[str, Any]) -> None:
    """Raise on settings that the linear step cannot express."""
    for name, allowed in (_SUPPORTED_FLOW if sampler is Sampler.FLOW_EULER else _SUPPORTED).items():
        if config.get(name) not in allowed:
            raise ValueError(f"sampler {sampler}: {name}={config.get(name)!r} is not supported, only {allowed}")


def _predicted(kind: str, alpha: float, sigma: float) -> tuple[float, float]:
    """p and q of x0 = p·x + q·output for x = alpha·x0 + sigma·noise (Salimans & Ho 2022, appendix D)."""
    match kind:
        case "epsilon":
            return 1 / alpha, -sigma / alpha
        case "v_prediction":
            return alpha, -sigma
        case _:
            return 0.0, 1.0


def _euler(reference: Any) -> list[StepCoefficients]:
    """Karras et al. 2022, algorithm 2 without churn, on x = x0 + sigma·noise."""
    sigmas = [float(sigma) for sigma in reference.sigmas]
    rows: list[StepCoefficients] = []
    for here, there in pairwise(sigmas):
        shrink = 1 / math.sqrt(here * here + 1)
        p, q = _predicted(reference.config.prediction_type, shrink, here * shrink)
        if reference.config.prediction_type != "sample":
            p *= shrink  # the prediction is of the scaled input
        rows.append(StepCoefficients(shrink, p, q, there / here, 1 - there / here))
    return rows


def _ddim(reference: Any) -> list[StepCoefficients]:
    """Song et al. 2020, equation 12 with eta 0."""
    kept = reference.alphas_cumprod.double()
    stride = reference.config.num_train_timesteps // reference.num_inference_steps
    rows: list[StepCoefficients] = []
    for timestep in reference.timesteps.tolist():
        here = float(kept[timestep])
        there = float(kept[timestep - stride]) if timestep >= stride else float(reference.final_alpha_cumprod)
        p, q = _predicted(reference.config.prediction_type, math.sqrt(here), math.sqrt(1 - here))
        noise = math.sqrt((1 - there) / (1 - here))
        rows.append(StepCoefficients(1.0, p, q, noise, math.sqrt(there) - noise * math.sqrt(here)))
    return rows


def _dpmpp_2m(reference: Any) -> list[StepCoefficients]:
    """Lu et al. 2022 (DPM-Solver++), algorithm 2, midpoint, data prediction."""
    levels = [_Level.at(float(sigma)) for sigma in reference.sigmas]
    steps = len(levels) - 1
    config = reference.config
    rows: list[StepCoefficients] = []
    for i in range(steps):
        here, there = levels[i], levels[i + 1]
        p, q = _predicted(config.prediction_type, here.alpha, here.sigma)
        grow = -there.alpha * math.expm1(-(there.log_snr - here.log_snr))
        last = i == steps - 1
        lower = last and (
            config.euler_at_final or config.final_sigmas_type == "zero" or (config.lower_order_final and steps < 15)
        )
        look_back = 0.0
        if i and config.solver_order == 2 and not lower:
            look_back = 0.5 * (there.log_snr - here.log_snr) / (here.log_snr - levels[i - 1].log_snr)
        rows.append(StepCoefficients(1.0, p, q, there.sigma / here.sigma, grow * (1 + look_back), -grow * look_back))
    return rows


def _lcm(reference: Any) -> list[StepCoefficients]:
    """Luo et al. 2023, multistep consistency sampling: jump to x0, then back to the next noise level."""
    kept, config = reference.alphas_cumprod.double(), reference.config
    timesteps: list[int] = reference.timesteps.tolist()
    rows: list[StepCoefficients] = []
    for i, timestep in enumerate(timesteps):
        alpha, sigma = math.sqrt(float(kept[timestep])), math.sqrt(1 - float(kept[timestep]))
        p, q = _predicted(config.prediction_type, alpha, sigma)
        scaled = timestep * config.timestep_scaling
        skip, out = 0.25 / (scaled**2 + 0.25), scaled / math.sqrt(scaled**2 + 0.25)  # sigma_data = 0.5
        if i == len(timesteps) - 1:
            rows.append(StepCoefficients(1.0, p, q, skip, out))
            continue
        there = float(kept[timesteps[i + 1]])
        rows.append(
            StepCoefficients(1.0, p, q, math.sqrt(there) * skip, math.sqrt(there) * out, 0.0, math.sqrt(1 - there))
        )
    return rows


def _flow_euler(reference: Any) -> list[StepCoefficients]:
    """Tabulate Euler steps of a rectified flow (Liu et al. 2022): x = (1 - sigma)·x0 + sigma·noise."""
    return [
        StepCoefficients(1.0, 1.0, -here, there / here, 1 - there / here)
        for here, there in pairwise(float(sigma) for sigma in reference.sigmas)
    ]


class _Level(NamedTuple):
    """A noise level as x = alpha·x0 + sigma·noise, with its half log signal-to-noise ratio."""

    alpha: float
    sigma: float
    log_snr: float

    @classmethod
    def at(cls, sigma: float) -> "_Level":
        alpha = 1 / math.sqrt(sigma * sigma + 1)
        return cls(alpha, sigma * alpha, -math.log(sigma) if sigma else math.inf)


_TABLES: dict[Sampler, Callable[[Any], list[StepCoefficients]]] = {
    Sampler.EULER: _euler,
    Sampler.DDIM: _ddim,
    Sampler.DPMPP_2M: _dpmpp_2m,
    Sampler.LCM: _lcm,
    Sampler.FLOW_EULER: _flow_euler,
}
