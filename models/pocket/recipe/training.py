"""What every training loop shares: device, noise, learning rate, averaged weights, checkpoints, progress."""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import nn

from .plan import WORK


def pick_device(threads: int) -> torch.device:
    torch.set_num_threads(threads)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def half_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where it pays."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16(device))


def computes_in_bfloat16(device: torch.device) -> bool:
    """Return whether to compute in bfloat16: on a GPU, and on a CPU that does so itself.

    There convolutions take half the time; on a CPU that must emulate it (AVX2 alone) they take nine times as long (both
    measured).
    """
    known = torch.cpu.get_capabilities()
    return device.type != "cpu" or bool(known.get("avx512_bf16") or known.get("bf16"))


def noise_schedule() -> DDIMScheduler:
    """Return the plain linear schedule, which ends at 1/157 of the signal.

    So no background color leaks into the starting noise.
    """
    return DDIMScheduler(
        beta_schedule="linear",
        beta_start=0.0001,
        beta_end=0.02,
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        steps_offset=1,
    )


def warm_then_cosine(step: int, steps: int, top: float, warmup: int = 100) -> float:
    """Return the learning rate: a linear rise, then half a cosine down to 2 % of the top."""
    rise = min(1.0, (step + 1) / warmup)
    return top * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps)))))


Parameters = Iterable[nn.Parameter]


class Optimizers:
    """Muon (Jordan et al. 2024) for a model's matrices, and AdamW for the rest.

    Convolutions are taken as matrices of one row per output channel. AdamW is for the model's `ends` (the first and the
    last layer, by the start of their names), its biases, its norms, the helpers, and the slow ones, which learn at a
    share of the rate. On the half-trained UNet Muon lowered the loss at all but the highest noise in 200 steps in which
    AdamW raised it, at a sixth more time a step; 300 steps from the published upscaler it gained 0.3 dB, AdamW nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        ends: tuple[str, ...],
        *,
        helpers: Parameters = (),
        slow: Parameters = (),
        share: float = 1.0,
    ) -> None:
        named = list(model.named_parameters())
        self.matrices = [value for name, value in named if value.ndim > 1 and not name.startswith(ends)]
        others = [value for name, value in named if value.ndim < 2 or name.startswith(ends)]
        self.flat = [nn.Parameter(_as_matrix(value.detach())) for value in self.matrices]
        if any(flat.data_ptr() != value.data_ptr() for flat, value in zip(self.flat, self.matrices, strict=True)):
            raise ValueError("the model is not in channels_last: a copy of its weights would learn in their stead")
        groups: list[dict[str, Any]] = [{"params": [*others, *helpers]}]
        if slow := list(slow):
            groups.append({"params": slow, "share": share})
        kind = torch.optim.Muon if computes_in_bfloat16(self.flat[0].device) else Float32Muon
        self.muon = kind(self.flat, lr=0.0, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=True)

    def descend(self, loss: torch.Tensor, parameters: list[nn.Parameter], rate: float) -> None:
        """Take one step down the loss's gradient, clipped to norm 1, at the learning rate."""
        self.adamw.zero_grad()
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for flat, matrix in zip(self.flat, self.matrices, strict=True):
            flat.grad = None if matrix.grad is None else _as_matrix(matrix.grad)
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = group.get("share", 1.0) * rate
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


class Float32Muon(torch.optim.Muon):
    """Muon in float32, with Nesterov's momentum and `adjust_lr_fn="match_rms_adamw"`.

    torch's own orthogonalizes in bfloat16, which was five sixths of a step's time where the processor only emulates it
    (some fifteen times as long; both measured).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"])
                update = _orthogonal(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * group["lr"] * max(parameter.shape) ** 0.5)


def _orthogonal(matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """Return the matrix with its singular values near 1, by Newton and Schulz (Jordan et al. 2024)."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _as_matrix(value: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a matrix.

    It is (out, height·width·in) of a channels-last convolution's (out, in, height, width).
    """
    return value.permute(0, 2, 3, 1).flatten(1) if value.ndim == 4 else value


class AveragedWeights:
    """An exponential moving average of parameters, which samples better than the last step's weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.average, self.parameters, 1 - decay)


class Checkpoint:
    """One training stage's state on disk, replaced atomically."""

    def __init__(self, name: str, folder: Path = WORK) -> None:
        self.path = folder / f"{name}.pt"

    def save(self, **state: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)

    def load(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        return torch.load(self.path, map_location="cpu", weights_only=True)

    def require(self) -> dict[str, Any]:
        state = self.load()
        if state is None:
            raise FileNotFoundError(f"{self.path}: run the earlier stages first")
        return state


class Progress:
    """Prints a line now and then: stage, step, loss, seconds a step, minutes left."""

    def __init__(self, stage: str, steps: int, start: int = 0, every: int = 50) -> None:
        self.stage, self.steps, self.start, self.every = stage, steps, start, every
        self.began = time.monotonic()
        self.losses: list[float] = []

    def report(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        done = step + 1
        if done % self.every and done != self.steps:
            return
        seconds_per_step = (time.monotonic() - self.began) / (done - self.start)
        mean = sum(self.losses) / len(self.losses)
        self.losses.clear()
        left = seconds_per_step * (self.steps - done) / 60
        print(
            f"{self.stage:<12} {done:>6}/{self.steps}  loss {mean:.4f}"
            f"  {seconds_per_step:.3f} s/step  {left:.1f} min left",
            flush=True,
        )
