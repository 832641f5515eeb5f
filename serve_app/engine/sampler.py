"""Steps many runs along the noise schedule at once, each at its own step of its own sampler.

Every scheduler of diffusers that computes a step from sums of what it has seen is a table of numbers here. A pass of the
denoiser takes the run's state, which is the latents and what the scheduler remembers of earlier passes, to the next one:

    input = scale·latents        state' = table · [output, noise, *state]        x0 = p·input + q·output

where `output` is the denoiser's output and `x0` the finished latents that it predicts. The numbers are read off diffusers'
own scheduler, once for each schedule: it steps unit vectors instead of latents, so that a step's result is its column of
numbers. A scheduler that clips, or whose step sizes depend on the latents, does not follow its table and is refused.
"""

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers.schedulers.scheduling_euler_discrete import rescale_zero_terminal_snr
from torch import Tensor

from serve_app.domain.samplers import Sampler, SigmaSpacing, parse_sampler

DIFFUSERS: Mapping[Sampler, tuple[str, Mapping[str, Any]]] = {
    Sampler.EULER: ("EulerDiscreteScheduler", {}),
    Sampler.EULER_A: ("EulerAncestralDiscreteScheduler", {}),
    Sampler.HEUN: ("HeunDiscreteScheduler", {}),
    Sampler.DPM2: ("KDPM2DiscreteScheduler", {}),
    Sampler.DPM2_A: ("KDPM2AncestralDiscreteScheduler", {}),
    Sampler.LMS: ("LMSDiscreteScheduler", {}),
    Sampler.DDIM: ("DDIMScheduler", {"clip_sample": False}),
    Sampler.DDPM: ("DDPMScheduler", {"clip_sample": False}),
    Sampler.PNDM: ("PNDMScheduler", {"skip_prk_steps": True}),
    Sampler.DPMPP_2M: ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    Sampler.DPMPP_2M_SDE: ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "solver_order": 2}),
    Sampler.DPMPP_2S: (
        "DPMSolverSinglestepScheduler",
        {"algorithm_type": "dpmsolver++", "solver_order": 2, "lower_order_final": True},
    ),
    Sampler.DPMPP_SDE: ("DPMSolverSDEScheduler", {}),
    Sampler.DEIS: ("DEISMultistepScheduler", {"algorithm_type": "deis", "solver_type": "logrho"}),
    Sampler.UNIPC: ("UniPCMultistepScheduler", {}),
    Sampler.SA: ("SASolverScheduler", {}),
    Sampler.LCM: ("LCMScheduler", {}),
    Sampler.TCD: ("TCDScheduler", {}),
    Sampler.FLOW_EULER: ("FlowMatchEulerDiscreteScheduler", {}),
}
"""diffusers' class for each sampler, and the settings that make it this one whatever a checkpoint says."""
SPACING: Mapping[SigmaSpacing, Mapping[str, Any]] = {
    SigmaSpacing.KARRAS: {"use_karras_sigmas": True},
    SigmaSpacing.EXPONENTIAL: {"use_exponential_sigmas": True},
    SigmaSpacing.BETA: {"use_beta_sigmas": True},
    SigmaSpacing.TRAILING: {"timestep_spacing": "trailing"},
    SigmaSpacing.SGM_UNIFORM: {"timestep_spacing": "trailing"},
}
NO_SIGMAS = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
LEAST_ALPHA = 2.0**-24
"""What is left of the image at the last timestep of a schedule with zero terminal SNR, as diffusers' Euler takes it."""
MAX_STATE = 8
"""A run keeps at most this many tensors between its passes: the latents, and what its scheduler remembers."""
ROUNDING = 1e-6
"""A factor below this counts as zero: it is read off a sum with noise of strength 1, which rounds it."""
MAX_SCHEDULES = 512
"""How many schedules a base model keeps, one for each sampler, number of steps and step that it begins at."""
_ZEROS, _CHECKS = 8, 4
_OUTPUT, _NOISE, _STATE = 0, 1, 2


