"""Options of the engine and of workers, free of torch and numpy: a configuration is checked before a replica starts."""

import re
from dataclasses import dataclass
from datetime import timedelta

from serve_app.domain.samplers import parse_sampler

MAX_RANK = 256
"""The highest LoRA rank that the adapter slots can hold."""
DEFAULT_MAX_RANK = 128
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options of the engine, each with a working default.

    Raises ValueError that begins with the field's name on an impossible value.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  read by pydantic where a YAML is validated

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`…; `auto` uses the GPU where there is one."""
    dtype: str = "auto"
    """`float32`, `bfloat16` or `float16`; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    max_rows: int = 16
    """Image rows of the widest batch; a run with guidance takes two. On a GPU a forward pass may have fewer."""
    max_runs: int = 0
    """Runs admitted at once; 0 means as many as fill one forward pass of one latent shape."""
    exact: bool = True
    """Make the same seed give the same bytes alone and in any batch (see `engine/batch_invariance.py`)."""
    adapter_slots: int = 256
    """How many adapters at most are in slots beside the model; there are fewer where they do not fit `adapter_memory`.
    """
    adapter_memory: int = 0
    """Device bytes for each base model's adapter slots and, up to half of it, the rows that batches gather from them;
    0 shares 1 GiB of a CPU's memory, or a third of what a GPU leaves this process, among the base models."""
    host_memory: int = 4 * 2**30
    """Host bytes for packed adapters that are not in a slot."""
    max_rank: int = DEFAULT_MAX_RANK
    """Adapters of a higher rank are refused, by uploads too."""
    sampler: str = ""
    """Sampler of runs that name none, such as `dpm++2m-karras` (see `Sampler`); empty means the base model's own."""
    threads: int = 0
    """CPU threads of torch for the whole process; 0 leaves them as they are."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+(:\d+)?", self.device):
            raise ValueError(f"device: must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype: must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.max_rows < 2:
            raise ValueError(f"max_rows: must be at least 2 (one run with guidance), not {self.max_rows}")
        for name in ("max_runs", "adapter_memory", "host_memory", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative, not {getattr(self, name)}")
        if self.adapter_slots < 1:
            raise ValueError(f"adapter_slots: must be at least 1, not {self.adapter_slots}")
        if not 1 <= self.max_rank <= MAX_RANK:
            raise ValueError(f"max_rank: must be between 1 and {MAX_RANK}, not {self.max_rank}")
        if self.sampler:
            parse_sampler(self.sampler)

    @property
    def runs(self) -> int:
        """Return how many runs with guidance are admitted at once; those without it make place for more."""
        return self.max_runs or self.max_rows // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTiming:
    """Intervals and limits of a worker."""

    poll: timedelta = timedelta(seconds=0.5)
    """An idle worker asks for work this often when no hint comes."""
    heartbeat: timedelta = timedelta(seconds=1)
    """Progress is written, and a cancel noticed, this often; a third of the lease at the latest."""
    step_limit: timedelta = timedelta(minutes=3)
    """A step that takes longer is hung: its leases are left to expire and the replica reports itself unhealthy."""
    job_limit: timedelta = timedelta(minutes=30)
    """An attempt that takes longer fails with `timeout`."""
    prefetch: timedelta | None = None
    """An executor that prefetches adapters looks for another this often; None never."""
    open_jobs: int = 64
    """At most this many jobs are begun and not committed, which bounds the images in memory while storage is slow."""
