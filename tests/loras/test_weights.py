"""Adapter weights are fetched once, and refused when they are not the catalog's or not a valid file."""

import asyncio
import hashlib
import json
import os
import struct
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable
from serve_app.jobs.images import ImageStore
from serve_app.loras.catalog_file import add_digests
from serve_app.loras.stored_weights import LoraFiles
from serve_app.loras.weights import WeightStore
from serve_app.safetensors_file import UnusableFile, check_safetensors
from serve_app.settings import Settings
from serve_app.store.storage import THREADS
from tests.support import lora_record, wait_until, write_safetensors


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Settings(data_dir=tmp_path / "var", redis_url="unix:///unused"))


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    return lora_record(write_safetensors(tmp_path / "one.safetensors"))


async def test_weights_are_kept_by_digest_and_fetched_once(store: WeightStore, adapter: Adapter) -> None:
    kept = await store.fetch(adapter)
    assert kept.name == f"{adapter.sha256}.safetensors"
    assert kept.is_absolute()
    _source(adapter).unlink()
    assert await store.fetch(adapter) == kept


async def test_weights_of_any_storage_are_fetched(store: WeightStore, adapter: Adapter) -> None:
    content = _source(adapter).read_bytes()
    fsspec.filesystem("memory").pipe_file("/weights/one.safetensors", content)
    kept = await store.fetch(replace(adapter, file="memory://weights/one.safetensors"))
    assert kept.read_bytes() == content


async def test_a_storage_of_weights_that_hangs_stops_neither_images_nor_weights_that_are_here(
    tmp_path: Path, adapter: Adapter
) -> None:
    settings = Settings(data_dir=tmp_path / "var", redis_url="unix:///unused")
    fsspec.register_implementation("hanging", cast(Any, HangingFiles), clobber=True)
    store = WeightStore(settings)
    other = write_safetensors(tmp_path / "other.safetensors", fill=2)
    here = lora_record(other)
    kept, hanging = await store.fetch(here), replace(adapter, file=f"hanging://{adapter.file}")
    fetches = [asyncio.create_task(store.fetch(hanging)) for _ in range(THREADS)]
    try:
        await wait_until(lambda: HangingFiles.readers == THREADS)
        async with asyncio.timeout(20):
            await ImageStore(settings).put("images/one.png", b"png")
            assert await store.fetch(here) == kept
    finally:
        HangingFiles.may_go_on.set()
    assert all([(await fetch).exists() for fetch in fetches])


class HangingFiles(LocalFileSystem):
    """Local files that nobody can open before `may_go_on`."""

    protocol = "hanging"
    readers = 0
    may_go_on = threading.Event()

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        HangingFiles.readers += 1  # one thread of Python at a time
        HangingFiles.may_go_on.wait()
        return super().open(path, mode, *args, **kwargs)


async def test_weights_in_a_storage_that_has_moved_are_fetched_from_where_it_is(
    tmp_path: Path, adapter: Adapter
) -> None:
    settings = Settings(data_dir=tmp_path / "var", redis_url="unix:///unused", storage_url=f"file://{tmp_path}/now")
    await LoraFiles(settings).put(adapter.sha256, {"": _source(adapter)})
    before = replace(adapter, file=f"s3://before/loras/{adapter.sha256}.safetensors")
    kept = await WeightStore(settings).fetch(before)
    assert kept.read_bytes() == _source(adapter).read_bytes()


async def test_other_bytes_than_the_catalogs_are_refused(store: WeightStore, adapter: Adapter, tmp_path: Path) -> None:
    other = write_safetensors(tmp_path / "two.safetensors", fill=3)
    with pytest.raises(AdapterUnavailable, match="sha256 differs"):
        await store.fetch(replace(adapter, file=str(other)))
    assert list((tmp_path / "var" / "weights").iterdir()) == []


async def test_a_header_that_takes_memory_to_parse_takes_none_of_this_process(
    store: WeightStore, adapter: Adapter
) -> None:
    header = b'{"a":[' + b"{}," * 2_600_000 + b"{}]}"
    content = struct.pack("<Q", len(header)) + header
    _source(adapter).write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(AdapterUnavailable, match="adapter file: the file has a malformed tensor entry"):
            await store.fetch(replace(adapter, sha256=hashlib.sha256(content).hexdigest()))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file", ["/nowhere.safetensors", "/"])
async def test_missing_weights_are_named_by_adapter(store: WeightStore, adapter: Adapter, file: str) -> None:
    with pytest.raises(AdapterUnavailable, match="model_mine"):
        await store.fetch(replace(adapter, file=file))


