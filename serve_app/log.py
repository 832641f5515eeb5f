"""One logging set-up for every process, with one formatter that no secret or prompt passes."""

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
    """Rewrites a finished line, traceback included, so that keys, signatures and prompts never reach a file."""

    def format(self, record: logging.LogRecord) -> str:
        return _SECRETS.sub(REDACTED, super().format(record))


class _LossyHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written (disk full, stream closed) is lost; the work it tells of goes on. The library's own
        answer may raise, and prints the line's arguments as they are, secrets included."""


def configure_logging(level: str = "INFO") -> None:
    """Log to standard error at `level`, redacted. Never raises into whoever logs. Call once, at a process's start."""
    handler = _LossyHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
