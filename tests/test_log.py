import io
import logging
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr

import pytest

from serve_app.log import REDACTED, configure_logging

KEY = "atl_0123456789abcdefghijABCDEFGHIJxy000000"
log = logging.getLogger("serve_app.test")


@contextmanager
def logging_to_stderr() -> Generator[io.StringIO]:
    """What a process that logs has as its standard error."""
    root = logging.getLogger()
    before = root.handlers[:]
    with redirect_stderr(io.StringIO()) as stream:
        configure_logging()
        try:
            yield stream
        finally:
            root.handlers[:] = before


@pytest.mark.parametrize(
    "text",
    [
        f"key {KEY} refused",
        f"Authorization: Bearer {KEY}",
        "authorization: bearer some-other-token-canary",
        "X-API-Key: canary",
        "GET /files/x.png?exp=1&kid=local&sig=canary",
        '{"prompt": "canary in a coal mine"}',
        "positive_prompt='canary in a coal mine'",
    ],
)
def test_no_secret_and_no_prompt_reaches_the_log(text: str) -> None:
    with logging_to_stderr() as stream:
        log.warning("%s", text)
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("refused")
        said = stream.getvalue()
    assert REDACTED in said
    assert "canary" not in said
    assert KEY not in said


def test_a_line_that_cannot_be_made_is_lost_with_its_secrets() -> None:
    with logging_to_stderr() as stream:
        log.warning("%d pictures", f"Bearer {KEY}")
        log.warning("and on")
        said = stream.getvalue()
    assert KEY not in said
    assert "and on" in said


def test_a_closed_log_stops_nobody() -> None:
    with logging_to_stderr() as stream:
        stream.close()
        log.warning("nobody reads this")
