"""What base models weigh is told by the headers of their files, and refused before a byte of them is read."""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.engine import Checkpoint, Engine, EngineOptions
from serve_app.engine.device import free_host_memory, free_memory
from serve_app.engine.families import weights
from serve_app.engine.families.checkpoint import Source
from serve_app.engine.families.weights import GB, part_bytes, watched
from tests.engine import simulated_device, tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.hollow_models import write_hollow, write_hollow_file
from tests.engine.original_checkpoint import copy_config, write_original
from tests.engine.run_engine import load
from tests.engine.tiny_transformers import TINY_TRANSFORMERS
from tests.support import wait_until


def folder_of(model: Path, _: Path) -> Source:
    return model


def single_file(model: Path, into: Path) -> Source:
    """Return a file with the averages of training beside its weights, which nobody reads."""
    file = write_original(model, into / "model.safetensors")
    tensors = load_file(file)
    averages = {f"model_ema.{i}": torch.zeros_like(tensor) for i, tensor in enumerate(tensors.values())}
    save_file(tensors | averages, file)
    return Checkpoint(file, copy_config(model, into / "config"))


def with_another_vae(model: Path, into: Path) -> Source:
    file = single_file(model, into)
    assert isinstance(file, Checkpoint)
    tiny_models.tiny_vae().save_pretrained(into / "vae")
    return file._replace(vae=into / "vae")


def with_variants(model: Path, into: Path) -> Path:
    """Return a folder that holds each part twice, as published ones do."""
    folder = shutil.copytree(model, into / "twice")
    for file in folder.glob("*/*.safetensors"):
        halves = {
            name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in load_file(file).items()
        }
        save_file(halves, file.with_name(f"{file.stem}.fp16.safetensors"), metadata={"format": "pt"})
    return folder


def variants_alone(model: Path, into: Path) -> Source:
    folder = with_variants(model, into)
    for file in {*folder.glob("*/*.safetensors")} - {*folder.glob("*/*.fp16.safetensors")}:
        file.unlink()
    return folder


def transformer_file(model: Path, into: Path) -> Source:
    """Return a file of the transformer alone, whose other parts are named."""
    (tiny,) = (each for each in TINY_TRANSFORMERS if model.name.startswith(each.name))
    file = into / "model.safetensors"
    save_file(tiny.original_weights(model), file)
    return Checkpoint(file, model, vae=model / "vae", text_encoder=model / "text_encoder", tokenizer=model)


FORMS = [(folder_of, "float16"), (single_file, "float32"), (with_another_vae, "float16"), (with_variants, "bfloat16")]
DIT_FORMS = [(folder_of, "float32"), (transformer_file, "bfloat16"), (with_variants, "bfloat16"),
             (variants_alone, "bfloat16")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "dtype"),
    [(family, *form) for family in ("sd", "sdxl") for form in FORMS]
    + [
        (family, *form)
        for family in ("z_image", "klein", "flux1", "krea2", "anima", "qwen_image21")
        for form in DIT_FORMS
    ],
)
def test_headers_tell_what_a_loaded_model_weighs(
    form: Callable[[Path, Path], Source], family: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = form(request.getfixturevalue(family), tmp_path)
    computed = part_bytes(source, getattr(torch, dtype))
    model = load(source, replace(EXACT_FLOAT32, dtype=dtype))
    assert sum(computed.values()) == pytest.approx(model.weight_bytes, rel=0.05)
    model.close()


def read_bytes() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def test_what_cannot_fit_is_refused_with_its_sums_before_it_is_read(tmp_path: Path) -> None:
    """The files say that they hold twice the machine's memory."""
    folder = write_hollow(tmp_path / "sdxl", "sdxl")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (folder / "unet" / "model.safetensors").unlink()
    write_hollow_file(
        folder / "unet" / "model.safetensors", {"w": torch.empty(memory, dtype=torch.float16, device="meta")}
    )
    began, before = time.monotonic(), read_bytes()
    with pytest.raises(MemoryError) as refused:
        Engine.load({"big": folder}, replace(EXACT_FLOAT32, adapter_memory=10**9))
    assert time.monotonic() - began < 5
    assert read_bytes() - before < 10**7
    total = (memory * 4 + 4 * (123_060_480 + 694_659_840 + 83_653_863)) / GB
    said = str(refused.value)
    assert re.search(rf"as float32, big takes {total:.1f}\d GB \(.*unet {memory * 4 / GB:.2f}", said), said
    assert "adapters take 1.00 GB (adapter_memory)" in said
    assert re.search(rf": {total + 1:.1f}\d GB in all, and cpu has [\d.]+ GB free; what helps: ", said), said
    assert "`dtype: bfloat16`, half as much; a smaller `adapter_memory`" in said


def test_a_card_is_asked_how_much_it_has_free(tmp_path: Path) -> None:
    folder = write_hollow(tmp_path / "sdxl", "sdxl")
    simulated_device.register()
    with simulated_device.memory(free=5 * GB, total=8 * GB), pytest.raises(MemoryError) as refused:
        Engine.load({"sdxl": folder}, EngineOptions(device="sim", dtype="bfloat16"))
    said = (
        "in host memory 1.64 GB less: 5.30 GB in all, and sim has 5.00 GB free; what helps: a larger `memory_fraction`"
    )
    assert said in str(refused.value)


def test_a_containers_limit_counts_without_the_files_that_it_has_read(tmp_path: Path) -> None:
    machine = free_memory(torch.device("cpu"))
    assert 0 < machine <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert free_host_memory(cgroup=tmp_path) == pytest.approx(machine, rel=0.1), "no limit"
    for name, content in {
        "memory.max": "4000000000",
        "memory.current": "3000000000",
        "memory.stat": "anon 500000000\ninactive_file 1500000000\nactive_file 1000000000",
    }.items():
        (tmp_path / name).write_text(content)
    assert free_host_memory(cgroup=tmp_path) == min(3_500_000_000, free_host_memory(cgroup=tmp_path / "none"))
    (tmp_path / "memory.max").write_text("max")
    assert free_host_memory(cgroup=tmp_path) == pytest.approx(machine, rel=0.1)


async def test_loading_is_told_by_the_bytes_that_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WATCH_S", 0.01)
    half = torch.empty(25 * 10**7, dtype=torch.float16, device="meta")
    file = write_hollow_file(tmp_path / "m.safetensors", {"a": half, "b": half})
    (tmp_path / "link.safetensors").symlink_to(file)
    said: list[str] = []

    async def is_said(words: str) -> None:
        await wait_until(lambda: said[-1:] == [words])

    with watched("m", tmp_path / "link.safetensors", said.append):
        await is_said("loading m: 0.0 of 1.0 GB")
        loaded = load_file(tmp_path / "link.safetensors")
        loaded["a"].view(torch.int16).max()
        await is_said("loading m: 0.5 of 1.0 GB")
        loaded.clear()  # as after another number type was made of it
        await is_said("loading m: 1.0 of 1.0 GB")
    count = len(said)
    assert not [thread for thread in threading.enumerate() if thread.name == "watch-loading"]
    assert len(said) == count
