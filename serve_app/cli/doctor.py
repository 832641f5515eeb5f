"""`atelier doctor` checks what a service depends on.

`atelier backup` copies its Redis, and `atelier restore --check` checks a service that was put back from copies.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.api.parts import JobParts, OperationParts
from serve_app.cli.command import BadUsage, Failed, Result, command, open_stores, usable_redis
from serve_app.cli.local import check_port
from serve_app.operations.checks import Check, Level, check_gpu
from serve_app.operations.restore_check import RestoreFacts, check_restored
from serve_app.operations.store_checks import MOST_WEIGHTS, check_service
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.process import Process
from serve_app.store.redis_copy import note_copy, store_copy

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
    most = None if all_weights else MOST_WEIGHTS
    checks = await check_service(settings, most_weights=most, weights_within=timedelta.max)
    return [*checks, *check_gpu(), *check_port(settings, port)]


def _render(checks: Iterable[Check]) -> RenderableType:
    lines = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        word, style = _MARKS[check.level]
        found = Text(check.found)
        if check.advice:
            found.append(f"\n→ {check.advice}", style=style)
        lines.add_row(Text(word, style=style), Text(check.name, style="bold"), found)
    return lines


SHOWN = 5
"""A person is shown the names of at most this many missing files; `--json` has them all."""


def backup(
    settings: Settings,
    place: Annotated[
        str, typer.Argument(help="A folder, or an URL that ATELIER_STORAGE_OPTIONS opens.", show_default=False)
    ] = "",
    keep: Annotated[int | None, typer.Option(min=1, help="How many copies stay there.", show_default="all")] = None,
    made: Annotated[bool, typer.Option("--made", help="Copy nothing: other means have made a copy.")] = False,
) -> Result:
    """Copy Redis whole, as redis-TIME.rdb, and note when: `atelier doctor` and the metrics tell a missing copy.

    The secrets and the storage are copied by means of yours, after it: docs/operate/backup-and-restore.md.
    """
    if bool(place) == made:
        raise BadUsage("say where the copy goes, a folder or an URL, or --made")
    with usable_redis(settings):
        url = settings.redis_url or ensure_redis(settings.data_dir).url
        copy = "" if made else store_copy(url, place, settings.storage_options, keep=keep)
        note_copy(url)
    return Result(facts={"copy": copy}, shown=f"Redis is copied to {copy}" if copy else "noted")


def restore(
    settings: Settings,
    check: Annotated[bool, typer.Option("--check", help="Check what was put back; nothing is changed.")] = False,
) -> Result:
    """Check after a restore that Redis, the secrets and the storage belong together.

    The copies themselves are put back by the means of Redis and of the storage: docs/operate/backup-and-restore.md.
    """
    if not check:
        guide = "docs/operate/backup-and-restore.md"
        raise BadUsage(f"put the copies back as {guide} says, then run `atelier restore --check`")
    if not settings.has_pepper and not (settings.data_dir / "secrets.json").exists():
        raise Failed(
            f"there is neither ATELIER_PEPPER nor {settings.data_dir / 'secrets.json'}: put it back first, since a "
            "start would make another one, with which no API key works"
        )
    facts = asyncio.run(_check(settings))
    return Result(facts=asdict(facts), shown=_restored(facts), failed=bool(facts.missing or facts.problems))


async def _check(settings: Settings) -> RestoreFacts:
    async with open_stores(settings) as parts:
        jobs: JobParts = parts[JobParts]
        operations: OperationParts = parts[OperationParts]
        return await check_restored(parts[Process], operations.reader, jobs.history, jobs.images)


def _restored(facts: RestoreFacts) -> str:
    newest = f", the newest accepted {facts.newest_job_at:%Y-%m-%d %H:%M:%S} UTC" if facts.newest_job_at else ""
    lines = [
        f"{facts.redis}: {facts.accounts} accounts, {facts.keys} API keys that work",
        f"{facts.jobs} jobs read{newest}",
        f"{facts.images} images and {facts.loras} LoRA files looked for, {len(facts.missing)} not in the storage",
        *(f"  {uri}" for uri in facts.missing[:SHOWN]),
        *["  …"] * (len(facts.missing) > SHOWN),
        *facts.problems,
    ]
    return "\n".join(lines)
