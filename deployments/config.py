"""Reads a Serve YAML for `atelier up`. Unknown fields are errors, which Serve's own schema ignores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Discriminator, Field, Tag, ValidationError, model_validator

from deployments.args import AppArgs, GroupArgs, ReplicaArgs, Seconds, SecondsOrZero, Strict
from deployments.pools import Pool, ReplicaDemand, shortfalls
from serve_app.domain.jobs import DEFAULT_GROUP, JobKind, pool_of

BUILDER, GROUP_BUILDER = "deployments.app:build", "deployments.app:build_group"
GENERATOR = "generator"
"""The deployment of generators has this name in every application that has one."""
POOLS = {GENERATOR: pool_of(DEFAULT_GROUP), "upscaler": str(JobKind.UPSCALE)}
"""The pools of the main application's workers."""
SCALABLE = ("ingress", *POOLS)


class ConfigError(ValueError):
    """The file is invalid. The message names the file and the place in it."""


class HttpOptions(Strict):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_timeout_s: int = Field(default=90, ge=1)


class RequestRouterConfig(Strict):
    request_router_class: Literal["deployments.one_machine:Router"]


SPARE = 0.15
"""The share of replicas beyond those needed: a job whose adapter only full replicas hold costs another load."""


class PolicyArgs(Strict):
    """Scales by demand and backlog: enough for what arrives, and one more for each `target_s` seconds of waiting work.

    `target_s` should exceed the time that a replica takes to start; below it, more are started than needed
    (`benchmarks/fleet.py`).
    """

    kind: str
    """The pool whose jobs are counted."""
    target_s: Seconds = 60
    spare: float = Field(default=SPARE, ge=0, le=1)


class ScalingPolicy(Strict):
    policy_function: Literal["deployments.scaling:BacklogPolicy"]
    policy_kwargs: PolicyArgs


class Autoscaling(Strict):
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
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class Deployment(Strict):
    """What Serve sets over `args` for one deployment: a change of a bound here restarts no replica."""

    name: Literal["ingress", "generator", "upscaler", "housekeeper"]
    request_router_config: RequestRouterConfig | None = None
    """Only `serve run` reads this (`deployments/one_machine.py`)."""
    autoscaling_config: Autoscaling | None = None


def _check_scaling(
    name: str, asked: ReplicaArgs | None, scaling: Autoscaling | None, pool: str | None, place: str
) -> None:
    """Refuse scaling that is given twice or by the wrong measure; only a deployment without a pool counts requests."""
    if asked is None:
        if scaling is not None:
            raise ValueError(f"{name}: has an autoscaling_config, and {place} is null")
        return
    if scaling is None:
        if asked.replicas == "auto":
            raise ValueError(f"{place}.replicas: auto, and {name} has no autoscaling_config under deployments")
        return
    policy = scaling.policy
    if pool is not None and (policy is None or policy.policy_kwargs.kind != pool):
        wanted = f"policy: {{policy_function: 'deployments.scaling:BacklogPolicy', policy_kwargs: {{kind: {pool}}}}}"
        raise ValueError(f"{name}: scales by the jobs that wait for it, so its autoscaling_config needs {wanted}")
    if pool is None and (policy is not None or scaling.min_replicas < 1):
        raise ValueError("ingress: scales by target_ongoing_requests, without a policy, and never to zero")
    if asked.replicas != "auto":
        raise ValueError(f"{place}.replicas: must be auto, since {name} has an autoscaling_config")


class _Deployed(Strict):
    deployments: tuple[Deployment, ...] = ()

    @property
    def scaling(self) -> Mapping[str, Autoscaling]:
        """The deployments that Serve scales by what this file says of them."""
        return {one.name: one.autoscaling_config for one in self.deployments if one.autoscaling_config}


class Application(_Deployed):
    name: str = "atelier"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build"] = BUILDER
    args: AppArgs = AppArgs()

    @model_validator(mode="after")
    def _scaling_is_given_once(self) -> "Application":
        if "housekeeper" in self.scaling:
            raise ValueError("housekeeper: runs once, without autoscaling_config")
        for name in SCALABLE:
            _check_scaling(name, getattr(self.args, name), self.scaling.get(name), POOLS.get(name), f"args.{name}")
        return self


