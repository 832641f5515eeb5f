"""Registers commands: the three shared options, the opened stores and the printed result."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from serve_app.cli.context import open_stores, read_settings
from serve_app.log import configure_logging
from serve_app.service.resources import Resources
from serve_app.settings import Settings

P = ParamSpec("P")
UNLIMITED_COLUMNS = 10_000
"""Width of a table outside a terminal: nothing is cut or wrapped, so that grep and awk see whole lines."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A command's result: `facts` for `--json`, `shown` for a person; with `failed` the exit code is 1."""

    facts: Any
    shown: RenderableType
    failed: bool = False


def command(group: typer.Typer, name: str) -> Callable[[Callable[Concatenate[Settings, P], Result]], Any]:
    """Add a command that takes the settings and returns a `Result`."""

    def register(function: Callable[Concatenate[Settings, P], Result]) -> Any:
        def run(data_dir: Path | None, redis_url: str | None, as_json: bool, **options: Any) -> None:
            settings = read_settings(data_dir=data_dir, redis_url=redis_url)
            configure_logging(settings.log_level if settings.log_level != "INFO" else "WARNING")
            result = function(settings, **options)  # pyright: ignore[reportCallIssue] — typer has checked the options
            _print(result, as_json)
            if result.failed:
                raise typer.Exit(1)

        group.command(name)(_with_shared_options(run, function))
        return function

    return register


def store_command(
    group: typer.Typer, name: str, *, creates_data: bool = False
) -> Callable[[Callable[Concatenate[Resources, P], Awaitable[Result]]], Any]:
    """Add a command that takes the opened stores.

    Only one with `creates_data` may create a missing data directory.
    """

    def register(function: Callable[Concatenate[Resources, P], Awaitable[Result]]) -> Any:
        def run(settings: Settings, *args: P.args, **options: P.kwargs) -> Result:
            async def work() -> Result:
                async with open_stores(settings, creates_data=creates_data) as resources:
                    return await function(resources, *args, **options)

            return asyncio.run(work())

        run.__signature__ = inspect.signature(function)  # pyright: ignore[reportFunctionMemberAccess]
        run.__doc__ = function.__doc__
        command(group, name)(run)
        return function

    return register


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> RenderableType:
    """A table of the rows, or the sentence `empty` when there are none."""
    if not rows:
        return empty
    lines = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        lines.add_row(*row)
    return lines


def _with_shared_options(run: Callable[..., None], function: Callable[..., Any]) -> Callable[..., None]:
    """Give `run` the function's own parameters and the three shared ones, for typer to read."""
    _, *own = inspect.signature(function).parameters.values()
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.Signature([*own, *_SHARED])
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__doc__ = function.__doc__
    return run


_DataDir = Annotated[Path | None, typer.Option(help="Where the service keeps its data.", envvar="ATELIER_DATA_DIR")]
_RedisUrl = Annotated[str | None, typer.Option(help="A Redis of your own instead of the embedded one.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Result in JSON.")]
_SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("data_dir", None, _DataDir),
        ("redis_url", None, _RedisUrl),
        ("as_json", False, _AsJson),
    )
]


def _print(result: Result, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.facts, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console = (
        console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=UNLIMITED_COLUMNS)
    )
    console.print(result.shown, soft_wrap=True)
