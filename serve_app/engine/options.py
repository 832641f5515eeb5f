"""What an engine is told when it is loaded: where it computes, how much at once, and how exactly."""

from dataclasses import dataclass

import torch

from serve_app.engine.layout import RANK_BUCKETS


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Every field has a working default; an impossible value stops the load with the field's name."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`…; `auto` takes the GPU where there is one."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    max_rows: int = 16
    """Image rows of the widest forward pass; a run with guidance takes two."""
    max_runs: int = 0
    """Runs admitted at once; 0 means `max_rows // 2`, so that one latent shape fills one forward pass."""
    exact: bool = True
    """The same seed gives the same bytes alone and in any company (see `exactness.py`)."""
    adapter_slots: int = 256
    """At most this many adapters are kept where the model computes, fewer where they do not fit `adapter_memory`."""
    adapter_memory: int = 0
    """Bytes of the device that each base model's adapter slots may fill; 0 shares 1 GiB of a CPU's memory, or a third of what
    a GPU leaves this process, among the base models."""
    host_memory: int = 4 * 2**30
    """Bytes of host memory for packed adapters that are not in a slot."""
    max_rank: int = 128
    """An adapter of a higher rank is refused by name."""
    sampler: str = ""
    """`euler`, `ddim`, `dpm++2m` or `lcm` for every run that names none; empty takes the base model's own."""
    compile: str = ""
    """A `torch.compile` backend (`inductor`) for the denoiser, empty is eager. One graph per forward shape, made at warm-up;
    a prompt beyond the encoder's window, or an adapter of a rank above 32 or on layers outside the transformer blocks, makes
    new ones at its first use, within one step: leave time for that in `step_limit_s`."""
    threads: int = 0
    """CPU threads of torch for the whole process; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        if self.max_rows < 2:
            raise ValueError(f"max_rows: must be at least 2 (one run with guidance), not {self.max_rows}")
        if min(self.max_runs, self.adapter_memory, self.host_memory, self.threads) < 0:
            raise ValueError("max_runs, adapter_memory, host_memory and threads must not be negative")
        if self.adapter_slots < 1:
            raise ValueError(f"adapter_slots: must be at least 1, not {self.adapter_slots}")
        if not 1 <= self.max_rank <= RANK_BUCKETS[-1]:
            raise ValueError(f"max_rank: must be between 1 and {RANK_BUCKETS[-1]}, not {self.max_rank}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: must be auto, float32, bfloat16 or float16, not {self.dtype!r}")

    @property
    def runs(self) -> int:
        return self.max_runs or self.max_rows // 2

    @property
    def torch_device(self) -> torch.device:
        if self.device != "auto":
            return torch.device(self.device)
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype != "auto":
            return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]
        return torch.float32 if self.torch_device.type == "cpu" else torch.bfloat16
