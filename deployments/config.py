"""Reads a Serve YAML for `atelier up`. Unknown fields are errors, which Serve's own schema ignores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deployments.args import SPARE, AppArgs, ReplicaArgs, Seconds, SecondsOrZero, check_bounds
from deployments.pools import Pool, ReplicaDemand, shortfalls
from serve_app.domain.jobs import JobKind

BUILDER = "deployments.app:build"
WORKERS = {"generator": JobKind.GENERATION, "upscaler": JobKind.UPSCALE}
SCALABLE = ("ingress", *WORKERS)


class ConfigError(ValueError):
    """The file is invalid. The message names the file and the place in it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class HttpOptions(_Strict):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_timeout_s: int = Field(default=90, ge=1)


class RequestRouterConfig(_Strict):
    request_router_class: Literal["deployments.one_machine:Router"]


class PolicyArgs(_Strict):
    kind: JobKind
    target_s: Seconds = 60
    spare: float = Field(default=SPARE, ge=0, le=1)


class ScalingPolicy(_Strict):
    policy_function: Literal["deployments.scaling:BacklogPolicy"]
    policy_kwargs: PolicyArgs


class Autoscaling(_Strict):
    """Serve's `autoscaling_config`. What is unset has Serve's own default."""

    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=1)
    target_ongoing_requests: float | None = Field(default=None, gt=0)
    upscale_delay_s: SecondsOrZero | None = None
    downscale_delay_s: SecondsOrZero | None = None
    downscale_to_zero_delay_s: SecondsOrZero | None = None
    policy: ScalingPolicy | None = None

    @model_validator(mode="after")
    def _bounds_in_order(self) -> "Autoscaling":
        check_bounds(self.min_replicas, self.max_replicas)
        return self


class Deployment(_Strict):
    """What Serve sets over `args` for one deployment: a change of a bound here restarts no replica."""

    name: Literal["ingress", "generator", "upscaler", "housekeeper"]
    request_router_config: RequestRouterConfig | None = None
    """Only `serve run` reads this (`deployments/one_machine.py`)."""
    autoscaling_config: Autoscaling | None = None

    @model_validator(mode="after")
    def _scales_by_its_own_measure(self) -> "Deployment":
        scaling, kind = self.autoscaling_config, WORKERS.get(self.name)
        if scaling is None:
            return self
        if self.name == "housekeeper":
            raise ValueError("housekeeper: runs once, without autoscaling_config")
        policy = scaling.policy
        if kind is not None and (policy is None or policy.policy_kwargs.kind != kind):
            raise ValueError(f"{self.name}: has no requests to count; its policy is BacklogPolicy of kind {kind}")
        if kind is None and (policy is not None or scaling.min_replicas < 1):
            raise ValueError("ingress: scales by target_ongoing_requests, without a policy, and never to zero")
        return self


class Application(_Strict):
    name: str = "atelier"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build"] = BUILDER
    deployments: tuple[Deployment, ...] = ()
    args: AppArgs = AppArgs()

    @property
    def scaling(self) -> Mapping[str, Autoscaling]:
        """The deployments that Serve scales by what this file says of them."""
        return {one.name: one.autoscaling_config for one in self.deployments if one.autoscaling_config}

    @model_validator(mode="after")
    def _scaling_is_given_once(self) -> "Application":
        for name in SCALABLE:
            replicas: object = getattr(self.args, name).replicas
            if name in self.scaling and replicas != "auto":
                raise ValueError(f"args.{name}.replicas: must be auto, since {name} has an autoscaling_config")
            if replicas == "auto" and name not in self.scaling:
                raise ValueError(f"args.{name}.replicas: auto, and {name} has no autoscaling_config under deployments")
        return self


class LoggingConfig(_Strict):
    """How Serve's controller and proxies log; `build` sets how replicas do, by `ATELIER_LOG_FORMAT`."""

    encoding: Literal["TEXT", "JSON"] = "TEXT"
    enable_access_log: bool = False


class ServeConfig(_Strict):
    """The part of Serve's schema for one application, and the pools of nodes that its replicas must fit."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = HttpOptions()
    logging_config: LoggingConfig = LoggingConfig()
    applications: tuple[Application] = (Application(),)
    pools: tuple[Pool, ...] = ()
    """Serve ignores them, so that a change restarts nothing."""

    @model_validator(mode="after")
    def _replicas_fit_the_pools(self) -> "ServeConfig":
        if found := shortfalls(self.demands, self.pools):
            raise ValueError("; ".join(map(str, found)))
        return self

    @property
    def args(self) -> AppArgs:
        return self.applications[0].args

    @property
    def demands(self) -> list[ReplicaDemand]:
        return demands(self.args, self.applications[0].scaling)


def demands(args: AppArgs, scaling: Mapping[str, Autoscaling] | None = None) -> list[ReplicaDemand]:
    """What each deployment asks of the nodes when it is at its largest, as far as it is known."""
    most = {name: bounds.max_replicas for name, bounds in (scaling or {}).items()}
    replicas: dict[str, ReplicaArgs] = {"ingress": args.ingress, "generator": args.generator, "upscaler": args.upscaler}
    keeper = args.housekeeper
    return [
        *(
            ReplicaDemand(
                deployment=name,
                replicas=most.get(name, asked.most_replicas),
                gpus=asked.num_gpus,
                cpus=asked.num_cpus,
                resources=asked.resources,
            )
            for name, asked in replicas.items()
        ),
        ReplicaDemand(deployment="housekeeper", replicas=1, cpus=keeper.num_cpus, resources=keeper.resources),
    ]


def read_config(path: Path) -> ServeConfig:
    """Read and validate the file. Raises `ConfigError` with one line."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ServeConfig.model_validate(content or {})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(": ".join(filter(None, (str(path), place, first["msg"])))) from error
