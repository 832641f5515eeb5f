"""Before a disk is full new jobs are refused, and accepted ones go on.

The disk is not asked for each request.
"""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pydantic import ByteSize

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobState
from serve_app.jobs.images import ImageStore
from serve_app.loras.weights import KEPT_AFTER_USE
from serve_app.operations.checks import Level, check_disks
from serve_app.operations.store_checks import check_storage
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.storage import CHECK_EVERY_S, DiskReserve, free_bytes
from tests.api.app import BODY_A, TestService, client_of, open_service, refused, service_settings
from tests.composition import open_resources
from tests.support import mounted_disk, wait_until

EVERYTHING = ByteSize(1 << 60)
"""A reserve larger than any disk."""


def reserve_of(settings: Settings) -> DiskReserve:
    return DiskReserve(settings, ImageStore(settings).local_folder)


async def test_a_job_is_refused_and_its_caller_asked_to_try_again(tmp_path: Path) -> None:
    async with open_service(tmp_path, disk_reserve=EVERYTHING) as service:
        member = await service.member()
        answer = await service.client.post("/v1/generate", json=BODY_A, headers=member.a)
        refused(answer, 503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert str(tmp_path) not in answer.text
        assert not await service.resources.job_history.list_all()


async def test_what_is_not_on_a_disk_of_this_machine_is_not_looked_at(tmp_path: Path) -> None:
    elsewhere = Settings(
        data_dir=tmp_path, redis_url="unix:///unused", storage_url="memory://x", disk_reserve=EVERYTHING
    )
    await reserve_of(elsewhere).check()
    await reserve_of(elsewhere.model_copy(update={"redis_url": "", "disk_reserve": ByteSize(0)})).check()
    for change in ({"redis_url": ""}, {"storage_url": (tmp_path / "bucket").as_uri()}):
        with pytest.raises(StoreUnavailable):
            await reserve_of(Settings.model_validate(elsewhere.model_dump() | change)).check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", megabytes=8) as disk:
        yield disk


RESERVE = ByteSize(5 << 20)


@pytest.fixture
async def service(small_disk: Path) -> AsyncIterator[TestService]:
    """Open a service that has only the small disk, Redis included."""
    settings = service_settings(small_disk / "var", (), disk_reserve=RESERVE)
    ensure_redis(settings.data_dir)
    async with open_resources(settings) as resources, client_of(resources.app()) as client:
        yield TestService(resources, client)


def fill_into_reserve(file: Path) -> None:
    file.write_bytes(bytes(free_bytes(file.parent) - RESERVE + 100_000))


@pytest.mark.slow
async def test_weights_that_can_go_and_what_uploads_left_close_no_service(
    small_disk: Path, service: TestService
) -> None:
    member = await service.member()
    unused, left = (small_disk / "var" / name for name in (f"weights/{'a' * 64}.safetensors", "uploads/left"))
    unused.parent.mkdir(exist_ok=True)
    unused.write_bytes(bytes((free_bytes(small_disk) - RESERVE) // 2))
    long_ago = time.time() - 2 * KEPT_AFTER_USE.total_seconds()
    os.utime(unused, (long_ago, long_ago))
    left.mkdir(parents=True)
    fill_into_reserve(left / "file")
    assert free_bytes(small_disk) < RESERVE
    await service.submit(member)
    assert (left.exists(), unused.exists()) == (False, True), "no more goes than must"
    fill_into_reserve(small_disk / "ballast")

    async def goes() -> bool:
        assert (await service.client.post("/v1/generate", json=BODY_A, headers=member.a)).status_code == 202
        return not unused.exists()

    await wait_until(goes)


@pytest.mark.slow
async def test_a_disk_that_fills_up_keeps_its_reserve_for_what_was_accepted(
    small_disk: Path, service: TestService
) -> None:
    member = await service.member()
    accepted = await service.submit(member)

    async def answers(status: int) -> bool:
        return (await service.client.post("/v1/generate", json=BODY_A, headers=member.a)).status_code == status

    ballast = small_disk / "ballast"
    fill_into_reserve(ballast)
    await wait_until(lambda: answers(503))
    assert (await service.complete(accepted)).state is JobState.COMPLETED
    ballast.unlink()
    await wait_until(lambda: answers(202))


@pytest.mark.slow
async def test_the_disk_is_looked_at_once_a_second_at_most(small_disk: Path) -> None:
    """Between two looks a full disk is not seen, and no request waits for a look."""
    free = free_bytes(small_disk)
    disk = DiskReserve(Settings(data_dir=small_disk, redis_url="", disk_reserve=ByteSize(free // 2)), None)
    began = time.monotonic()
    await disk.check()
    (small_disk / "ballast").write_bytes(bytes(free * 3 // 4))
    await disk.check()
    assert time.monotonic() - began < CHECK_EVERY_S, "the machine was too slow for this test to show anything"
    await wait_until(lambda: refuses(disk))


async def test_doctor_calls_a_full_disk_by_its_name(small_disk: Path) -> None:
    settings = Settings(data_dir=small_disk / "var", redis_url="unix:///unused")
    settings.data_dir.mkdir()
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb") as ballast:
        ballast.write(bytes(free_bytes(small_disk)))
    (disk,) = check_disks(settings)
    (storage,) = await check_storage(settings)
    assert (disk.level, storage.level) == (Level.FAIL, Level.FAIL)
    assert storage.advice == "its disk is full: free some space"


async def refuses(disk: DiskReserve) -> bool:
    try:
        await disk.check()
    except StoreUnavailable:
        return True
    return False
