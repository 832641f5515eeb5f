"""`atelier restore --check`: tells whether a service that was put back from copies is whole."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from serve_app.api.parts import JobParts, OperationParts
from serve_app.cli.command import BadUsage, Failed, Result, command, open_stores
from serve_app.operations.restore_check import RestoreFacts, check_restored
from serve_app.settings import Settings
from serve_app.store.process import Process

SHOWN = 5
"""How many missing files are named; `--json` has them all."""


def add_restore(app: typer.Typer) -> None:
    command(app, "restore")(_restore)


def _restore(
    settings: Settings,
    check: Annotated[bool, typer.Option("--check", help="Check what was put back; nothing is changed.")] = False,
) -> Result:
    """Check after a restore that Redis, the secrets and the storage belong together.

    The copies themselves are put back by the means of Redis and of the storage: docs/operations/backup-and-restore.md.
    """
    if not check:
        guide = "docs/operations/backup-and-restore.md"
        raise BadUsage(f"put the copies back as {guide} says, then run `atelier restore --check`")
    if not settings.has_pepper and not (settings.data_dir / "secrets.json").exists():
        raise Failed(
            f"there is neither ATELIER_PEPPER nor {settings.data_dir / 'secrets.json'}: put it back first, since a "
            "start would make another one, with which no API key works"
        )
    facts = asyncio.run(_check(settings))
    return Result(facts=_facts(facts), shown=_shown(facts), failed=bool(facts.missing or facts.problems))


async def _check(settings: Settings) -> RestoreFacts:
    async with open_stores(settings) as parts:
        jobs: JobParts = parts[JobParts]
        operations: OperationParts = parts[OperationParts]
        return await check_restored(parts[Process], operations.reader, jobs.history, jobs.images)


def _facts(facts: RestoreFacts) -> dict[str, object]:
    newest = facts.newest_job_at.isoformat() if facts.newest_job_at else None
    lists = {"missing": list(facts.missing), "problems": list(facts.problems)}
    return {**asdict(facts), **lists, "newest_job_at": newest}


def _shown(facts: RestoreFacts) -> str:
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
