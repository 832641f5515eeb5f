import io
import logging

import pytest

from serve_app.log import REDACTED, configure_logging

KEY = "atl_0123456789abcdefghijABCDEFGHIJxy000000"


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
    stream = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:]
    configure_logging()
    handler = root.handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    try:
        logging.getLogger("serve_app.test").warning("%s", text)
        try:
            raise ValueError(text)
        except ValueError:
            logging.getLogger("serve_app.test").exception("refused")
    finally:
        root.handlers[:] = before
    assert REDACTED in stream.getvalue()
    assert "canary" not in stream.getvalue()
    assert KEY not in stream.getvalue()
