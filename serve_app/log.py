"""One logging set-up for every process, with one filter that no secret or prompt passes."""

import logging
import re

_SECRETS = re.compile(
    r"atl_[0-9A-Za-z]{6,}"  # API keys
    r"|(?i:bearer)\s+\S+"
    r"|(?i:x-api-key['\"]?\s*[:=]\s*['\"]?)\S+"
    r"|(?i:sig)=[0-9A-Za-z_\-]+"
    r"|whsec_\S+"
    r"|(?i:(?:positive_|negative_)?prompt['\"]?\s*[:=]\s*)(?:'[^']*'|\"[^\"]*\"|\S+)"
)
REDACTED = "[redacted]"


class RedactionFilter(logging.Filter):
    """Rewrites a record's text so that keys, signatures and prompts never reach a file."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        clean = _SECRETS.sub(REDACTED, text)
        if clean != text:
            record.msg, record.args = clean, ()
        return True


def configure_logging(level: str = "INFO") -> None:
    """Log to standard error at `level`, redacted. Call once, at a process's start."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(RedactionFilter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
