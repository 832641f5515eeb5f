"""Reads a Serve YAML the way `atelier up` needs it: strictly, where Serve's own schema lets unknown words pass."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.args import AppArgs

BUILDER = "deployments.app:build"


class ConfigError(ValueError):
    """The file cannot be used; the message names the file and the place in it."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpOptions(_Strict):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_timeout_s: int = Field(default=90, ge=1)


class Application(_Strict):
    name: str = "atelier"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build"] = BUILDER
    args: AppArgs = AppArgs()


class ServeConfig(_Strict):
    """The part of Serve's schema that one machine needs: HTTP options and this one application."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions = HttpOptions()
    applications: tuple[Application] = (Application(),)

    @property
    def args(self) -> AppArgs:
        return self.applications[0].args


def read_config(path: Path) -> ServeConfig:
    """Raises `ConfigError` with one line that says what is wrong and where."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return ServeConfig.model_validate(content or {})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_mistake(error)}") from error


def first_mistake(error: ValidationError) -> str:
    """One line: where, and what."""
    mistake = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in mistake["loc"])
    return f"{place}: {mistake['msg']}" if place else mistake["msg"]