async def test_stored_weights_that_were_changed_are_replaced(
    store: WeightStore, adapter: Adapter, tmp_path: Path
) -> None:
    """They change before the process uses them, and between two uses.

    One file keeps its size and times.
    """
    content = _source(adapter).read_bytes()
    other = write_safetensors(tmp_path / "other.safetensors", fill=9).read_bytes()
    assert len(other) == len(content)
    kept = await store.fetch(adapter)
    times = kept.stat()
    for user in (WeightStore(Settings(data_dir=tmp_path / "var", redis_url="unix:///unused")), store):
        kept.write_bytes(other)
        os.utime(kept, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert (await user.fetch(adapter)).read_bytes() == content


async def test_changed_weights_without_their_source_are_refused(store: WeightStore, adapter: Adapter) -> None:
    kept = await store.fetch(adapter)
    _source(adapter).unlink()
    kept.write_bytes(b"other")
    with pytest.raises(AdapterUnavailable, match="model_mine"):
        await store.fetch(adapter)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as PEFT saves one, with a file that does not count."""
    write_safetensors(tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "peft" / "README.md").write_text("A card.")
    return tmp_path / "peft"


def _of_folder(adapter: Adapter, folder: Path) -> Adapter:
    digested = add_digests([replace(adapter, file=str(folder), is_folder=True, sha256="")], {}, {})
    assert not digested.set_aside
    return digested.adapters[0]


async def test_a_folder_of_peft_is_kept_whole_by_the_digest_of_both_its_files(
    store: WeightStore, adapter: Adapter, folder: Path
) -> None:
    kept = await store.fetch(_of_folder(adapter, folder))
    assert sorted(path.name for path in kept.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    for path in kept.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
    before = _of_folder(adapter, folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    assert _of_folder(adapter, folder).sha256 != before.sha256
    assert await store.fetch(before) == kept, "it is fetched once"


async def test_a_kept_folder_that_lost_something_is_fetched_again(
    store: WeightStore, adapter: Adapter, folder: Path
) -> None:
    ours = _of_folder(adapter, folder)
    kept = await store.fetch(ours)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (kept / name).unlink()
        await store.fetch(ours)
        (kept / name).write_bytes(b"rotten")
        await store.fetch(ours)
        assert (kept / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_other_files_than_the_catalogs_are_refused_in_a_folder(
    store: WeightStore, adapter: Adapter, folder: Path, name: str
) -> None:
    ours = _of_folder(adapter, folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    with pytest.raises(AdapterUnavailable, match="sha256 differs"):
        await store.fetch(ours)
    (folder / name).unlink()
    with pytest.raises(AdapterUnavailable, match="not in storage"):
        await store.fetch(ours)


async def test_a_folder_with_an_endless_configuration_is_refused(
    store: WeightStore, adapter: Adapter, folder: Path
) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(AdapterUnavailable, match="larger than 1 MiB"):
        await store.fetch(_of_folder(adapter, folder))


def test_a_folder_without_its_configuration_is_set_aside(adapter: Adapter, folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    row = replace(adapter, file=str(folder), is_folder=True, sha256="")
    assert "cannot be read" in add_digests([row], {}, {}).set_aside[0].reason


def _source(adapter: Adapter) -> Path:
    return Path(adapter.file)


def _write(path: Path, header: object, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("F64", struct.pack("<d", float("nan"))), ("F8_E4M3", b"\x38\xff"), ("F8_E5M2", b"\x38\x7c")],
)
def test_numbers_that_are_not_finite_are_refused_in_types_that_few_files_have(
    dtype: str, values: bytes, tmp_path: Path
) -> None:
    """`tests/faults/lora_corpus.py` has everything else that makes a file unusable."""
    header = {"a": _entry([len(values) if dtype != "F64" else 1], 0, len(values), dtype)}
    with pytest.raises(UnusableFile, match="not finite"):
        check_safetensors(_write(tmp_path / "bad.safetensors", header, values))


@pytest.mark.parametrize("placeholder", ["<embedding>", "*", "an ink drawing", "墨"])
def test_an_embedding_that_onetrainer_bundles_is_called_so_whatever_its_placeholder(
    placeholder: str, tmp_path: Path
) -> None:
    header = {f"bundle_emb.{placeholder}.clip_l": _entry([2, 2], 0, 16)}
    with pytest.raises(UnusableFile, match="bundles an embedding"):
        check_safetensors(_write(tmp_path / "bad.safetensors", header, bytes(16)))


@pytest.mark.slow
def test_the_metadata_of_a_real_training_is_taken(tmp_path: Path) -> None:
    """sd-scripts counts every tag of the data set: 100,000 tags are 5 MB of header."""
    tags = json.dumps({"images": {f"a tag of the data set {n}": n for n in range(100_000)}})
    header = {"__metadata__": {"ss_tag_frequency": tags}, "a": _entry([2, 2], 0, 16)}
    assert check_safetensors(_write(tmp_path / "good.safetensors", header, bytes(16))).metadata


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_ordinary_files_are_taken(dtype: str, tmp_path: Path) -> None:
    size = {"F64": 8, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}.get(dtype, 2)
    header = {
        "__metadata__": {"format": "pt"},
        "a.lora_A.weight": _entry([3, 2], 0, 6 * size, dtype),
        "b.alpha": _entry([], 6 * size, 6 * size + 8, "I64"),
    }
    check_safetensors(_write(tmp_path / "good.safetensors", header, bytes(6 * size + 8)))
