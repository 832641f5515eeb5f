"""Logging for every process: each line with the ids of what it is about, secrets and prompts redacted."""

import json
import logging
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

_SECRETS = re.compile(
    r"atl_[0-9A-Za-z]{6,}"  # API keys
    r"|(?i:bearer)\s+\S+"
    r"|(?i:x-api-key['\"]?\s*[:=]\s*['\"]?)\S+"
    r"|(?i:sig)=[0-9A-Za-z_\-]+"
    r"|whsec_\S+"
    r"|(?i:(?:positive_|negative_)?prompt['\"]?\s*[:=]\s*)(?:'[^']*'|\"[^\"]*\"|\S+)"
)
REDACTED = "[redacted]"

_no_ids: Mapping[str, str] = {}
_ids: ContextVar[Mapping[str, str]] = ContextVar("log_ids", default=_no_ids)


@contextmanager
def log_ids(**ids: str | int) -> Generator[None]:
    """Add ids to every line that is logged inside; empty ones are left out.

    They are `request_id`, `account_id`, `job_id` and `attempt`.
    """
    token = _ids.set({**_ids.get(), **{name: str(value) for name, value in ids.items() if value != ""}})
    try:
        yield
    finally:
        _ids.reset(token)


def add_log_id(name: str, value: str) -> None:
    """Add an id to every line that the current task logs from now on."""
    _ids.set({**_ids.get(), name: value})


class RedactingFormatter(logging.Formatter):
    """Redacts API keys, signatures and prompts from the finished line, traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        ids = "".join(f" {name}={value}" for name, value in _ids.get().items())
        first, *more = super().format(record).split("\n")
        return _SECRETS.sub(REDACTED, "\n".join([first + ids, *more]))


class JsonFormatter(logging.Formatter):
    """One JSON object a line; texts are redacted before they are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: _SECRETS.sub(REDACTED, value) for name, value in line.items()}, ensure_ascii=False)


class _LossyHandler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written (disk full, stream closed).

        The library's own handler may raise, and prints the line's arguments unredacted.
        """


def configure_logging(level: str = "INFO", log_format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Log to `stream` or standard error at `level`, redacted. Call once, at a process's start. Logging never raises."""
    handler = _LossyHandler(stream)
    is_json = log_format == "json"
    handler.setFormatter(
        JsonFormatter() if is_json else RedactingFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
