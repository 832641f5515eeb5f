"""A replica's JSON lines stay whole, whatever Serve puts in the place of standard error."""

import io
import json
import logging
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from deployments.replica_log import configure_replica_log
from serve_app.settings import Settings


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_json_lines_go_past_the_stream_of_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    monkeypatch.setenv("ATELIER_LOG_FORMAT", log_format)
    root = logging.getLogger()
    before = root.handlers[:]
    with redirect_stderr(io.StringIO()) as of_serve:
        configure_replica_log(Settings(data_dir=tmp_path))
        try:
            logging.getLogger("serve_app.test").info("a line")
        finally:
            root.handlers[:] = before
    if log_format == "json":
        assert json.loads(capfd.readouterr().err)["message"] == "a line"
        assert not of_serve.getvalue()
    else:
        assert "a line" in of_serve.getvalue()
