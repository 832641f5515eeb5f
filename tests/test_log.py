import io
import json
import logging
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr

import pytest

from serve_app.log import REDACTED, LogFormat, configure_logging, log_ids

KEY = "atl_0123456789abcdefghijABCDEFGHIJxy000000"
log = logging.getLogger("serve_app.test")


@contextmanager
def logging_to_stderr(log_format: LogFormat = "text") -> Generator[io.StringIO]:
    """What a process that logs has as its standard error."""
    root = logging.getLogger()
    before = root.handlers[:]
    with redirect_stderr(io.StringIO()) as stream:
        configure_logging(log_format=log_format)
        try:
            yield stream
        finally:
            root.handlers[:] = before


@pytest.mark.parametrize("log_format", ["text", "json"])
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
def test_no_secret_and_no_prompt_reaches_the_log(text: str, log_format: LogFormat) -> None:
    with logging_to_stderr(log_format) as stream:
        log.warning("%s", text)
        try:
            raise ValueError(text)
        except ValueError:
            log.exception("refused")
        said = stream.getvalue()
    assert REDACTED in said
    assert "canary" not in said
    assert KEY not in said


def test_a_json_line_is_one_object_with_its_ids_and_its_traceback() -> None:
    with logging_to_stderr("json") as stream, log_ids(request_id="req_1", account_id="acct_1", job_id=""):
        with log_ids(job_id="gen_1", attempt=2):
            try:
                raise ValueError('a "quoted"\nline')
            except ValueError:
                log.exception("broke")
        log.info("and on")
        first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    ids = {"request_id": "req_1", "account_id": "acct_1", "job_id": "gen_1", "attempt": "2"}
    assert first | ids == first
    assert (first["level"], first["message"], first["logger"]) == ("ERROR", "broke", "serve_app.test")
    assert "Traceback" in first["exception"]
    assert "job_id" not in second, "an id ends with what it is about"


def test_a_text_line_ends_with_its_ids() -> None:
    with logging_to_stderr() as stream, log_ids(request_id="req_1"):
        log.info("answered")
        assert stream.getvalue().endswith("answered request_id=req_1\n")


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
