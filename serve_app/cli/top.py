"""`atelier top` shows the queue, the workers, the adapters and the failures as they are now."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from serve_app.api.parts import JobParts, LoraParts, OperationParts
from serve_app.cli.command import Result, table
from serve_app.domain.durations import rounded_duration
from serve_app.operations.overview import adapter_names, overview

_GIB = 1 << 30
_USES = {"weights": "weights", "adapters": "slots", "adapter_cache": "cache"}
"""The uses of memory that an operator can change, with the word that is shown for each."""


async def top(
    loras: LoraParts,
    jobs: JobParts,
    operations: OperationParts,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit; add --json for scripts.")] = False,
    every: Annotated[float, typer.Option(min=0.5, max=60, help="Refresh interval in seconds.")] = 2.0,
) -> Result:
    """Show the queue, the workers, the adapters and the failures until Ctrl-C."""
    names = await adapter_names(loras.catalog)

    async def look() -> dict[str, Any]:
        return await overview(operations.measures, jobs.stats, jobs.dead_letters, operations.workers, names)

    facts = await look()
    console = Console(highlight=False, markup=False, emoji=False)
    if once or not console.is_terminal:
        return Result(facts=facts, shown=_render(facts))
    with Live(_render(facts), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(every)
                facts = await look()
                live.update(_render(facts), refresh=True)
        except asyncio.CancelledError:  # Ctrl-C cancels it
            return Result(facts=facts, shown="")


def _render(facts: dict[str, Any]) -> RenderableType:
    jobs = facts["jobs"]
    head = f"{datetime.now(UTC):%H:%M:%S} UTC   " + "   ".join(f"{name} {count}" for name, count in jobs.items())
    parts: list[RenderableType] = [Text(head), *_section("Queue", _queue(facts["queue"]))]
    parts += _section("Workers", _workers(facts["workers"]))
    parts += [Text(f"A {kind} worker starts: {words}") for kind, words in facts["starting"].items()]
    for kind, reason in facts["start_failures"].items():
        parts.append(Text(f"The last {kind} worker could not start: {reason}", style="red"))
    parts += _section("Adapters with waiting jobs", _adapters(facts["adapters"]))
    parts += _section("Failures", _failures(facts["failures"]))
    return Group(*parts)


def _section(title: str, content: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold underline"), content]


def _queue(queue: dict[str, Any]) -> RenderableType:
    rows = [
        (
            kind,
            *(str(row[name]) for name in ("ready", "running", "delayed")),
            *(rounded_duration(timedelta(seconds=row[name])) for name in ("backlog_seconds", "oldest_seconds")),
        )
        for kind, row in queue.items()
    ]
    return table(("kind", "ready", "running", "delayed", "work", "oldest"), rows, empty="")


def _workers(workers: list[dict[str, Any]]) -> RenderableType:
    rows = [
        (
            row["name"],
            row["kind"],
            f"{row['runs']} of {row['runs_limit']}" if "runs" in row and "runs_limit" in row else "-",
            str(row.get("adapters", "-")),
            _memory(row.get("memory", {})),
            f"{row['gpu_bytes_used'] / _GIB:.1f} of {row['gpu_bytes'] / _GIB:.0f} GiB" if "gpu_bytes" in row else "-",
        )
        for row in workers
    ]
    return table(
        ("worker", "kind", "runs", "adapters", "memory", "GPU memory"), rows, empty="none has been seen within a minute"
    )


def _memory(by_device: dict[str, dict[str, int]]) -> str:
    uses = {use: size for device in by_device.values() for use, size in device.items()}
    return ", ".join(f"{word} {decimal(uses[use])}" for use, word in _USES.items() if uses.get(use)) or "-"


def _adapters(adapters: dict[str, Any]) -> RenderableType:
    rows = [(row["name"], str(row["jobs"])) for row in adapters["waiting"]]
    waiting = table(("adapter", "jobs"), rows, empty="none")
    return Group(waiting, Text(f"{adapters['loads']} loads, {adapters['evictions']} evictions in total"))


def _failures(failures: dict[str, Any]) -> RenderableType:
    codes = "   ".join(f"{code} {count}" for code, count in failures["by_code"].items())
    rows = [(row["at"][:19], row["id"], row["code"], row["message"]) for row in failures["newest"]]
    newest = table(("at", "job", "code", "message"), rows, empty="none")
    return Group(newest, Text(f"{failures['dead']} dead letters   {codes}"))
