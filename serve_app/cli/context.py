"""Opens settings and stores for a command, reports bad settings by name, and starts no service."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from serve_app.cli.exit_codes import BadUsage, Failed
from serve_app.service.resources import Resources, open_resources
from serve_app.settings import Settings
from serve_app.stores.catalog_file import CatalogError
from serve_app.stores.embedded import redis_left_as_it_was
from serve_app.stores.redis_address import KINDS, is_redis_address


def read_settings(**given: Any) -> Settings:
    """Settings from the environment, overridden by the command line. Raises `BadUsage` naming the bad one."""
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise BadUsage(f"{_setting_name(first['loc'])}: {message[:1].lower()}{message[1:]}") from None
    except SettingsError as error:
        raise BadUsage(f"{error}: must be JSON") from None
    if settings.redis_url and not is_redis_address(settings.redis_url):
        raise BadUsage(f"REDIS_URL: must be {KINDS}")
    try:
        _ = settings.plan_table
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise BadUsage(f"ATELIER_PLANS: {settings.plans}: {error}") from None
    return settings


@asynccontextmanager
async def open_stores(settings: Settings, *, creates_data: bool = False) -> AsyncGenerator[Resources]:
    """Open the stores of a service, running or not. A Redis started for the command is stopped after it.

    Raises `Failed` when the data directory holds no service, unless the command `creates_data`.
    """
    if settings.redis_url:
        async with _open(settings) as resources:
            yield resources
        return
    if not creates_data and not (settings.data_dir / "redis").is_dir():
        raise Failed(
            f"no service has its data in {settings.data_dir.resolve()}: "
            "start one with `atelier up`, or give --data-dir or --redis-url"
        )
    with redis_left_as_it_was(settings.data_dir):
        async with _open(settings) as resources:
            yield resources


@asynccontextmanager
async def _open(settings: Settings) -> AsyncGenerator[Resources]:
    """Raises `BadUsage` when the stores cannot open because of a setting."""
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


def _setting_name(loc: tuple[int | str, ...]) -> str:
    name = str(loc[0]) if loc else "settings"
    return name if name.isupper() else f"ATELIER_{name.upper()}"
