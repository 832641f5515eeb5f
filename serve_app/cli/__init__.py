"""The `atelier` command. Every subcommand takes `--json`, `--data-dir` and `--redis-url`.

`deployments/local.py` adds to `app` what knows Ray: `up`, `check` and `doctor`.
"""

from importlib import metadata
from typing import Annotated

import typer

from serve_app.cli import accounts, doctor, images, jobs, keys, loras, marking, operators
from serve_app.cli.command import OneLineErrors, command

app = typer.Typer(
    cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rich's own would take [green] in a help text for a colour, and not show it
)  # fmt: skip


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
app.add_typer(marking.app, name="marking")
for function in (accounts.audit, images.generate, images.upscale, doctor.restore, accounts.usage, marking.verify):
    command(app, function.__name__)(function)
command(loras.app, "try")(images.try_lora)

__all__ = ["app"]
