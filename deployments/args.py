"""Typed `args` of a Serve YAML: unknown fields and impossible values are refused by name."""

from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serve_app.domain.jobs import DEFAULT_GROUP, GROUP_NAME
from serve_app.engine_options import EngineOptions, WorkerTiming


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


LONGEST_S = 10 * 365 * 86_400
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
SecondsOrZero = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""Zero waits for nothing, or switches off what the field is about."""
Resources = dict[str, Annotated[float, Field(gt=0)]]


def _refuse_range(given: object) -> object:
    if isinstance(given, dict):
        raise ValueError("must be auto, with the range in `autoscaling_config` under `deployments:`")
    return given


Replicas = Annotated[int | Literal["auto"], BeforeValidator(_refuse_range)]


class ReplicaArgs(Strict):
    """Number of replicas, and what each asks of its node. Ray counts CPU shares and does not enforce them."""

    replicas: Replicas = 1
    """`auto` leaves it to the deployment's `autoscaling_config` under Serve's `deployments:`, where a changed bound
    restarts nothing."""
    num_cpus: float = Field(default=0.1, gt=0)
    num_gpus: float = Field(default=0, ge=0)
    """A fraction shares one card between deployments; whole numbers take whole cards."""
    resources: Resources = Field(default_factory=dict)
    """Custom resources of nodes keep a deployment on the nodes that are meant for it."""
    drain_s: Seconds = 30
    """At a stop, running jobs get this long to finish; then they are released to the queue."""

    @property
    def most_replicas(self) -> int:
        """Return how many replicas there may be at most, as far as `args` say."""
        return 1 if self.replicas == "auto" else self.replicas

    @model_validator(mode="after")
    def _at_least_one(self) -> "ReplicaArgs":
        if isinstance(self.replicas, int) and self.replicas < 1:
            raise ValueError("replicas: at least 1, or auto")
        if self.num_gpus > 1 and not self.num_gpus.is_integer():
            raise ValueError(f"num_gpus {self.num_gpus}: above 1, Ray gives whole cards only")
        return self


class WorkerArgs(ReplicaArgs):
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """The share of the card's memory that this process may use. Unset, a fractional `num_gpus` is the share: Ray does
    not isolate memory."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for the arithmetic; unset, they are as many as the cores that this process may use."""
    poll_s: Seconds = 0.5
    step_limit_s: Seconds = 180
    job_limit_s: Seconds = 1800

    @property
    def memory_share(self) -> float | None:
        """The fraction to cap the card's memory at; None leaves it whole."""
        if self.memory_fraction is not None:
            return self.memory_fraction
        return self.num_gpus if 0 < self.num_gpus < 1 else None

    @property
    def timing(self) -> WorkerTiming:
        return WorkerTiming(
            poll=timedelta(seconds=self.poll_s),
            step_limit=timedelta(seconds=self.step_limit_s),
            job_limit=timedelta(seconds=self.job_limit_s),
        )


class IngressArgs(ReplicaArgs):
    max_ongoing_requests: int | None = Field(default=None, ge=1)
    """How many requests one replica takes, at most half of them polls that wait. Unset, it takes as many as
    `ATELIER_OPEN_REQUESTS` and `ATELIER_WAITING_POLLS` together."""
    max_queued_requests: int = Field(default=1000, ge=1)
    """How many requests wait for one replica beyond those in progress; the next is answered 503 `overloaded`."""


class GeneratorArgs(WorkerArgs):
    engine: EngineOptions = EngineOptions()
    prefetch_s: SecondsOrZero = 2
    """A replica reads adapters of the latest completed jobs into free host memory (`engine.host_memory`) before a job
    of its own needs them, one every `prefetch_s` seconds; 0 reads none."""
    warm_up_s: SecondsOrZero | None = None
    """A replica that has drawn an image of the smallest size is ready. While it has no job it then warms up for the
    sizes on offer, smallest first, and begins no further one after this many seconds. Unset, it takes every size on a
    GPU, and the smallest on a CPU (1 to 2 s with the pocket model); 0 takes none, and draws no image before either."""

    @property
    def timing(self) -> WorkerTiming:
        return replace(super().timing, prefetch=timedelta(seconds=self.prefetch_s) if self.prefetch_s else None)


class GroupArgs(GeneratorArgs):
    """The generators of one group of base models: those whose catalog row names the group."""

    group: Annotated[str, Field(pattern=f"^{GROUP_NAME}$")]

    @model_validator(mode="after")
    def _is_not_the_default(self) -> "GroupArgs":
        if self.group == DEFAULT_GROUP:
            raise ValueError(f"the group {DEFAULT_GROUP} is the generator of the main application")
        return self


class UpscalerArgs(WorkerArgs):
    weights: str | None = None
    """The folder of a learned upscaler, relative to the checkout; unset, Lanczos' method enlarges."""


class HousekeeperArgs(Strict):
    num_cpus: float = Field(default=0.1, gt=0)
    resources: Resources = Field(default_factory=dict)
    every_s: Seconds = 1
    """How many seconds pass between two searches for expired leases and checks of the embedded Redis."""


class AppArgs(Strict):
    ingress: IngressArgs = IngressArgs()
    generator: GeneratorArgs | None = GeneratorArgs()
    """The generators of the group `default`; null where every base model is of another group."""
    upscaler: UpscalerArgs = UpscalerArgs()
    housekeeper: HousekeeperArgs = HousekeeperArgs()
