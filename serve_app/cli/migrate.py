"""`atelier migrate`: list and apply the changes that a version makes to what Redis holds."""

from typing import Annotated

import typer

from serve_app.cli.command import Result, store_command, table
from serve_app.service.resources import Resources


def add_migrate(app: typer.Typer) -> None:
    store_command(app, "migrate")(_migrate)


async def _migrate(
    resources: Resources,
    apply: Annotated[bool, typer.Option("--apply", help="Apply pending migrations.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Apply all migrations, including those already applied.")
    ] = False,
) -> Result:
    """List the migrations of Redis, or apply them.

    A housekeeper applies them by itself 10 minutes after its start.
    """
    done = await resources.compaction.apply_migrations(again=again) if apply or again else []
    found = await resources.compaction.migrations()
    facts = [
        {
            "name": each.name,
            "summary": each.summary,
            "applied_at": each.applied_at.isoformat() if each.applied_at else None,
        }
        for each in found
    ]
    lines = [
        (each.name, f"{each.applied_at:%Y-%m-%d %H:%M:%S}" if each.applied_at else "not yet", each.summary)
        for each in found
    ]
    shown = table(("MIGRATION", "APPLIED", "WHAT IT DOES"), lines, empty="There are none.")
    return Result(facts={"applied": done, "migrations": facts}, shown=shown)
