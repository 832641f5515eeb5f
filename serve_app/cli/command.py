"""Registers commands: reads the settings, opens the stores, prints the result, and starts no service.

The exit code is 0 for success, 1 for failure, 2 for bad usage or a bad setting. An error is one line on stderr.
"""

import asyncio
import inspect
import json
import re
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Never, TypeVar, cast

import typer
import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup
from typer.exceptions import TyperException

from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.client import AtelierClientError
from serve_app.domain.errors import AtelierError, InvalidParameter
from serve_app.log import configure_logging
from serve_app.loras.catalog_file import CatalogError
from serve_app.settings import Settings
from serve_app.store.embedded_redis import redis_left_as_it_was
from serve_app.store.process import Process, open_process
from serve_app.store.redis_address import KINDS, is_redis_address
from serve_app.store.redis_inspection import require_usable

INTERRUPTED = 130
T = TypeVar("T")


class Failed(TyperException):
    """The command is valid and could not be carried out."""


class BadUsage(TyperException):
    """The command or a setting is wrong."""

    exit_code = 2


class OneLineErrors(TyperGroup):
    """The `atelier` command group. Prints every error in one line."""

    def main(self, *args: Any, **options: Any) -> Never:
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except TyperException as error:
            _print_error(error.format_message())
            sys.exit(error.exit_code)
        except (AtelierError, AtelierClientError, OSError) as error:
            _print_error(str(error))
            sys.exit(BadUsage.exit_code if isinstance(error, InvalidParameter) else 1)
        except typer.Abort:
            _print_error("interrupted")
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _print_error(message: str) -> None:
    """Print one line; nothing when the message is empty, as after the help text."""
    if message:
        typer.echo(f"atelier: {' '.join(message.split())}", err=True)


