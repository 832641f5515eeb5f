"""An update, or a card, that changes what a base model draws is told; other weights and options are another thing."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_app.domain.canary import FOLDER, Drawing, latest_differences
from serve_app.engine import Checkpoint, Engine, EngineOptions, findings, lora_layers
from serve_app.engine.lora_layers import onednn_linear
from tests.engine.conftest import EXACT_FLOAT32

OPTIONS = replace(EXACT_FLOAT32, max_rows=2, exact=False)


def changed(source: Path | Checkpoint, shelf: Path, options: EngineOptions = OPTIONS) -> str:
    """Start an engine as a worker does; return how it draws otherwise than before."""
    with Engine.load({"sd": source}, options, findings=shelf) as engine:
        engine.try_out(64, 64)
        return engine.base_models["sd"].changed


def kept(shelf: Path) -> list[Drawing]:
    return Drawing.read({file.name: file.read_bytes() for file in (shelf / FOLDER).iterdir()})


def use_another_kernel(patch: pytest.MonkeyPatch) -> None:
    """Change a kernel by hand: it rounds the last bits of its products."""

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return onednn_linear(x, weight, bias) * (1 + 1e-6)

    patch.setattr(lora_layers, "onednn_linear", rounded)


def test_a_kernel_that_was_changed_by_hand_is_told(
    small_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not changed(small_sd, tmp_path)
        assert not changed(small_sd, tmp_path), "the same code draws the same"
        assert not caplog.messages
        (before,) = kept(tmp_path)
        use_another_kernel(monkeypatch)
        told = changed(small_sd, tmp_path)
    assert "sd on a CPU (" in told
    assert "does not draw what it drew before (prompt, denoising), and no version has changed since" in told
    assert any(told in message for message in caplog.messages)
    assert kept(tmp_path) == [before], "a card at fault does not become the measure"


def test_an_update_that_changes_pictures_is_told_with_its_versions_until_the_next(
    small_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = findings.importlib.metadata.version
    assert not changed(small_sd, tmp_path)
    (file,) = (tmp_path / FOLDER).iterdir()
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"at": "2026-01-01T00:00:00+00:00"}))

    def use_torch(version: str) -> None:
        monkeypatch.setattr(
            findings.importlib.metadata, "version", lambda name: version if name == "torch" else versions(name)
        )

    use_torch("9.1")
    assert not changed(small_sd, tmp_path), "another version that draws the same"
    use_torch("9.2")
    use_another_kernel(monkeypatch)
    for _ in range(2):
        assert "(prompt, denoising) with torch 9.1 → 9.2" in changed(small_sd, tmp_path)
    assert len(kept(tmp_path)) == 3
    (told,) = latest_differences(sorted(kept(tmp_path), key=lambda each: each.versions["torch"]))
    assert "→ 9.2" in told


def test_other_weights_and_options_are_no_update(small_sd: Path, tmp_path: Path, sd: Path) -> None:
    assert not changed(small_sd, tmp_path)
    assert not changed(Checkpoint(small_sd, clip_skip=1), tmp_path)
    assert not changed(Checkpoint(small_sd, vae=sd / "vae"), tmp_path)
    assert not changed(small_sd, tmp_path, replace(OPTIONS, dtype="bfloat16"))
    assert len(kept(tmp_path)) == 4


@pytest.mark.parametrize("content", ["", "[]", '{"model": "sd"}'])
def test_a_drawing_that_cannot_be_read_is_drawn_again(small_sd: Path, tmp_path: Path, content: str) -> None:
    assert not changed(small_sd, tmp_path)
    (file,) = (tmp_path / FOLDER).iterdir()
    good = json.loads(file.read_text())
    file.write_text(content)
    assert not changed(small_sd, tmp_path)
    assert json.loads(file.read_text())["drew"] == good["drew"]
    (tmp_path / "file").write_text("")
    assert not changed(small_sd, tmp_path / "file"), "where nothing can be kept, nothing is told"
