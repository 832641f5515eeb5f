"""Where a replica logs to."""

import sys

from deployments.ray_internals import serve_log
from serve_app.log import configure_logging
from serve_app.settings import Settings


def configure_replica_log(settings: Settings) -> None:
    """Log JSON lines to the process's own standard error, a file of Ray's, and text to Serve's log.

    In the place of `sys.stderr` Serve may have put a stream that makes each line a part of one of its own.
    """
    stream = sys.__stderr__ if settings.log_format == "json" else serve_log()
    configure_logging(settings.log_level, settings.log_format, stream=stream)
