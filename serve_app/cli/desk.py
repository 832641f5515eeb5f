"""The settings and the stores as a command needs them: every mistake named, no service started by accident."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from serve_app.cli.ending import BadUsage, Failed
from serve_app.service.resources import Resources, open_resources
from serve_app.settings import Settings
from serve_app.stores.catalog import CatalogError
from serve_app.stores.embedded import running_redis, stop_redis


def read_settings(**given: Any) -> Settings:
    """The environment's settings with what the command line gives over them. Raises `BadUsage` naming the bad one."""
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise BadUsage(f"{_setting_name(first['loc'])}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    except SettingsError as error:
        raise BadUsage(f"{error}: must be JSON") from None
    if settings.redis_url and not _is_redis_address(settings.redis_url):
        raise BadUsage("REDIS_URL: must be a redis://, rediss:// or unix:// address")
    try:
        _ = settings.plan_table
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise BadUsage(f"ATELIER_PLANS: {settings.plans}: {error}") from None
    return settings


@asynccontextmanager
async def opened(settings: Settings, *, first: bool = False) -> AsyncGenerator[Resources]:
    """The stores of a service, running or not. A Redis that had to be started for the command is stopped after it.

    Raises `Failed` when there is no service at this data directory, unless the command may be the `first`.
    """
    if settings.redis_url:
        async with _open(settings) as resources:
            yield resources
        return
    if not first and not (settings.data_dir / "redis").is_dir():
        raise Failed(
            f"no service keeps its data in {settings.data_dir.resolve()}: "
            "start one with `atelier up`, or name another with --data-dir or --redis-url"
        )
    was_running = running_redis(settings.data_dir) is not None
    try:
        async with _open(settings) as resources:
            yield resources
    finally:
        if not was_running:
            stop_redis(settings.data_dir)


@asynccontextmanager
async def _open(settings: Settings) -> AsyncGenerator[Resources]:
    """Raises `BadUsage` when a setting keeps the stores from opening."""
    opening = open_resources(settings)
    try:
        resources = await opening.__aenter__()
    except CatalogError as error:
        raise BadUsage(f"catalog: {error}") from None
    except (ValueError, ImportError) as error:  # what fsspec raises for a protocol it does not know or cannot load
        raise BadUsage(f"ATELIER_STORAGE_URL: {error}") from None
    try:
        yield resources
    finally:
        await opening.__aexit__(None, None, None)


def _is_redis_address(text: str) -> bool:
    try:
        address = urlsplit(text)
        _ = address.port
    except ValueError:
        return False
    return address.scheme in ("redis", "rediss", "unix") and bool(address.netloc or address.path)


def _setting_name(loc: tuple[int | str, ...]) -> str:
    name = str(loc[0]) if loc else "settings"
    return name if name.isupper() else f"ATELIER_{name.upper()}"
