"""A replica's lines reach their log whole, whatever Serve puts in the place of standard error."""

import io
import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.logging_utils import StreamToLogger

from deployments.ray_internals import configure_replica_log
from serve_app.settings import Settings


@contextmanager
def replica_log(folder: Path, stderr: Any) -> Generator[logging.Logger]:
    """Log as a replica does whose standard error Serve has replaced by `stderr`."""
    root = logging.getLogger()
    before = root.handlers[:]
    with redirect_stderr(stderr):
        configure_replica_log(Settings(data_dir=folder))
        try:
            yield logging.getLogger("serve_app.test")
        finally:
            root.handlers[:] = before


def test_a_line_of_text_reaches_the_log_of_serve_without_a_look_at_the_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> int:
        raise AssertionError("the stack was looked at")

    monkeypatch.setattr(StreamToLogger, "get_stacklevel", look)
    of_serve = logging.getLogger("ray.serve")
    monkeypatch.setattr(of_serve, "handlers", [caplog.handler])
    monkeypatch.setattr(of_serve, "propagate", False)
    stream = StreamToLogger(of_serve, logging.INFO, sys.stderr)
    with caplog.at_level(logging.INFO, of_serve.name), replica_log(tmp_path, stream) as log:
        log.info("100 % of a line")
    assert [record.getMessage().endswith("100 % of a line") for record in caplog.records] == [True]


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_json_lines_go_past_the_stream_of_serve(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    monkeypatch.setenv("ATELIER_LOG_FORMAT", log_format)
    of_serve = io.StringIO()
    with replica_log(tmp_path, of_serve) as log:
        log.info("a line")
    if log_format == "json":
        assert json.loads(capfd.readouterr().err)["message"] == "a line"
        assert not of_serve.getvalue()
    else:
        assert "a line" in of_serve.getvalue()
