"""A registered LoRA is checked in another process, stored by digest, served everywhere, and removed."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from serve_app.domain.audit import Actor
from serve_app.domain.catalog import Adapter, Offer
from serve_app.domain.errors import FailureCode, Forbidden, InvalidParameter
from serve_app.domain.jobs import JobKind
from serve_app.domain.requests import GenerationDraft, LoraUse, Variant
from serve_app.loras import registration
from serve_app.loras.registration import remove_lora
from tests.composition import Resources
from tests.made_jobs import caller_of, failure_of
from tests.support import POCKET

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_layer_tables")]
"""Each registration starts a process that imports torch: 2.6 s of processor time."""
OUTLINE = POCKET / "loras" / "outline.safetensors"


async def _register(
    resources: Resources, path: Path = OUTLINE, *, base_model: str = "pocket", **fields: Any
) -> Adapter:
    return (await resources.registration.register(path, Offer(name="Mine", base_model=base_model), **fields)).adapter


async def test_what_was_registered_is_served_by_every_process_and_gone_when_removed(
    resources: Resources, other: Resources
) -> None:
    caller = await caller_of(resources)
    mine = await _register(resources, owner=caller.account_id)
    assert mine.found["summary"] == "pocket, rank 8, attention and convolution, from diffusers"
    assert (mine.found["rank"], mine.found["layers"], mine.found["components"]) == (8, 78, ["unet"])
    assert await other.catalog.adapter(mine.id) == mine
    assert (await other.weights.fetch(mine)).read_bytes() == OUTLINE.read_bytes()
    request = GenerationDraft(prompt="a boat", loras=(LoraUse(mine.id),), seed=7, interface=Variant.A)
    waiting = await other.submission.submit(caller, request)
    assert await remove_lora(resources.adapter_registry, resources.lora_weights, mine.id) == "removed"
    with pytest.raises(Forbidden):
        await other.submission.submit(caller, request)
    assert await other.queue.claim("w", pool=JobKind.GENERATION, nonce="n") == []
    assert (await failure_of(other, waiting.job.id)).code is FailureCode.LORA_UNAVAILABLE


async def test_the_same_weights_are_stored_once_and_an_account_that_is_deleted_takes_its_loras_along(
    resources: Resources,
) -> None:
    acme = await resources.accounts.create("acme")
    of_acme, of_operator = await _register(resources, owner=acme.id), await _register(resources, accounts=None)
    assert of_acme.id != of_operator.id
    assert (of_acme.sha256, of_acme.file) == (of_operator.sha256, of_operator.file)
    assert _stored(resources) == [f"{of_acme.sha256}.safetensors"]
    assert (await resources.account_deletion.delete(acme, Actor("operator:root"))).left == []
    assert await resources.catalog.adapter(of_acme.id) is None
    assert _stored(resources) == [f"{of_acme.sha256}.safetensors"], "the other has the same"
    await remove_lora(resources.adapter_registry, resources.lora_weights, of_operator.id)
    assert _stored(resources) == []


def _stored(resources: Resources) -> list[str]:
    folder = resources.settings.data_dir / "images" / "loras"
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def test_a_folder_of_peft_is_registered_whole(resources: Resources, other: Resources, tmp_path: Path) -> None:
    folder = _peft_folder(tmp_path / "peft")
    mine = await _register(resources, folder)
    assert mine.found["writer"] == "PEFT"
    kept = await other.weights.fetch(mine)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (kept / name).read_bytes() == (folder / name).read_bytes()


def _peft_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    tensors = load_file(OUTLINE)
    renamed = {f"base_model.model.{name.removeprefix('unet.')}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **config}))
    return folder


def _huge(path: Path) -> Path:
    """Write a valid file of half a gigabyte that is sparse on disk.

    Its pairs have a rank that no model has, and its numbers are not finite.
    """
    header, end = {}, 0
    for layer in [
        name.removesuffix(".lora_A.weight") for name in load_file(OUTLINE) if name.endswith("to_q.lora_A.weight")
    ]:
        width, rank = load_file(OUTLINE)[f"{layer}.lora_A.weight"].shape[1], 1 << 18
        for part, shape in (("A", [rank, width]), ("B", [width, rank])):
            size = 8 * rank * width
            if end + size < 1 << 29:
                offsets = [end, end + size]
                header[f"{layer}.lora_{part}.weight"] = {"dtype": "F64", "shape": shape, "data_offsets": offsets}
                end += size
    text = json.dumps(header)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode() + struct.pack("<d", float("nan")))
        file.truncate(8 + len(text) + end)
    return path


async def test_a_file_that_does_not_fit_is_refused_with_the_reason(resources: Resources, tmp_path: Path) -> None:
    before = await resources.catalog.all()
    with pytest.raises(InvalidParameter, match=r"dimension 262144.*takes 6"):
        await _register(
            resources.with_parts(registration=replace(resources.registration, max_rank=6)),
            _huge(tmp_path / "bad.safetensors"),
        )
    assert await resources.catalog.all() == before
    assert not (resources.settings.data_dir / "images" / "loras").exists()


async def test_a_file_that_takes_the_processor_without_end_gives_its_place_back(
    resources: Resources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its expression takes no time on short names, and longer than anybody waits on the first of 40 characters."""
    monkeypatch.setattr(registration, "PROCESSOR_LIMIT_S", 1)
    folder = _peft_folder(tmp_path / "peft", alpha_pattern={r"(?=.{40})(\w+\.?)+!": 4})
    with pytest.raises(InvalidParameter, match="more than 1 s of a processor"):
        await _register(resources, folder)


async def test_a_base_model_that_does_not_exist_and_a_missing_file_are_named(
    resources: Resources, tmp_path: Path
) -> None:
    with pytest.raises(InvalidParameter, match="base_model: there is no base model 'sdxl'"):
        await _register(resources, base_model="sdxl")
    with pytest.raises(InvalidParameter, match="cannot be read"):
        await _register(resources, tmp_path / "missing.safetensors")
