"""`atelier backup` and `atelier restore`: copy Redis and the local secrets, and check the objects."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer

from serve_app.cli.command import Result, command
from serve_app.cli.exit_codes import Failed
from serve_app.service.backup import BackupFacts, check_backup, make_backup, restore, restore_secrets
from serve_app.service.doctor.stores import is_service_up
from serve_app.settings import Settings
from serve_app.stores.embedded import ensure_redis, running_redis, stop_redis

SHOWN = 5


def add_backup(app: typer.Typer) -> None:
    command(app, "backup")(_backup)
    command(app, "restore")(_restore)


def _backup(
    settings: Settings,
    place: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="A new folder, or an fsspec URL.", show_default=False)
    ],
    stopped: Annotated[
        bool, typer.Option("--stopped", help="The service is stopped, so writes need not be paused.")
    ] = False,
) -> Result:
    """Copy all keys of Redis at one moment, and the local secrets; images stay in their storage.

    The service may run: its writes are paused meanwhile. The copy holds customers' prompts and secrets: only its owner reads it.
    """
    with _redis(settings, creates_data=False) as url:
        facts = make_backup(settings, url, place, pause=not stopped)
    shown = f"{facts.keys} keys, {facts.jobs} jobs, {facts.objects} objects named: {place}\n"
    return _result(
        facts, shown + "Keep it as safe as Redis itself: it holds prompts, digests of keys and local secrets."
    )


def _restore(
    settings: Settings,
    place: Annotated[str, typer.Argument(metavar="DIR|URL", help="What `atelier backup` wrote.", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="Only check the backup and its objects.")] = False,
) -> Result:
    """Write a backup into an empty Redis while the service is stopped.

    With --check, only look whether that would work.
    """
    facts = asyncio.run(check_backup(settings, place))
    if check:
        return _result(facts, _checked(facts))
    if facts.problems:
        raise Failed("; ".join(facts.problems))
    if is_service_up(settings):
        raise Failed("the service runs on this data directory: stop it first")
    restore_secrets(settings, place)
    with _redis(settings, creates_data=True) as url:
        restored = restore(settings, url, place)
    return _result(restored, f"{restored.keys} keys, {restored.jobs} jobs of {restored.made_at:%Y-%m-%d %H:%M:%S} UTC.")


@contextmanager
def _redis(settings: Settings, *, creates_data: bool) -> Generator[str]:
    """The address of the service's Redis; the embedded one is started for the command if it does not run."""
    if settings.redis_url:
        yield settings.redis_url
        return
    if not creates_data and not (settings.data_dir / "redis").is_dir():
        raise Failed(f"no service has its data in {settings.data_dir.resolve()}: give --data-dir or --redis-url")
    was_running = running_redis(settings.data_dir) is not None
    try:
        yield ensure_redis(settings.data_dir).url
    finally:
        if not was_running:
            stop_redis(settings.data_dir)


def _checked(facts: BackupFacts) -> str:
    lines = [f"of {facts.made_at:%Y-%m-%d %H:%M:%S} UTC: {facts.keys} keys, {facts.jobs} jobs; every file is intact"]
    lines += [f"{facts.objects} objects named, {len(facts.missing)} of them not in the storage"]
    lines += [f"  {name}" for name in facts.missing[:SHOWN]] + ["  …"] * (len(facts.missing) > SHOWN)
    return "\n".join([*lines, *facts.problems])


def _result(facts: BackupFacts, shown: str) -> Result:
    return Result(
        facts={
            "made_at": facts.made_at.isoformat(),
            "keys": facts.keys,
            "jobs": facts.jobs,
            "objects": facts.objects,
            "missing": list(facts.missing),
            "problems": list(facts.problems),
        },
        shown=shown,
        failed=bool(facts.missing or facts.problems),
    )
