"""What every command shares: its three options, the stores it works with, and its answer."""

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

from serve_app.cli.desk import opened, read_settings
from serve_app.log import configure_logging
from serve_app.service.resources import Resources
from serve_app.settings import Settings

P = ParamSpec("P")
UNLIMITED_COLUMNS = 10_000
"""Width of a table that is not read on a terminal: nothing is cut or wrapped, so that grep and awk see whole lines."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found: `facts` for `--json`, `shown` for a person; `failed` ends it with exit code 1 all the same."""

    facts: Any
    shown: RenderableType
    failed: bool = False


def plain(group: typer.Typer, name: str) -> Callable[[Callable[Concatenate[Settings, P], Answer]], Any]:
    """Adds a command that is given the settings and answers."""

    def register(verb: Callable[Concatenate[Settings, P], Answer]) -> Any:
        def run(data_dir: Path | None, redis_url: str | None, as_json: bool, **options: Any) -> None:
            settings = read_settings(data_dir=data_dir, redis_url=redis_url)
            configure_logging(settings.log_level if settings.log_level != "INFO" else "WARNING")
            answer = verb(settings, **options)  # pyright: ignore[reportCallIssue] — typer has checked the options
            _show(answer, as_json)
            if answer.failed:
                raise typer.Exit(1)

        group.command(name)(_with_shared_options(run, verb))
        return verb

    return register


def operator(
    group: typer.Typer, name: str, *, first: bool = False
) -> Callable[[Callable[Concatenate[Resources, P], Awaitable[Answer]]], Any]:
    """Adds a command that is given the opened stores. Only a `first` one may make a data directory that is not there."""

    def register(verb: Callable[Concatenate[Resources, P], Awaitable[Answer]]) -> Any:
        def run(settings: Settings, *args: P.args, **options: P.kwargs) -> Answer:
            async def work() -> Answer:
                async with opened(settings, first=first) as resources:
                    return await verb(resources, *args, **options)

            return asyncio.run(work())

        run.__signature__ = inspect.signature(verb)  # pyright: ignore[reportFunctionMemberAccess]
        run.__doc__ = verb.__doc__
        plain(group, name)(run)
        return verb

    return register


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> RenderableType:
    """Rows for a person; the sentence `empty` when there is none."""
    if not rows:
        return empty
    drawn = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _with_shared_options(run: Callable[..., None], verb: Callable[..., Any]) -> Callable[..., None]:
    """`run` with the verb's own parameters and the three that every command takes, as typer will read them."""
    _, *own = inspect.signature(verb).parameters.values()
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    signature = inspect.Signature([*own, *_SHARED])
    run.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__doc__ = verb.__doc__
    return run


_DataDir = Annotated[Path | None, typer.Option(help="Where the service keeps its data.", envvar="ATELIER_DATA_DIR")]
_RedisUrl = Annotated[str | None, typer.Option(help="A Redis of your own instead of the embedded one.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
_SHARED = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("data_dir", None, _DataDir),
        ("redis_url", None, _RedisUrl),
        ("as_json", False, _AsJson),
    )
]


def _show(answer: Answer, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer.facts, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console = (
        console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=UNLIMITED_COLUMNS)
    )
    console.print(answer.shown, soft_wrap=True)
