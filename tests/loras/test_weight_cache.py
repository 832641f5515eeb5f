"""The adapter files of a machine stay within their limit: those that were used longest ago go first."""

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ByteSize

from serve_app.domain.catalog import Adapter
from serve_app.loras.weights import DRAFTS_LIVE, KEPT_AFTER_USE, WeightCache, WeightStore
from serve_app.settings import Settings
from tests.support import lora_record, write_safetensors

LONG_AGO = 2 * KEPT_AFTER_USE.total_seconds()


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    """Return the records of four files of the same size."""
    return [lora_record(write_safetensors(tmp_path / f"{number}.safetensors", fill=number)) for number in range(1, 5)]


async def test_beyond_the_limit_the_files_that_were_used_longest_ago_go(
    tmp_path: Path, adapters: list[Adapter]
) -> None:
    size = _source(adapters[0]).stat().st_size
    kept = [await _store(tmp_path).fetch(adapter) for adapter in adapters[:3]]
    for path, seconds in zip(kept, (3 * LONG_AGO, 2 * LONG_AGO, LONG_AGO), strict=True):
        _used_before(path, seconds)
    await _store(tmp_path, weight_cache=2 * size).fetch(adapters[0])  # now it is the one that was used last
    await _store(tmp_path, weight_cache=2 * size).fetch(adapters[3])
    assert [path.exists() for path in kept] == [True, False, True], "as many as needed"
    assert not (kept[1].parent / ".used" / kept[1].name).exists()


async def test_space_is_made_for_what_is_to_come(tmp_path: Path, adapters: list[Adapter]) -> None:
    size = _source(adapters[0]).stat().st_size
    kept = [await _store(tmp_path).fetch(adapter) for adapter in adapters[:2]]
    for path, seconds in zip(kept, (2 * LONG_AGO, LONG_AGO), strict=True):
        _used_before(path, seconds)
    await _store(tmp_path, weight_cache=2 * size).fetch(replace(adapters[2], size_bytes=size))
    assert [path.exists() for path in kept] == [False, True]


@pytest.mark.parametrize("limit", [{"weight_cache": 0}, {"disk_reserve": 1 << 60}], ids=str)
async def test_a_file_beyond_either_limit_is_removed_and_fetched_again(
    tmp_path: Path, adapters: list[Adapter], limit: dict[str, int]
) -> None:
    store = _store(tmp_path, **limit)
    kept = await store.fetch(adapters[0])
    _used_before(kept, LONG_AGO)
    await store.fetch(adapters[1])
    assert not kept.exists()
    assert (await store.fetch(adapters[0])).read_bytes() == _source(adapters[0]).read_bytes()


async def test_files_in_use_stay_beyond_the_limit(tmp_path: Path, adapters: list[Adapter]) -> None:
    store = _store(tmp_path, weight_cache=0)
    kept = [await store.fetch(adapter) for adapter in adapters]
    assert all(path.exists() for path in kept)


async def test_a_file_that_is_used_while_others_are_removed_stays(
    tmp_path: Path, adapters: list[Adapter], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = [await _store(tmp_path).fetch(adapter) for adapter in adapters[:2]]
    _used_before(first, 2 * LONG_AGO)
    _used_before(second, LONG_AGO)

    class AnotherProcess(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert first.name in record.getMessage()
            WeightCache(second.parent, limit=0, reserve=0).note_use(second)

    log, handler = logging.getLogger("serve_app.loras.weights"), AnotherProcess()
    log.addHandler(handler)
    with caplog.at_level(logging.INFO, log.name):
        await _store(tmp_path, weight_cache=0).fetch(adapters[2])
    log.removeHandler(handler)
    assert [first.exists(), second.exists()] == [False, True]


async def test_folders_and_drafts_of_dead_processes_go_too(tmp_path: Path, adapters: list[Adapter]) -> None:
    store = _store(tmp_path, weight_cache=0)
    await store.fetch(adapters[0])
    folder = tmp_path / "var" / "weights" / ("0a" * 32)
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    draft, new_draft = (folder.parent / f".{'0b' * 32}.safetensors.{end}" for end in ("0a", "0b"))
    for path, seconds in ((folder, LONG_AGO), (draft, 2 * DRAFTS_LIVE.total_seconds()), (new_draft, LONG_AGO)):
        path.touch()
        _used_before(path, seconds)
    await store.fetch(adapters[1])
    assert [path.exists() for path in (folder, draft, new_draft)] == [False, False, True]


def _store(tmp_path: Path, *, weight_cache: int = 1 << 40, disk_reserve: int = 0) -> WeightStore:
    limits = {"weight_cache": ByteSize(weight_cache), "disk_reserve": ByteSize(disk_reserve)}
    return WeightStore(Settings(data_dir=tmp_path / "var", redis_url="unix:///unused").model_copy(update=limits))


def _source(adapter: Adapter) -> Path:
    return Path(adapter.file)


def _used_before(path: Path, seconds: float) -> None:
    """Make a file look as if it had been fetched and used that long ago."""
    then = time.time() - seconds
    for each in (path, path.parent / ".used" / path.name):
        if each.exists():
            os.utime(each, (then, then))
