"""Which configuration `atelier up` takes by itself, with and without GPUs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.config import read_config
from deployments.start_checks import CPU_CONFIG, GPU_CONFIG, chosen_config
from tests.support import ROOT, existing

CHOOSE = "from deployments.start_checks import config_for_this_machine as choose; print(*choose(), sep='\\n')"
CUDA, CPU = "2.13.0", "2.13.0+cpu"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="a driver's library is compiled")


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder with a management library of NVIDIA's that knows two cards."""
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return tmp_path


def choose(**environment: str) -> tuple[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [sys.executable, "-c", CHOOSE]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=True)
    path, said = done.stdout.split("\n")[:2]
    return Path(path).name, said


@pytest.mark.slow
@needs_compiler
def test_the_cards_of_the_machine_are_found(driver: Path) -> None:
    """The tests' torch has no CUDA, which is said, and not started on a card in vain."""
    path, said = choose(LD_LIBRARY_PATH=str(driver))
    assert path == "local.yaml"
    assert said.startswith("Found 2 GPUs, but torch ")
    assert choose(LD_LIBRARY_PATH=str(driver), CUDA_VISIBLE_DEVICES="1")[1].startswith("Found 1 GPU, but torch ")
    assert choose(LD_LIBRARY_PATH=str(driver), CUDA_VISIBLE_DEVICES="") == ("local.yaml", "")


def test_a_machine_with_a_gpu_shares_it_and_says_so() -> None:
    said = "Found 1 GPU: the generator and the upscaler share it (configs/one_gpu.yaml)"
    assert chosen_config(1, CUDA) == (GPU_CONFIG, said)
    assert chosen_config(4, CUDA)[0] == GPU_CONFIG
    assert "4 GPUs" in chosen_config(4, CUDA)[1]
    args = read_config(GPU_CONFIG).args
    assert (existing(args.generator).num_gpus, args.upscaler.num_gpus) == (0.7, 0.3)


def test_without_a_gpu_nothing_changes() -> None:
    for torch in (CUDA, CPU):
        assert chosen_config(0, torch) == (CPU_CONFIG, "")
    assert existing(read_config(CPU_CONFIG).args.generator).num_gpus == 0