class GroupApplication(_Deployed):
    """The generators of one group of base models, named after the group."""

    name: str
    route_prefix: None
    """Serve's own default is `/`, which is the main application's."""
    import_path: Literal["deployments.app:build_group"]
    args: GroupArgs

    @model_validator(mode="after")
    def _is_of_one_group(self) -> "GroupApplication":
        group = self.args.group
        if self.name != group:
            raise ValueError(f"name: must be the group, {group}")
        if other := [one.name for one in self.deployments if one.name != GENERATOR]:
            raise ValueError(f"deployments: a group has a {GENERATOR} only, not {', '.join(other)}")
        _check_scaling(GENERATOR, self.args, self.scaling.get(GENERATOR), pool_of(group), "args")
        return self


def _builder(application: Any) -> str:
    named = application.get("import_path") if isinstance(application, dict) else application.import_path
    return GROUP_BUILDER if named == GROUP_BUILDER else BUILDER


AnyApplication = Annotated[
    Annotated[Application, Tag(BUILDER)] | Annotated[GroupApplication, Tag(GROUP_BUILDER)], Discriminator(_builder)
]


class LoggingConfig(Strict):
    """How Serve's controller and proxies log; `build` sets how replicas do, by `ATELIER_LOG_FORMAT`."""

    encoding: Literal["TEXT", "JSON"] = "TEXT"
    enable_access_log: bool = False


class ServeConfig(Strict):
    """The part of Serve's schema for the service, and the pools of nodes that its replicas must fit."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = HttpOptions()
    logging_config: LoggingConfig = LoggingConfig()
    applications: tuple[AnyApplication, ...] = (Application(),)
    """The main application, and one for each further group of base models."""
    pools: tuple[Pool, ...] = ()
    """Serve ignores them, so that a change restarts nothing."""

    @model_validator(mode="after")
    def _one_is_the_main_one(self) -> "ServeConfig":
        if len(self.applications) - len(self.groups) != 1:
            raise ValueError(f"applications: exactly one must be of {BUILDER}")
        names = [each.name for each in self.applications]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"applications: {', '.join(twice)}: two have this name")
        return self

    @model_validator(mode="after")
    def _replicas_fit_the_pools(self) -> "ServeConfig":
        if found := shortfalls(self.demands, self.pools):
            raise ValueError("; ".join(map(str, found)))
        return self

    @property
    def main(self) -> Application:
        return next(each for each in self.applications if isinstance(each, Application))

    @property
    def groups(self) -> list[GroupApplication]:
        return [each for each in self.applications if isinstance(each, GroupApplication)]

    @property
    def args(self) -> AppArgs:
        """Return the main application's args."""
        return self.main.args

    @property
    def served_groups(self) -> set[str]:
        """Return the groups of base models that have generators."""
        return {each.name for each in self.groups} | ({DEFAULT_GROUP} if self.args.generator else set[str]())

    @property
    def demands(self) -> list[ReplicaDemand]:
        return [demand for each in self.applications for demand in demands(each.args, each.scaling)]


def demands(args: AppArgs | GroupArgs, scaling: Mapping[str, Autoscaling] | None = None) -> list[ReplicaDemand]:
    """What each deployment asks of the nodes when it is at its largest, as far as it is known."""
    most = {name: bounds.max_replicas for name, bounds in (scaling or {}).items()}
    if isinstance(args, GroupArgs):
        return [_demand(f"{GENERATOR}.{args.group}", args, most.get(GENERATOR))]
    replicas = {"ingress": args.ingress, GENERATOR: args.generator, "upscaler": args.upscaler}
    keeper = args.housekeeper
    return [
        *(_demand(name, asked, most.get(name)) for name, asked in replicas.items() if asked is not None),
        ReplicaDemand(deployment="housekeeper", replicas=1, cpus=keeper.num_cpus, resources=keeper.resources),
    ]


def _demand(name: str, asked: ReplicaArgs, most: int | None) -> ReplicaDemand:
    return ReplicaDemand(
        deployment=name,
        replicas=most or asked.most_replicas,
        gpus=asked.num_gpus,
        cpus=asked.num_cpus,
        resources=asked.resources,
    )


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
        place = ".".join(str(part) for part in first["loc"] if part not in (BUILDER, GROUP_BUILDER))
        raise ConfigError(": ".join(filter(None, (str(path), place, first["msg"])))) from error
