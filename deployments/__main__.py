"""The `atelier` command, which is also `python -m deployments`; without what the service needs, it says what to install."""

import gc
import sys

NOT_INSTALLED, INTERRUPTED = 2, 130
"""The exit codes are those of bad usage and of Ctrl-C."""


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
    gc.disable()  # a tenth of the time went into looking for garbage among what is imported
    try:
        from deployments.local import main as command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("serve_app", "deployments"):
            raise
        sys.stderr.write(
            f"atelier: only the Python SDK is installed (there is no {error.name}): for the service, `make setup` in a "
            "checkout, or `pip install '.[server]'` there\n"
        )
        sys.exit(NOT_INSTALLED)
    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
