"""The `atelier` command of operators. Every subcommand takes `--json`, `--data-dir` and `--redis-url`.

`deployments/local.py` adds to `app` what knows Ray: `up`, `check` and `doctor`.
"""

from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer

from serve_app.cli import accounts, doctor, jobs, keys, loras, marking, operators
from serve_app.cli.command import OneLineErrors, command
from serve_app.client import commands

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


def _asking(name: str) -> Callable[[typer.Context], None]:
    """Name an account's command in the help; `deployments/__main__.py` calls it without loading all this."""

    def ask(context: typer.Context) -> None:
        commands.main([*name.split(), *context.args])

    return ask


app.add_typer(accounts.app, name="accounts")
app.add_typer(keys.app, name="keys")
app.add_typer(loras.app, name="loras")
app.add_typer(jobs.app, name="jobs")
app.add_typer(operators.app, name="operators")
app.add_typer(marking.app, name="marking")
for function in (accounts.audit, doctor.backup, doctor.restore, accounts.usage, marking.verify):
    command(app, function.__name__)(function)
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for name, group in (("generate", app), ("upscale", app), ("loras try", loras.app)):
    group.command(name.split()[-1], help=commands.COMMANDS[name][0], context_settings=PASSED_ON)(_asking(name))

__all__ = ["app"]
