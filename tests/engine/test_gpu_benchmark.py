"""`python -m benchmarks.gpu` needs the libraries of the engine alone, reports failures, and goes on where it stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ABSENT = ("ray", "redis", "fastapi", "starlette", "pydantic", "pydantic_settings", "scipy", "torchsde", "matplotlib")
SCRIPT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one raises ModuleNotFoundError
from benchmarks.gpu import main
for more in (["--only", "machine"], ["--tiny", "--only", "machine", "slots-sd15"], ["--minutes", "0"]):
    sys.argv[1:] = ["--out", OUT, *more]
    main()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the first call fails only where there is no GPU")
@pytest.mark.soak
def test_pieces_run_without_the_services_libraries_and_are_kept(tmp_path: Path) -> None:
    script = SCRIPT.replace("OUT", repr(str(tmp_path)))
    called = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert called.returncode == 0, called.stderr
    failed, done, left = (line for line in called.stdout.splitlines() if "; left: " in line)
    assert "machine" in failed, "without a GPU it fails, which is reported"
    assert "machine" not in done
    assert "slots-sd15" not in left
    assert "slots-sdxl" in left
    report = (tmp_path / "gpu.md").read_text()
    assert "| G7: resident adapters, SD 1.5 rank 32 | 500, 1000 | " in report
    assert "not measured" in report
    pieces = json.loads((tmp_path / "gpu.json").read_text())
    assert pieces["machine"]["found"]["torch"] == torch.__version__
    assert pieces["slots-sd15"]["found"]["kept"] == pieces["slots-sd15"]["found"]["placed"] == 4
