"""The samplers that a request may name: how often each asks the denoiser in a step, and how its steps may be spaced."""

from enum import StrEnum


class Sampler(StrEnum):
    """Numerical methods that integrate from noise to image."""

    EULER = "euler"
    EULER_A = "euler-a"
    HEUN = "heun"
    DPM2 = "dpm2"
    DPM2_A = "dpm2-a"
    LMS = "lms"
    DDIM = "ddim"
    DDPM = "ddpm"
    PNDM = "pndm"
    DPMPP_2M = "dpm++2m"
    DPMPP_2M_SDE = "dpm++2m-sde"
    DPMPP_2S = "dpm++2s"
    DPMPP_SDE = "dpm++sde"
    DEIS = "deis"
    UNIPC = "unipc"
    SA = "sa"
    LCM = "lcm"
    TCD = "tcd"
    FLOW_EULER = "flow-euler"


TWO_PASSES = (Sampler.HEUN, Sampler.DPM2, Sampler.DPM2_A, Sampler.DPMPP_SDE)
"""Samplers that ask the denoiser twice in each step."""


def passes_of(sampler: str) -> int:
    """Return how often a step of the named sampler asks the denoiser; once where it has no name."""
    return 2 if sampler and parse_sampler(sampler)[0] in TWO_PASSES else 1


class SigmaSpacing(StrEnum):
    """How a sampler's steps are spread over the noise levels."""

    KARRAS = "karras"
    EXPONENTIAL = "exponential"
    BETA = "beta"
    TRAILING = "trailing"
    SGM_UNIFORM = "sgm-uniform"


NO_SIGMAS = (Sampler.EULER_A, Sampler.DDIM, Sampler.DDPM, Sampler.PNDM, Sampler.LCM, Sampler.TCD)
"""Samplers for which diffusers offers no choice of noise levels: they are spaced by their timesteps alone."""
NO_TIMESTEPS = (Sampler.DPMPP_2S, Sampler.FLOW_EULER)
"""Samplers for whose timesteps diffusers has no spacing."""


def spacings_of(sampler: Sampler) -> tuple[SigmaSpacing, ...]:
    """Return the spacings that diffusers has for a sampler."""
    by_timesteps = (SigmaSpacing.TRAILING, SigmaSpacing.SGM_UNIFORM)
    return tuple(each for each in SigmaSpacing if sampler not in (NO_TIMESTEPS if each in by_timesteps else NO_SIGMAS))


def parse_sampler(name: str) -> tuple[Sampler, SigmaSpacing | None]:
    """Return a sampler and its spacing from a name such as `dpm++2m` or `dpm++2m-karras`. Raises ValueError."""
    spacing = next((each for each in SigmaSpacing if name.endswith(f"-{each}")), None)
    method = name if spacing is None else name.removesuffix(f"-{spacing}")
    if method not in {*Sampler}:
        raise ValueError(
            f"sampler: must be one of {', '.join(Sampler)}, alone or with -{', -'.join(SigmaSpacing)}, not {name!r}"
        )
    possible = spacings_of(Sampler(method))
    if spacing not in (None, *possible):
        raise ValueError(f"sampler: {method} may be alone or with -{', -'.join(possible)}, not {name!r}")
    return Sampler(method), spacing
