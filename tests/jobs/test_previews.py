"""Previews are made for a job that somebody watches, and for no other."""

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from serve_app.worker import image_files as previews
from serve_app.worker.executor import Pixels
from tests.composition import Resources
from tests.made_jobs import accept
from tests.support import wait_until
from tests.worker.scripted_executor import ScriptedExecutor, working


class PaintingExecutor(ScriptedExecutor):
    """Its runs never end, and show a picture after the fifth step."""

    shows_unfinished = True
    looked = 0

    def unfinished(self, run_id: str, longest: int) -> tuple[int, Pixels] | None:
        self.looked += 1
        return 5, np.full((longest, longest // 2, 3), 200, np.uint8)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previews, "EVERY_S", 0.01)


async def test_a_watched_job_shows_its_unfinished_images(resources: Resources) -> None:
    executor = PaintingExecutor("hang", "hang")
    async with working(resources, executor):
        job_id = await accept(resources, images=2)
        unwatched = await accept(resources)
        await resources.previews.watch(job_id)
        await wait_until(lambda: _count(resources, job_id, 2))
        found = await resources.previews.get(job_id)
        assert await resources.previews.get(unwatched) == {}
    assert {index: preview.step for index, preview in found.items()} == {0: 5, 1: 5}
    assert Image.open(BytesIO(found[0].png)).size == (32, 64)


@pytest.mark.parametrize("change", [{"previews": False}, {"moderation_callable": "builtins:bool"}])
async def test_switched_off_or_under_moderation_nothing_is_shown(
    resources: Resources, change: dict[str, object]
) -> None:
    quiet = resources.with_parts(settings=resources.settings.model_copy(update=change))
    if "moderation_callable" in change:
        quiet = quiet.with_parts(moderation=type(resources.moderation)(quiet.settings))
    executor = PaintingExecutor("hang")
    async with working(quiet, executor):
        job_id = await accept(resources)
        await resources.previews.watch(job_id)
        await wait_until(lambda: executor.progress())
    assert executor.looked == 0


async def _count(resources: Resources, job_id: str, number: int) -> bool:
    return len(await resources.previews.get(job_id)) == number
