"""The `atelier` command. Every subcommand takes `--json`, `--data-dir` and `--redis-url`.

`deployments/local.py` adds to `app` what knows Ray: `up`, `check` and `doctor`.
"""

from importlib import metadata
from typing import Annotated

import typer

from serve_app.cli import accounts, jobs, keys, loras, operators
from serve_app.cli.accounts import add_usage
from serve_app.cli.audit import add_audit
from serve_app.cli.command import OneLineErrors
from serve_app.cli.doctor import add_restore
from serve_app.cli.images import add_image_commands

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"atelier {metadata.version('atelier')}")
        raise typer.Exit


@app.callback()
def atelier(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Atelier: text-to-image generation with many LoRA adapters, on your own machines."""


app.add_typer(accounts.app, name="accounts")
app.add_typer(keys.app, name="keys")
app.add_typer(loras.app, name="loras")
app.add_typer(jobs.app, name="jobs")
app.add_typer(operators.app, name="operators")
add_audit(app)
add_image_commands(app, loras.app)
add_restore(app)
add_usage(app)

__all__ = ["app"]
