"""The `atelier` command, also `python -m deployments`: an account's commands by the SDK, the rest by the service."""

import gc
import sys

INTERRUPTED = 130
"""The exit code of Ctrl-C."""


def main() -> None:
    try:
        _run()
    except KeyboardInterrupt:  # while modules are loaded, which takes seconds: a command answers it itself
        sys.exit(INTERRUPTED)


def _run() -> None:
    if sys.argv[1:] == ["mcp"]:  # it needs none of the service's packages, which take seconds to load
        from deployments.mcp_server import main as serve

        serve()
        return
    from serve_app.client.commands import is_of_account
    from serve_app.client.commands import main as ask

    if is_of_account(sys.argv[1:]):  # which needs none of them either
        ask(sys.argv[1:])
    gc.disable()  # a tenth of the time went into looking for garbage among what is imported
    try:
        from deployments.local import main as command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("serve_app", "deployments"):
            raise
        ask(sys.argv[1:])
    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