def read_settings(**given: Any) -> Settings:
    """Settings from the environment, overridden by the command line. Raises `BadUsage` naming the bad one."""
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise BadUsage(_first_mistake(error)) from None
    except SettingsError as error:
        field = re.search(r'"(\w+)"', str(error))  # pydantic-settings names the field only in the text
        raise BadUsage(f"{_variable(field[1] if field else 'settings')}: must be JSON") from None
    if settings.redis_url and not is_redis_address(settings.redis_url):
        raise BadUsage(f"REDIS_URL: must be {KINDS}")
    try:
        _ = settings.plan_table
    except ValidationError as error:
        raise BadUsage(f"ATELIER_PLANS: {settings.plans}: {_first_mistake(error, str)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadUsage(f"ATELIER_PLANS: {settings.plans}: {error}") from None
    return settings


def _first_mistake(error: ValidationError, name: Callable[[str], str] | None = None) -> str:
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # a misspelled name comes first
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    outer, *inner = [str(part) for part in first["loc"] if "[" not in str(part)]  # no names of union branches
    return f"{'.'.join([(name or _variable)(outer), *inner])}: {message[:1].lower()}{message[1:]}"


PARTS = (Settings, Process, AccountParts, LoraParts, JobParts, OperationParts)
Parts = Mapping[type[Any], Any]
"""The opened parts that a command works with, by their types."""


@asynccontextmanager
async def open_stores(settings: Settings) -> AsyncGenerator[Parts]:
    """Open a service's parts, whether it runs or not. A Redis started for the command is stopped after it.

    Raises `Failed` when the data directory holds no service.
    """
    with usable_redis(settings):
        async with _open(settings) as parts:
            yield parts


@contextmanager
def usable_redis(settings: Settings) -> Generator[None]:
    """Make sure that there is a Redis to work with; an embedded one that the block starts is stopped after it."""
    if settings.redis_url:
        require_usable(settings.redis_url)
    elif not (settings.data_dir / "redis").is_dir():
        raise Failed(
            f"no service has its data in {settings.data_dir.resolve()}: "
            "start one with `atelier up`, or give --data-dir or --redis-url"
        )
    with nullcontext() if settings.redis_url else redis_left_as_it_was(settings.data_dir):
        yield


@asynccontextmanager
async def _open(settings: Settings) -> AsyncGenerator[Parts]:
    """Compose what commands use. Raises `BadUsage` when it cannot open because of a setting."""
    async with open_process(settings) as process:
        try:
            accounts = AccountParts(process)
            loras = LoraParts(process, accounts)
            jobs = JobParts(process, accounts, loras)
        except (ValueError, ImportError) as error:  # fsspec does not know or cannot load the protocol
            raise BadUsage(f"ATELIER_STORAGE_URL: {error}") from None
        try:
            await loras.applied_catalog.apply_file_once()
        except CatalogError as error:
            raise BadUsage(f"catalog: {error}") from None
        operations = OperationParts(process, accounts, loras, jobs)
        yield {type(part): part for part in (settings, process, accounts, loras, jobs, operations)}


def _variable(field: str) -> str:
    return field if field.isupper() else f"ATELIER_{field.upper()}"


UNLIMITED_COLUMNS = 10_000
"""Width of a table outside a terminal: nothing is cut or wrapped, so that grep and awk see whole lines."""

DataDir = Annotated[Path | None, typer.Option(help="Where the service keeps its data.", envvar="ATELIER_DATA_DIR")]
RedisUrl = Annotated[str | None, typer.Option(help="A Redis of your own instead of the embedded one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Result in JSON.")]


@dataclass(frozen=True, kw_only=True)
class Result:
    """A command's result: `facts` for `--json`, `shown` for a person; with `failed` the exit code is 1.

    In `facts` a time is written as ISO 8601 has it, and a set as a sorted list.
    """

    facts: Any
    shown: RenderableType
    failed: bool = False


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Any]:
    """Add a function that returns a `Result` as a command with the three shared options.

    Its parameters of a type in `PARTS` are given to it; all others are its arguments and options. For a coroutine
    function the stores are opened, of a service that is there; a plain function gets `Settings` alone.
    """

    def register(function: Callable[..., Any]) -> Any:
        parameters = inspect.signature(function).parameters.values()
        parts = {each.name: each.annotation for each in parameters if each.annotation in PARTS}

        async def with_stores(settings: Settings, options: Mapping[str, Any]) -> Result:
            async with open_stores(settings) as opened:
                return await function(**{name: opened[part] for name, part in parts.items()}, **options)

        def run(*, data_dir: DataDir = None, redis_url: RedisUrl = None, as_json: AsJson = False, **own: Any) -> None:
            settings = read_settings(data_dir=data_dir, redis_url=redis_url)
            configure_logging(settings.log_level if settings.log_level != "INFO" else "WARNING")
            is_async = inspect.iscoroutinefunction(function)
            result: Result = asyncio.run(with_stores(settings, own)) if is_async else function(settings, **own)
            _print(result, as_json)
            if result.failed:
                raise typer.Exit(1)

        *shared, _ = inspect.signature(run).parameters.values()
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters if each.name not in parts]
        signature = inspect.Signature([*own, *shared])
        run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        run.__doc__ = function.__doc__
        group.command(name)(run)
        return function

    return register


def listing(
    name: str,
    found: Sequence[T],
    facts: Callable[[T], object],
    columns: Sequence[str],
    row: Callable[[T], Sequence[str]],
    *,
    empty: str,
    **more: object,
) -> Result:
    """Return the facts of each one under `name`, after `more` of them, and a table with a row for each."""
    shown = table(columns, [row(each) for each in found], empty=empty)
    return Result(facts={**more, name: [facts(each) for each in found]}, shown=shown)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> RenderableType:
    """A table of the rows, or the sentence `empty` when there are none."""
    if not rows:
        return empty
    lines = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        lines.add_row(*row)
    return lines


def _print(result: Result, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.facts, indent=2, ensure_ascii=False, default=_in_json))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNLIMITED_COLUMNS
    console.print(result.shown, soft_wrap=True)


def _in_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[str]", value))
    raise TypeError(f"{value!r} has no form in JSON")
