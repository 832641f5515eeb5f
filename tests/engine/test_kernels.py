"""Which kernels run is told, and Triton launches them without a compiler where its module was built beforehand."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from serve_app.engine import EngineOptions, kernels
from tests.support import ROOT

triton_module: Any = pytest.importorskip("serve_app.engine.triton_module", reason="Triton is made for Linux alone")
NO_COMPILER = triton_module.NO_COMPILER
LAUNCH = """
from serve_app.engine import triton_module
from triton.backends.nvidia.driver import CudaUtils
triton_module.find_module()
print(callable(CudaUtils().launch))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="as in the build stage of the image, a module is compiled")
def test_a_module_that_was_built_is_loaded_without_a_compiler(tmp_path: Path) -> None:
    """The image's recipe in an environment of its own: no compiler, a home that is not there, a cache elsewhere."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "venv"], check=True
    )
    python = str(tmp_path / "venv" / "bin" / "python")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]),
        "PATH": str(tmp_path), "HOME": "/nonexistent", "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    recipe = [
        python,
        str(ROOT / "configs" / "image" / "build_triton_module.py"),
        str(ROOT / "serve_app/engine/triton_module.py"),
    ]
    built = subprocess.run(
        recipe, env=environment | {"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    module = Path(built.stdout.strip())
    assert module.is_relative_to(tmp_path / "venv")
    _write_driver(module, tmp_path)

    def launched() -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-c", LAUNCH], env=environment, capture_output=True, text=True, check=False)

    assert launched().stdout == "True\n"
    shutil.rmtree(tmp_path / "cache")
    assert triton_module.built_module(b"of another Triton").name != module.name
    module.unlink()
    assert NO_COMPILER in launched().stderr


def _write_driver(module: Path, folder: Path) -> None:
    """Write a driver library whose every function fails, as without a card."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines() if " cu" in line]
    (folder / "cuda.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["gcc", *options, str(folder / "cuda.c")], check=True)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EngineOptions:
    """Let torch tell of a card since Ampere; the process then tries its kernels for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "_outcomes", {})
    return EngineOptions(device="cuda", dtype="bfloat16")


def test_a_start_tells_in_one_line_which_kernels_run_and_what_a_fallback_costs(
    card: EngineOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    assert kernels.lora_kernel(card) is None
    assert kernels.unet_kernels(card) is None
    assert kernels.kernel_outcomes() == {"lora": NO_COMPILER, "unet": NO_COMPILER}
    with caplog.at_level(logging.INFO):
        kernels.log_kernels()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"kernels that run: none; lora does not ({NO_COMPILER}): {kernels.FALLBACKS['lora']}; "
        f"unet does not ({NO_COMPILER}): {kernels.FALLBACKS['unet']}"
    )


def test_an_old_card_and_a_cpu_fall_back_each_in_its_own_words(
    card: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.unet_kernels(EngineOptions(device="cpu")) is None
    assert kernels.kernel_outcomes() == {}, "a CPU is not what the kernels are for"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert kernels.unet_kernels(card) is None
    assert kernels.kernel_outcomes() == {"unet": "it is for NVIDIA cards since Ampere"}
