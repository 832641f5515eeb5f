"""`atelier doctor`: checks everything the service depends on, and advises on each defect."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.command import Result, command
from serve_app.cli.local import check_port
from serve_app.operations.checks import (
    Check,
    Level,
    check_data_directory,
    check_disks,
    check_gpu,
    check_privacy,
    check_versions,
)
from serve_app.operations.store_checks import check_catalog, check_redis, check_secrets, check_storage
from serve_app.settings import Settings

_MARKS = {Level.OK: ("ok", "green"), Level.WARN: ("warn", "yellow"), Level.FAIL: ("FAIL", "bold red")}


Port = Annotated[int, typer.Option(min=1, max=65535, help="The port the service will listen on.")]
AllWeights = Annotated[bool, typer.Option("--all-weights", help="Check every adapter, not the first 20.")]
OfCluster = Annotated[
    bool, typer.Option("--cluster", help="Instead, ask every node of the Ray cluster of this machine, and compare.")
]


def add_doctor(app: typer.Typer, check_cluster: Callable[[], list[Check]]) -> None:
    """Add the command. `check_cluster` asks the nodes of a cluster: this layer knows nothing of Ray."""

    def doctor(
        settings: Settings, port: Port = 8000, all_weights: AllWeights = False, cluster: OfCluster = False
    ) -> Result:
        """Check Redis, storage, GPU, ports, settings, catalog and versions; starts and changes nothing."""
        return checks_result(check_cluster() if cluster else asyncio.run(_run_checks(settings, port, all_weights)))

    command(app, "doctor")(doctor)


def checks_result(checks: Sequence[Check]) -> Result:
    """The checks as a command's result, failed if one of them has."""
    failed = any(check.level is Level.FAIL for check in checks)
    return Result(
        facts={"ok": not failed, "checks": [asdict(check) for check in checks]}, shown=_render(checks), failed=failed
    )


async def _run_checks(settings: Settings, port: int, all_weights: bool) -> list[Check]:
    return [
        *check_versions(),
        *check_data_directory(settings),
        *check_disks(settings),
        *check_privacy(settings),
        *check_secrets(settings),
        *check_redis(settings),
        *await check_storage(settings),
        *await check_catalog(settings, limit=None if all_weights else 20),
        *check_gpu(),
        *check_port(settings, port),
    ]


def _render(checks: Iterable[Check]) -> RenderableType:
    lines = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        word, style = _MARKS[check.level]
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style=style)
        lines.add_row(Text(word, style=style), Text(check.name, style="bold"), found)
    return lines