class NoSteps(ValueError):
    """The strength leaves no step, so that the image would stay as it is."""


class Schedule(NamedTuple):
    """All passes of a sampler; a step has one or two."""

    timesteps: Tensor
    """[passes] float32."""
    inputs: Tensor
    """[passes, 3] float32: scale, p and q of the module's equations."""
    table: Tensor
    """[passes, MAX_STATE, 2 + MAX_STATE] float32; rows are the next state, columns output, noise and the state before."""
    size: int
    """The tensors of a run's state."""
    noise_scale: float
    """The first latents are unit noise times this."""
    noisy: tuple[bool, ...]
    """Whether each pass draws fresh noise."""
    steps: int
    """The steps that it makes, fewer than were asked for where it begins late."""
    noising: Sequence[tuple[float, float]]
    """[passes + 1] the factors of an image and of unit noise that have as much noise in them as the latents
    before the first pass, and after each; after the last it is the image alone."""

    @property
    def passes(self) -> int:
        return len(self.noisy)

    def passes_of(self, steps: range) -> range:
        """Return the passes of some of its steps: pass p is of step p · steps // passes."""
        return range(*(-(-end * self.passes // self.steps) for end in (steps.start, steps.stop)))

    def predicted(self, step: int, seen: Tensor, output: Tensor) -> Tensor:
        """Return the finished latents that a pass predicts, from what the denoiser got and gave."""
        _, p, q = self.inputs[step]
        return p * seen + q * output

    def to(self, device: torch.device) -> "Schedule":
        return self._replace(
            timesteps=self.timesteps.to(device), inputs=self.inputs.to(device), table=self.table.to(device)
        )

    def noised(self, image: Tensor, noise: Tensor, passes: int) -> Tensor:
        """Return an image's latents with the noise that they have after `passes` passes."""
        of_image, of_noise = self.noising[passes]
        return of_image * image + of_noise * noise


def advance(state: Sequence[Tensor], output: Tensor, table: Tensor, noise: Tensor | None) -> list[Tensor]:
    """Return the next state of every run.

    Output, noise and each tensor of the state are [runs, …], the table is [runs, size, 2 + size]. The terms are added in
    one order whatever is in the batch, and what a run does not remember is zeros, so that company changes no bit.
    """
    factors = table.view(*table.shape, *(1,) * (output.dim() - 1))
    columns = {_OUTPUT: output, _NOISE: noise, **dict(enumerate(state, start=_STATE))}
    after: list[Tensor] = []
    term = torch.empty_like(output)
    for row in factors.unbind(1):
        total = row[:, _OUTPUT] * output
        for place, column in columns.items():
            if place != _OUTPUT and column is not None:
                total += torch.mul(row[:, place], column, out=term)
        after.append(total)
    return after


def make_scheduler(sampler: str, own: Any) -> Any:
    """Return diffusers' scheduler of a sampler's name for the base model whose own scheduler is `own`; '' means that one.

    What the checkpoint says, and what diffusers' pipeline corrected in it, is kept. Raises ValueError as `parse_sampler`
    does.
    """
    config = dict(own.config)
    defaults = {name: parameter.default for name, parameter in inspect.signature(type(own).__init__).parameters.items()}
    chosen = {}
    if not sampler:
        cls, config["_use_default_values"] = type(own), []
    else:
        method, spacing = parse_sampler(sampler)
        name, chosen = DIFFUSERS[method]
        cls = getattr(diffusers, name)
        unnamed = config.get("_use_default_values", [])
        config["_use_default_values"] = [name for name in unnamed if config[name] == defaults.get(name)]
        if spacing is not None:
            chosen = {**NO_SIGMAS, **chosen, **SPACING[spacing]}
    known = inspect.signature(cls.__init__).parameters
    chosen = {name: value for name, value in chosen.items() if name in known}
    if config.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" not in known:
        chosen["trained_betas"] = _zero_snr_betas(own)
    # diffusers logs a warning for each setting of another class
    return cls.from_config({name: one for name, one in config.items() if name in known or name[0] == "_"}, **chosen)


def _zero_snr_betas(own: Any) -> list[float]:
    """Return the betas of zero terminal SNR (Lin et al. 2023) for a scheduler that has no setting for it."""
    kept = torch.cumprod(1 - rescale_zero_terminal_snr(own.betas.double()), 0)
    kept[-1] = LEAST_ALPHA
    return (1 - torch.cat([kept[:1], kept[1:] / kept[:-1]])).tolist()


def make_schedule(
    scheduler: Any, steps: int, *, skipped: int = 0, sigmas: Sequence[float] | None = None, mu: float | None = None
) -> Schedule:
    """Tabulate `steps` steps of diffusers' scheduler without the first `skipped` ones; the scheduler stays as it was.

    `sigmas` and `mu` are for flow matching: the noise levels before shifting, and a shift that depends on the image size.
    Raises ValueError on a scheduler that is no table of numbers, or that cannot make the steps, and `NoSteps` where
    it would skip all.
    """
    if skipped >= steps:
        raise NoSteps(f"strength: leaves none of {steps} steps to draw; take more steps, or a higher strength")
    scheduler = copy.deepcopy(scheduler)
    timing = {name: value for name, value in (("sigmas", sigmas), ("mu", mu)) if value is not None}
    try:
        scheduler.set_timesteps(steps, **timing)
        first = skipped * getattr(scheduler, "order", 1)
        timesteps = scheduler.timesteps[first:]
        if hasattr(scheduler, "get_lms_coefficient"):  # its integrals take thousands of single numbers, slow in torch
            scheduler.sigmas = scheduler.sigmas.numpy()
        if hasattr(scheduler, "set_begin_index"):  # or the second of two equal first timesteps would be taken
            scheduler.set_begin_index(first)
        passes = list(_probe(scheduler, timesteps))
    except (ValueError, IndexError, ZeroDivisionError, NotImplementedError, TypeError) as error:
        name = type(scheduler).__name__
        raise ValueError(f"{name} cannot make {steps} steps of this base model: {error}") from error
    size, table = _compact(passes)
    return Schedule(
        timesteps=timesteps.to(torch.float32),
        inputs=torch.tensor([(one.scale, *one.finished) for one in passes]),
        table=table,
        size=size,
        noise_scale=float(getattr(scheduler, "init_noise_sigma", 1.0)),
        noisy=tuple(one.draws for one in passes),
        steps=steps - skipped,
        noising=[*(one.noising for one in passes), (1.0, 0.0)],
    )


class _Pass(NamedTuple):
    """One pass as a scheduler computes it, in numbers."""

    scale: float
    finished: tuple[float, float]
    draws: bool
    rows: Mapping[str, Mapping[str, float]]
    """The factors of output, noise and the state before, by the tensors of the next state."""
    noising: tuple[float, float]
    """The factors of an image and of noise in latents before it."""


LATENTS, OUTPUT, NOISE = "latents", "output", "noise"


def _probe(scheduler: Any, timesteps: Tensor) -> Iterator[_Pass]:
    """Yield the passes at these timesteps of a scheduler that is stepped with unit vectors for its state and the denoiser's output.

    Some channels are zero, and show the noise; some are random, and show whether the numbers tell all.
    """
    generator = torch.Generator().manual_seed(0)
    random = torch.Generator().manual_seed(1)
    if hasattr(scheduler, "noise_sampler"):
        scheduler.noise_sampler = _BrownianPath(generator)
    takes = inspect.signature(scheduler.step).parameters
    extra = {name: value for name, value in (("generator", generator), ("eta", 0.0)) if name in takes}
    for timestep in timesteps:
        places = _remembered(scheduler)
        names = [LATENTS, *places, OUTPUT]
        if len(names) - 1 > MAX_STATE:
            raise ValueError(f"it remembers more than {MAX_STATE} tensors")
        units = {name: _unit(i, random) for i, name in enumerate(names)}
        for name, (holder, key) in places.items():
            holder[key] = units[name].clone()
        before, noising = generator.get_state(), _noising(scheduler, timestep)
        seen = scaled_input(scheduler, units[LATENTS], timestep)
        after = scheduler.step(units[OUTPUT].clone(), timestep, units[LATENTS].clone(), **extra).prev_sample
        noise = torch.zeros_like(after)
        draws = not torch.equal(generator.get_state(), before)
        if draws:
            noise = torch.randn(after.shape, generator=torch.Generator().manual_seed(0).set_state(before))
        made = {LATENTS: after, **{name: holder[key] for name, (holder, key) in _remembered(scheduler).items()}}
        yield _Pass(
            scale=float(seen[0, 0, 0, 0]),
            finished=_finished(scheduler, timestep, float(seen[0, 0, 0, 0])),
            draws=draws,
            rows={name: _factors(tensor, units, noise) for name, tensor in made.items()},
            noising=noising,
        )


def scaled_input(scheduler: Any, latents: Tensor, timestep: Tensor) -> Tensor:
    """Return the denoiser's input; flow matching takes latents as they are."""
    scale = getattr(scheduler, "scale_model_input", None)
    return latents if scale is None else scale(latents, timestep)


def _noising(scheduler: Any, timestep: Tensor) -> tuple[float, float]:
    """Return the factors of an image and of noise in latents that a scheduler takes next.

    The scheduler knows which pass is next, as in diffusers' pipelines: a timestep may stand for two passes.
    """
    scheduler = copy.copy(scheduler)
    if hasattr(scheduler, "sigmas"):
        scheduler.sigmas = torch.as_tensor(scheduler.sigmas)
    if hasattr(scheduler, "scale_noise"):
        made = scheduler.scale_noise(_unit(0), timestep[None], _unit(1))
    else:
        made = scheduler.add_noise(_unit(0), _unit(1), timestep[None])
    return float(made[0, 0]), float(made[0, 1])


class _BrownianPath:
    """Increments of one Brownian motion from a generator's noise, for the scheduler that asks for intervals of it.

    The second pass of a step continues from where the first one went (Lu et al. 2022, DPM-Solver++ SDE).
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.start, self.end = math.nan, math.nan
        self.moved: Tensor | None = None

    def __call__(self, start: Tensor, end: Tensor) -> Tensor:
        again = self.moved is not None and math.isclose(float(start), self.start)
        at = self.end if again else float(start)
        moved = torch.randn(_unit(0).shape, generator=self.generator) * math.sqrt(abs(float(end) - at))
        self.moved = self.moved + moved if again and self.moved is not None else moved
        self.start, self.end = float(start), float(end)
        return self.moved / math.sqrt(abs(self.end - self.start))


def _unit(place: int, random: torch.Generator | None = None) -> Tensor:
    """Return channels [1, …, 1, 1]: a one at `place`, zeros, and random numbers beyond any range that is clipped to."""
    unit = torch.zeros(1, MAX_STATE + 1 + _ZEROS + _CHECKS, 1, 1)
    unit[0, place] = 1
    if random is not None:
        unit[0, -_CHECKS:] = 50 * torch.randn(_CHECKS, 1, 1, generator=random)
    return unit


def _remembered(scheduler: Any) -> dict[str, tuple[Any, Any]]:
    """Return the tensors in the scheduler that are shaped as latents, attributes and places in lists.

    By name, it is what holds each, and its key there.
    """
    owners = {"": vars(scheduler)}
    if isinstance(getattr(scheduler, "noise_sampler", None), _BrownianPath):
        owners["noise_sampler."] = vars(scheduler.noise_sampler)
    found: dict[str, tuple[Any, Any]] = {}
    for owner, attributes in owners.items():
        for name, value in attributes.items():
            held = [(value, i) for i in range(len(value))] if isinstance(value, list) else [(attributes, name)]
            for i, (holder, key) in enumerate(held):
                if isinstance(holder[key], Tensor) and holder[key].shape == _unit(0).shape:
                    found[f"{owner}{name}[{i}]"] = holder, key
    return found


def _factors(made: Tensor, units: Mapping[str, Tensor], noise: Tensor) -> dict[str, float]:
    """Return `made` as factors of the units and of the noise. Raises ValueError where it is no sum of them."""
    if not bool(made.isfinite().all()):
        raise ValueError("its numbers are not finite with these settings (epsilon with zero terminal SNR, for one)")
    zeros = slice(MAX_STATE + 1, MAX_STATE + 1 + _ZEROS)
    strength = float((made * noise)[0, zeros].sum() / (noise * noise)[0, zeros].sum()) if bool(noise.any()) else 0.0
    rest = made - strength * noise
    factors = {name: float(rest[0, i, 0, 0]) for i, name in enumerate(units)}
    rounding = ROUNDING * abs(strength)
    factors = {name: factor if abs(factor) > rounding else 0.0 for name, factor in factors.items()}
    told = sum((factor * units[name] for name, factor in factors.items()), torch.zeros_like(made))
    size = max(1.0, *(abs(factor) for factor in factors.values()))
    if not bool(((told - rest)[0, -_CHECKS - _ZEROS :].abs() < 1e-2 * size).all()):
        raise ValueError(
            "its steps are not sums of what it has seen (clip_sample and thresholding must be off; with zero terminal "
            "SNR, another sampler or spacing may do)"
        )
    return {**factors, NOISE: strength}


def _finished(scheduler: Any, timestep: Tensor, scale: float) -> tuple[float, float]:
    """Return p and q of x0 = p·input + q·output (Salimans & Ho 2022, appendix D), for pictures of unfinished latents."""
    if hasattr(scheduler, "precondition_outputs"):  # Karras et al. 2022, table 1
        sigma, data = float(scheduler.sigmas[max(0, scheduler.step_index - 1)]), scheduler.config.sigma_data
        total = math.sqrt(sigma * sigma + data * data)
        sign = -1 if scheduler.config.prediction_type == "v_prediction" else 1
        return data * data / total / total / scale, sign * sigma * data / total
    if not hasattr(scheduler, "alphas_cumprod"):  # a rectified flow
        return 1.0, -float(timestep) / scheduler.config.num_train_timesteps
    kept = scheduler.alphas_cumprod[min(len(scheduler.alphas_cumprod) - 1, round(float(timestep)))]
    alpha, sigma = math.sqrt(max(float(kept), LEAST_ALPHA)), math.sqrt(1 - float(kept))
    match scheduler.config.prediction_type:
        case "epsilon":
            return 1 / alpha, -sigma / alpha
        case "v_prediction":
            return alpha, -sigma
        case _:
            return 0.0, 1.0


def _compact(passes: Sequence[_Pass]) -> tuple[int, Tensor]:
    """Drop from the state what no later pass reads; return how many tensors are left, and the table over these."""
    read = [{LATENTS}]
    for one in reversed(passes):
        used = {name for row in read[-1] for name, factor in one.rows[row].items() if factor}
        read.append({LATENTS} | (used - {OUTPUT, NOISE}))
    places = [[LATENTS, *sorted(names - {LATENTS})] for names in reversed(read)]
    table = torch.zeros(len(passes), MAX_STATE, _STATE + MAX_STATE)
    for n, one in enumerate(passes):
        for r, row in enumerate(places[n + 1]):
            factors = [one.rows[row].get(name, 0.0) for name in (OUTPUT, NOISE, *places[n])]
            table[n, r, : len(factors)] = torch.tensor(factors)
    return max(map(len, places)), table
