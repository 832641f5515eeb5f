"""The folder of an upload is locked while the upload lives; any process removes the others."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from serve_app.loras import registration as upload_places
from serve_app.loras.registration import UploadPlaces
from tests.support import wait_until


@pytest.fixture
def places(tmp_path: Path) -> UploadPlaces:
    return UploadPlaces(tmp_path)


def folders(tmp_path: Path) -> list[Path]:
    uploads = tmp_path / "uploads"
    return list(uploads.iterdir()) if uploads.exists() else []


async def test_a_folder_goes_when_its_place_ends_though_work_took_the_place_over(
    places: UploadPlaces, tmp_path: Path
) -> None:
    async with places.hold("acct") as place:
        folder = await place.enter_async_context(places.folder())
        (folder / "file").write_bytes(b"weights")
        taken = place.pop_all()
    UploadPlaces(tmp_path).sweep()
    assert folders(tmp_path) == [folder]
    await taken.aclose()
    assert not folders(tmp_path)


async def test_a_caller_who_is_canceled_while_a_thread_makes_the_folder_leaves_none(
    places: UploadPlaces, tmp_path: Path
) -> None:
    async def hold() -> None:
        async with places.folder():
            await asyncio.Event().wait()

    for turns in range(20):
        holding = asyncio.create_task(hold())
        for _ in range(turns):
            await asyncio.sleep(0)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await wait_until(lambda: not folders(tmp_path))


async def test_many_sweeps_take_no_folder_that_is_being_made(places: UploadPlaces, tmp_path: Path) -> None:
    others = UploadPlaces(tmp_path)
    may_end = asyncio.Event()

    async def sweep() -> None:
        while not may_end.is_set():
            await asyncio.to_thread(others.sweep)

    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(sweep())
        for _ in range(300):
            async with places.folder() as folder:
                await asyncio.to_thread((folder / "file").write_bytes, b"weights")
        may_end.set()
    assert not folders(tmp_path)


def test_a_loop_that_ends_takes_its_folders_with_it(places: UploadPlaces, tmp_path: Path) -> None:
    async def hold() -> None:
        async with places.folder() as folder:
            (folder / "file").write_bytes(b"weights")
            await asyncio.Event().wait()

    async def main() -> Iterable[object]:
        tasks = [asyncio.create_task(hold()) for _ in range(3)]
        await wait_until(lambda: len(folders(tmp_path)) == 3)
        return tasks

    assert asyncio.run(main())
    assert not folders(tmp_path)


async def test_a_process_removes_what_others_left_at_its_start_and_from_time_to_time(
    places: UploadPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, and a link that leads elsewhere, are none of ours."""
    monkeypatch.setattr(upload_places, "SWEEP_EVERY_S", 0.01)
    kept = tmp_path / "elsewhere" / "file"
    stray, link = tmp_path / "uploads" / "stray", tmp_path / "uploads" / "link"
    for path in (kept, tmp_path / "uploads" / "left" / "file", stray):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights")
    link.symlink_to(kept.parent)
    sweeping = asyncio.create_task(places.sweep_forever())
    try:
        await wait_until(lambda: set(folders(tmp_path)) == {stray, link})
        (tmp_path / "uploads" / "later").mkdir()
        await wait_until(lambda: set(folders(tmp_path)) == {stray, link})
    finally:
        sweeping.cancel()
    assert kept.exists()
