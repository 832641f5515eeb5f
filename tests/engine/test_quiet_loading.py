"""Loading hides two misleading warnings, and leaves the libraries' output as it was."""

import importlib
import logging

import pytest

from serve_app.engine.families.checkpoint import quiet_loading


def test_other_warnings_pass_and_everything_is_restored(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("diffusers.pipelines.pipeline_utils")
    logging.getLogger("diffusers").addHandler(caplog.handler)
    try:
        with quiet_loading():
            logger.warning("Expected types for vae: AutoencoderKL, got AutoencoderTiny.")
            logger.warning("Something else is wrong.")
        logger.warning("Expected types for vae: after the block.")
    finally:
        logging.getLogger("diffusers").removeHandler(caplog.handler)
    assert caplog.messages == ["Something else is wrong.", "Expected types for vae: after the block."]


def test_the_package_has_its_public_names_only() -> None:
    engine = importlib.import_module("serve_app.engine")
    assert all(hasattr(engine, name) for name in engine.__all__)
    with pytest.raises(AttributeError, match="'Scheduler'"):
        _ = engine.Scheduler
