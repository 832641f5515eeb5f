"""Exit codes: 0 success, 1 failure, 2 bad usage or a bad setting. The error is one line on stderr."""

import sys
from collections.abc import Sequence
from typing import Any, Never

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from serve_app.client import AtelierClientError
from serve_app.domain.errors import AtelierError

INTERRUPTED = 130


class Failed(TyperException):
    """The command is valid and could not be carried out."""


class BadUsage(TyperException):
    """The command or a setting is wrong."""

    exit_code = 2


class OneLineErrors(TyperGroup):
    """The `atelier` command group. Prints every error in one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Never:
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except TyperException as error:
            _print_error(error.format_message())
            sys.exit(error.exit_code)
        except (AtelierError, AtelierClientError, OSError) as error:
            _print_error(str(error))
            sys.exit(1)
        except typer.Abort:
            _print_error("interrupted")
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _print_error(message: str) -> None:
    """Print one line; nothing when the message is empty, as after the help text."""
    if message:
        typer.echo(f"atelier: {' '.join(message.split())}", err=True)
