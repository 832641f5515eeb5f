"""Logging for every process, with secrets and prompts redacted."""

import logging
import re
from typing import TextIO

_SECRETS = re.compile(
    r"atl_[0-9A-Za-z]{6,}"  # API keys
    r"|(?i:bearer)\s+\S+"
    r"|(?i:x-api-key['\"]?\s*[:=]\s*['\"]?)\S+"
    r"|(?i:sig)=[0-9A-Za-z_\-]+"
    r"|whsec_\S+"
    r"|(?i:(?:positive_|negative_)?prompt['\"]?\s*[:=]\s*)(?:'[^']*'|\"[^\"]*\"|\S+)"
)
REDACTED = "[redacted]"


class RedactingFormatter(logging.Formatter):
    """Redacts API keys, signatures and prompts from the finished line, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return _SECRETS.sub(REDACTED, super().format(record))


class _LossyHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written (disk full, stream closed).

        The library's own handler may raise, and prints the line's arguments unredacted.
        """


def configure_logging(level: str = "INFO") -> None:
    """Log to standard error at `level`, redacted; logging never raises. Call once, at a process's start."""
    handler = _LossyHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
