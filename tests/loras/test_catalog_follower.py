"""The catalog file is followed while the service runs."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from serve_app.loras.applied_catalog import CatalogFollower
from serve_app.operations.housekeeping import reap_forever
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.support import adapter_id, end_tasks, rewrite_catalog, slowed, wait_until, write_safetensors

IN_TIME_S = 2.0
"""A change is served everywhere within this time."""


@asynccontextmanager
async def _housekeeping(settings: Settings) -> AsyncGenerator[None]:
    async with open_resources(settings) as housekeeper:
        task = asyncio.create_task(reap_forever(housekeeper.for_housekeeping))
        yield
        await end_tasks({task})


@pytest.mark.slow
async def test_a_changed_file_is_served_by_every_process_in_time(settings: Settings, resources: Resources) -> None:
    async with _housekeeping(settings), open_resources(settings) as other:
        for change, name in (
            (lambda rows: rows[0].update(name="Changed"), "Changed"),
            (lambda rows: rows[0].update(name="Once more"), "Once more"),
        ):
            rewrite_catalog(settings.catalog, change)
            began = time.monotonic()
            for each in (resources, other):
                await wait_until(lambda each=each, name=name: _is_called(each, name))
            assert time.monotonic() - began < IN_TIME_S


async def _is_called(resources: Resources, name: str) -> bool:
    adapter = await resources.catalog.adapter(adapter_id("outline"))
    return adapter is not None and adapter.name == name


async def test_a_mistake_is_logged_once_and_the_mended_file_is_applied(
    settings: Settings, resources: Resources, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, good = CatalogFollower(resources.applied_catalog, settings.catalog), settings.catalog.read_text()
    with monkeypatch.context() as patched:
        turned = slowed(patched, "stat", settings.catalog)
        await follower.look()
    assert turned == [True], "a disk that is slow holds up nothing else"
    assert not caplog.text
    rewrite_catalog(settings.catalog, lambda rows: rows[1].update(name=""))
    for _ in range(3):
        await follower.look()
    assert caplog.text.count("row 2 (model_mosaic") == 1
    settings.catalog.write_text("adapters: [")
    for _ in range(3):
        await follower.look()
    assert caplog.text.count("not YAML") == 1
    settings.catalog.unlink()
    await follower.look()
    assert "No such file" in caplog.text
    assert len(await resources.catalog.all()) == 9
    settings.catalog.write_text(good)
    rewrite_catalog(settings.catalog, lambda rows: rows[0].update(name="Mended"))
    await follower.look()
    assert await _is_called(resources, "Mended")


async def test_weights_that_come_late_are_found_without_another_change_of_the_file(
    settings: Settings, resources: Resources
) -> None:
    weights = settings.catalog.with_name("late.safetensors")
    rewrite_catalog(settings.catalog, lambda rows: rows.append({**rows[0], "id": "model_late", "file": str(weights)}))
    later = CatalogFollower(resources.applied_catalog, settings.catalog)
    soon = CatalogFollower(resources.applied_catalog, settings.catalog, again_after=timedelta(0))
    await later.look()
    await soon.look()
    write_safetensors(weights)
    await later.look()
    assert await resources.catalog.adapter("model_late") is None
    await soon.look()
    assert await resources.catalog.adapter("model_late")
    assert await resources.applied_catalog.set_aside() == []
