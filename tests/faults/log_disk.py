"""A full disk under a process's own log."""

import os

from serve_app.log import configure_logging


def log_to_a_full_disk() -> None:
    """From now on every write to this process's standard output and standard error fails."""
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(full, stream)
    os.close(full)
    configure_logging()
