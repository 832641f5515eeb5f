"""Tiny models, written once a session, and engines over them."""

import importlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from serve_app.engine import AdapterFile, Engine, EngineOptions, base_model
from serve_app.engine.families import dit, unet
from tests.engine import tiny_models
from tests.engine.latent_comparison import Base
from tests.engine.tiny_transformers import ANIMA, FLUX1, FLUX2_KLEIN, KREA_2, QWEN_IMAGE21, Z_IMAGE, TinyTransformer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
EXACT_FLOAT32 = EngineOptions(device="cpu", dtype="float32")
WIDE_FLOAT32 = EngineOptions(device="cpu", dtype="float32", max_rows=32)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Compute in one lane, whatever cores the machine has, but for the tests that take `two_lanes`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_lanes() -> Iterator[None]:
    """Let models that are loaded from now on have two lanes."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


class Kernels(NamedTuple):
    """The modules of kernels, whose functions Triton interprets."""

    lora: Any
    unet: Any
    float8: Any
    transformer: Any

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let models that are loaded from now on compute by kernels, as on a GPU."""
        patch.setattr(base_model, "lora_kernel", lambda _: self.lora.add_lora)
        patch.setattr(unet, "unet_kernels", lambda _: self.unet)
        patch.setattr(dit, "transformer_kernels", lambda _: self.transformer)


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    triton = pytest.importorskip("triton", reason="Triton is made for Linux alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        modules = (importlib.import_module(f"serve_app.engine.{name}_kernels") for name in Kernels._fields)
        # Triton's own functions are for a GPU, unless it was imported with the variable set.
        for name in ("sum", "max"):
            patch.setattr(triton.language, name, triton.jit(getattr(triton.language, name).fn))
        yield Kernels(*modules)


@pytest.fixture(scope="session")
def sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.x."""
    return tiny_models.write_sd(tmp_path_factory.mktemp("models") / "sd")


@pytest.fixture(scope="session")
def small_sd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same with a UNet of one level: half the layers, every kind but the downsampler."""
    return tiny_models.write_sd(tmp_path_factory.mktemp("models") / "small", levels=1)


@pytest.fixture(scope="session")
def sd2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 2.x: v prediction, linear projections, a wider context."""
    return tiny_models.write_sd(tmp_path_factory.mktemp("models") / "sd2", prediction="v_prediction", context=64)


@pytest.fixture(scope="session")
def lcm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stable Diffusion 1.x, distilled."""
    return tiny_models.write_sd(tmp_path_factory.mktemp("models") / "lcm", levels=1, distilled=True)


@pytest.fixture(scope="session")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_sdxl(tmp_path_factory.mktemp("models") / "sdxl")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyTransformer, str], Path]:
    """Return what gives the folder of a family's variant, which is written once."""

    def write(tiny: TinyTransformer, variant: str) -> Path:
        return tiny.write(tmp_path_factory.mktemp("models") / f"{tiny}-{variant}", **tiny.variants[variant])

    return cache(write)


@pytest.fixture(scope="session")
def z_image(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(Z_IMAGE, "turbo")


@pytest.fixture(scope="session")
def klein(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(FLUX2_KLEIN, "base")


@pytest.fixture(scope="session")
def flux1(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(FLUX1, "dev")


@pytest.fixture(scope="session")
def krea2(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(KREA_2, "base")


@pytest.fixture(scope="session")
def anima(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(ANIMA, "base")


@pytest.fixture(scope="session")
def qwen_image21(written: Callable[[TinyTransformer, str], Path]) -> Path:
    return written(QWEN_IMAGE21, "base")


@pytest.fixture(scope="session")
def loras(sd: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFile]:
    """Return adapters of the tiny Stable Diffusion 1.x."""
    into = tmp_path_factory.mktemp("loras")
    return [tiny_models.write_lora(into / f"{i}.safetensors", sd, rank=4, seed=i) for i in range(5)]


@pytest.fixture(scope="session")
def bases(request: pytest.FixtureRequest) -> Callable[[str], Base]:
    """Return what opens a tiny Stable Diffusion, by its fixture, in the engine and in diffusers, each once."""
    return cache(lambda name: Base(name, request.getfixturevalue(name)))


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where engines keep what they measured of exactness, which takes the first of them 1 s."""
    return tmp_path_factory.mktemp("findings")


@pytest.fixture
def engine(sd: Path, findings: Path) -> Iterator[Engine]:
    with Engine.load(sd, EXACT_FLOAT32, findings=findings) as engine:
        yield engine
