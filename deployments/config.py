"""Reads a Serve YAML for `atelier up`. Unknown fields are errors, which Serve's own schema ignores."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deployments.args import AppArgs, HousekeeperArgs, ReplicaArgs
from deployments.pools import Pool, ReplicaDemand, shortfalls

BUILDER = "deployments.app:build"


class ConfigError(ValueError):
    """The file is invalid. The message names the file and the place in it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpOptions(_Strict):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_timeout_s: int = Field(default=90, ge=1)


class RequestRouterConfig(_Strict):
    request_router_class: Literal["deployments.one_machine:Router"]


class Deployment(_Strict):
    """For `serve run` alone (`deployments/one_machine.py`)."""

    name: Literal["housekeeper"]
    request_router_config: RequestRouterConfig


class Application(_Strict):
    name: str = "atelier"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build"] = BUILDER
    deployments: tuple[Deployment, ...] = ()
    args: AppArgs = AppArgs()


class LoggingConfig(_Strict):
    encoding: Literal["TEXT", "JSON"] = "TEXT"


class PoolConfig(_Strict):
    """Nodes of one kind. Serve ignores `pools:`, so that a change of it restarts nothing."""

    name: str
    nodes: int = Field(ge=1)
    gpus: int = Field(default=0, ge=0)
    cpus: float | None = Field(default=None, gt=0)
    resources: dict[str, float] = Field(default_factory=dict)


class ServeConfig(_Strict):
    """The part of Serve's schema for one application, and the pools of nodes that its replicas must fit."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = HttpOptions()
    logging_config: LoggingConfig = LoggingConfig()
    applications: tuple[Application] = (Application(),)
    pools: tuple[PoolConfig, ...] = ()

    @model_validator(mode="after")
    def _replicas_fit_the_pools(self) -> "ServeConfig":
        found = shortfalls(demands(self.args), [Pool(**pool.model_dump()) for pool in self.pools])
        if found:
            raise ValueError("; ".join(map(str, found)))
        return self

    @property
    def args(self) -> AppArgs:
        return self.applications[0].args


def demands(args: AppArgs) -> list[ReplicaDemand]:
    """What each deployment asks of the nodes when it is at its largest."""
    return [
        _demand("ingress", args.ingress),
        _demand("generator", args.generator),
        _demand("upscaler", args.upscaler),
        _housekeeper_demand(args.housekeeper),
    ]


def _demand(deployment: str, args: ReplicaArgs) -> ReplicaDemand:
    return ReplicaDemand(
        deployment=deployment,
        replicas=args.replicas if isinstance(args.replicas, int) else args.replicas.max_replicas,
        gpus=args.num_gpus,
        cpus=args.num_cpus,
        resources=args.resources,
    )


def _housekeeper_demand(args: HousekeeperArgs) -> ReplicaDemand:
    return ReplicaDemand(deployment="housekeeper", replicas=1, cpus=args.num_cpus, resources=args.resources)


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
        raise ConfigError(f"{path}: {first_error(error)}") from error


def first_error(error: ValidationError) -> str:
    """The first error in one line: place and message."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]
