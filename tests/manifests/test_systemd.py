"""The systemd unit is one that systemd takes, and stops the service in order."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

UNIT = ROOT / "configs" / "systemd" / "atelier.service"
COMMAND = "/opt/atelier/.venv/bin/atelier"


def _complaints(folder: Path, text: str) -> str:
    (folder / UNIT.name).write_text(text.replace(COMMAND, str(ROOT / ".venv" / "bin" / "atelier")))
    command = ["systemd-analyze", "verify", str(folder / UNIT.name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here: its unit is not verified")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    assert COMMAND in text
    assert _complaints(tmp_path, text) == ""
    assert "KillMoode" in _complaints(tmp_path, text.replace("KillMode", "KillMoode"))
