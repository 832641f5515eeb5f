"""A replica's lines reach their log whole, whatever Serve puts in the place of standard error."""

import io
import json
import logging
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.logging_utils import StreamToLogger

from deployments.ray_internals import configure_replica_log
from serve_app.settings import Settings


def test_a_line_of_text_reaches_the_log_of_serve_without_a_look_at_the_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> int:
        raise AssertionError("the stack was looked at")

    monkeypatch.setattr(StreamToLogger, "get_stacklevel", look)
    of_serve, root = logging.getLogger("ray.serve"), logging.getLogger()
    before = root.handlers[:]
    monkeypatch.setattr(of_serve, "handlers", [caplog.handler])
    monkeypatch.setattr(of_serve, "propagate", False)
    stream: Any = StreamToLogger(of_serve, logging.INFO, sys.stderr)
    with caplog.at_level(logging.INFO, of_serve.name), redirect_stderr(stream):
        configure_replica_log(Settings(data_dir=tmp_path))
        try:
            logging.getLogger("serve_app.test").info("100 % of a line")
        finally:
            root.handlers[:] = before
    assert [record.getMessage().endswith("100 % of a line") for record in caplog.records] == [True]


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
