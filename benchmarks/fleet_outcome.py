"""What a simulated fleet has done: waits, claims, loads of adapters, GPU-hours."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sample:
    at_ms: int
    replicas: int
    waiting: int
    claims: int
    loads: int
    """How many adapters were loaded since the beginning."""
    gpu_hours: float
    """They count since the beginning."""


@dataclass
class Outcome:
    waits: list[float] = field(default_factory=lambda: list[float]())
    """Seconds from each job's accept to its first step, in order of their ends; jobs of a burst are in
    `burst_waits`."""
    burst_waits: list[float] = field(default_factory=lambda: list[float]())
    lost: int = 0
    """Attempts that ended with their node."""
    asked: int = 0
    claims: int = 0
    """Jobs claimed, and how often workers asked for some."""
    resident: int = 0
    """Claims whose adapter the worker held, or was loading for an earlier job."""
    prefetched: int = 0
    """Adapters read before a job needed them."""
    cold_starts: int = 0
    gpu_hours: float = 0.0
    samples: list[Sample] = field(default_factory=lambda: list[Sample]())
