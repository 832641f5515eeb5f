"""Adapter weights are fetched once, and refused when they are not the catalog's or not a valid file."""

import asyncio
import hashlib
import json
import os
import struct
import threading
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable
from serve_app.jobs.images import ImageStore
from serve_app.loras.catalog_file import add_digests
from serve_app.loras.stored_weights import LoraFiles
from serve_app.loras.weights import WeightStore
from serve_app.safetensors_file import MAX_HEADER_BYTES, UnusableFile, check_safetensors
from serve_app.settings import Settings
from serve_app.store.storage import THREADS
from tests.support import wait_until, write_safetensors


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(Settings(data_dir=tmp_path / "var", redis_url="unix:///unused"))


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    file = write_safetensors(tmp_path / "one.safetensors")
    return Adapter(
        id="model_one",
        name="One",
        description="",
        created_at=datetime.now(UTC),
        file=str(file),
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        base_model="pocket",
    )


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
    here = replace(adapter, file=str(other), sha256=hashlib.sha256(other.read_bytes()).hexdigest())
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


async def test_missing_weights_are_named_by_adapter(store: WeightStore, adapter: Adapter) -> None:
    with pytest.raises(AdapterUnavailable, match="model_one"):
        await store.fetch(replace(adapter, file="/nowhere.safetensors"))
    with pytest.raises(AdapterUnavailable, match="model_one"):
        await store.fetch(replace(adapter, file="/"))


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
    with pytest.raises(AdapterUnavailable, match="model_one"):
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


def _write(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def _entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = _entry([2, 2], 0, 16)
BAD_FILES: dict[str, tuple[Any, bytes, int | None]] = {
    "an endless header": ({"a": GOOD}, bytes(16), 2**63),
    "a header that ends too soon": ({"a": GOOD}, bytes(16), 99_000_000),
    "a header over the limit": (b"{" + b" " * MAX_HEADER_BYTES + b"}", b"", None),
    "deep JSON": (b"[" * 100_000, b"", None),
    "no JSON": (b"\xff\xfe" * 8, b"", None),
    "an array": ([1], b"", None),
    "no tensors": ({}, b"", None),
    "metadata that is not text": ({"__metadata__": {"a": 1}, "a": GOOD}, bytes(16), None),
    "a name twice": (
        b'{"a":' + json.dumps(GOOD).encode() + b',"a":' + json.dumps(GOOD).encode() + b"}",
        bytes(16),
        None,
    ),
    "a path as a name": ({"../../etc/passwd": GOOD}, bytes(16), None),
    "a long name": ({"n" * 257: GOOD}, bytes(16), None),
    "another type": ({"a": _entry([2], 0, 16, "C64")}, bytes(16), None),
    "a zero side": ({"a": _entry([0, 10**15], 0, 0)}, b"", None),
    "a huge side": ({"a": _entry([2**18 + 1], 0, 4 * (2**18 + 1))}, b"", None),
    "an overflowing shape": ({"a": _entry([2**17, 2**17, 2**17, 2**17], 0, 16)}, bytes(16), None),
    "six dimensions": ({"a": _entry([1] * 6, 0, 4)}, bytes(4), None),
    "text in a shape": ({"a": _entry(["2"], 0, 8)}, bytes(8), None),
    "a true side": ({"a": _entry([True], 0, 4)}, bytes(4), None),
    "offsets that do not fit": ({"a": _entry([2, 2], 0, 8)}, bytes(8), None),
    "offsets that run backwards": ({"a": _entry([2, 2], 16, 0)}, bytes(16), None),
    "an overlap": ({"a": GOOD, "b": _entry([2, 2], 8, 24)}, bytes(24), None),
    "a hole": ({"a": GOOD, "b": _entry([2, 2], 20, 36)}, bytes(36), None),
    "trailing bytes": ({"a": GOOD}, bytes(17), None),
    "missing bytes": ({"a": GOOD}, bytes(15), None),
    "an extra field": ({"a": {**GOOD, "extra": 1}}, bytes(16), None),
    "an entry that is no object": ({"a": 1}, b"", None),
    "not a number": ({"a": GOOD}, struct.pack("<4f", 1, float("nan"), 1, 1), None),
    "infinite": ({"a": GOOD}, struct.pack("<4f", 1, 1, float("inf"), 1), None),
    "infinite in half": ({"a": _entry([2], 0, 4, "F16")}, np.array([1, np.inf], np.float16).tobytes(), None),
    "not a number in double": ({"a": _entry([1], 0, 8, "F64")}, struct.pack("<d", float("nan")), None),
    "not a number in E4M3": ({"a": _entry([2], 0, 2, "F8_E4M3")}, b"\x38\xff", None),
    "infinite in E5M2": ({"a": _entry([2], 0, 2, "F8_E5M2")}, b"\x38\x7c", None),
    "too much metadata": ({"__metadata__": {str(n): "" for n in range(1_001)}, "a": GOOD}, bytes(16), None),
    "not a number in bfloat": ({"a": _entry([2], 0, 4, "BF16")}, struct.pack("<2H", 0x3F80, 0x7FC0), None),
}


@pytest.mark.parametrize("case", BAD_FILES, ids=str)
def test_a_file_we_do_not_load_is_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    header, data, length = BAD_FILES[case]
    with pytest.raises(UnusableFile, match="the file"):
        check_safetensors(_write(tmp_path / "bad.safetensors", header, data, length=length))


@pytest.mark.parametrize("content", [b"", b"1234567", b"PK\x03\x04" + bytes(100)], ids=["empty", "short", "zip"])
def test_what_is_not_safetensors_at_all_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnusableFile):
        check_safetensors(path)


@pytest.mark.parametrize(("content", "reason"), [
    (b"\x80\x04cos\nsystem\n", "pickle"),
    (b"PK\x03\x04" + bytes(100), "pickle"),
    (b"<!DOCTYPE html><html>sign in</html>", "web page"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
])  # fmt: skip
def test_other_kinds_of_files_are_called_by_their_names(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnusableFile, match=reason):
        check_safetensors(path)


@pytest.mark.parametrize("name", [
    "bundle_emb.<embedding>.clip_l", "bundle_emb.*.string_to_param.*", "bundle_emb.an ink drawing.clip_g", "bundle_emb.墨.clip_l_out",
])  # fmt: skip
def test_an_embedding_that_onetrainer_bundles_is_called_so_whatever_its_placeholder(name: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "bad.safetensors", {name: GOOD}, bytes(16))
    with pytest.raises(UnusableFile, match="bundles an embedding"):
        check_safetensors(path)


@pytest.mark.slow
def test_the_metadata_of_a_real_training_is_taken(tmp_path: Path) -> None:
    """sd-scripts counts every tag of the data set: 100,000 tags are 5 MB of header."""
    tags = json.dumps({"images": {f"a tag of the data set {n}": n for n in range(100_000)}})
    header = {"__metadata__": {"ss_tag_frequency": tags}, "a": GOOD}
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


def test_a_file_written_by_the_library_itself_is_taken(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.ones((4, 4), np.float32), "y": np.ones(3, np.float16)}, tmp_path / "lib.safetensors")
    check_safetensors(tmp_path / "lib.safetensors")
