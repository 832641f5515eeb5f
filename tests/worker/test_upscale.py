"""Upscale jobs use every field, end between tiles on an abort, and name a source that is unreadable."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, JobKind, JobState, Lease, new_job_id
from serve_app.domain.requests import ImageFormat, UpscaleRequest
from serve_app.jobs.previews import thumbnail
from serve_app.settings import Settings
from serve_app.upscale.upscaler import Upscaler
from serve_app.worker.executor import Pixels, RunFailed
from serve_app.worker.upscale import UpscaleExecutor
from tests.composition import Resources, open_resources
from tests.made_jobs import accept, job_of
from tests.worker.scripted_executor import until, working


async def stored(resources: Resources, color: tuple[int, int, int], form: ImageFormat = ImageFormat.PNG) -> str:
    out = BytesIO()
    Image.new("RGB", (20, 10), color).save(out, form)
    name = resources.images.object_name("acct", new_job_id(JobKind.GENERATION), 1, 0, datetime.now(UTC), form)
    return await resources.images.put(name, out.getvalue())


def claim_of(source_uri: str, *, factor: int = 2) -> Claim:
    request = UpscaleRequest(
        image_id="img", scale_factor=factor, source_uri=source_uri, source_width=20, source_height=10
    )
    lease = Lease(job_id=new_job_id(JobKind.UPSCALE), attempt=1)
    return Claim(lease=lease, weights="", account_id="acct", request=request, created_at=datetime.now(UTC))


async def image_of(executor: UpscaleExecutor, claim: Claim) -> Pixels:
    await executor.start(claim, ["1"])
    (run,) = executor.step()
    assert run.run_id == "1"
    assert run.image is not None
    return run.image


async def test_factor_and_source_reach_the_upscaler(resources: Resources) -> None:
    executor = UpscaleExecutor(Upscaler.load(None), resources.images)
    red, blue = await stored(resources, (255, 0, 0)), await stored(resources, (0, 0, 255))
    twice = await image_of(executor, claim_of(red))
    assert twice.shape == (20, 40, 3)
    assert (await image_of(executor, claim_of(red, factor=4))).shape == (40, 80, 3)
    assert not np.array_equal(twice, await image_of(executor, claim_of(blue)))


async def test_a_worker_stores_what_was_enlarged_in_the_format_asked_for(settings: Settings) -> None:
    async with open_resources(settings.model_copy(update={"png_job_id": True})) as resources:
        images, disk = resources.images, resources.space.disk
        async with working(resources, UpscaleExecutor(Upscaler.load(None), images)):
            for form in ImageFormat:
                request = claim_of(await stored(resources, (255, 0, 0), form), factor=4).request
                job_id = await accept(resources, request=replace(request, output_format=form))
                await until(resources, job_id, JobState.COMPLETED)
                [image] = (await job_of(resources, job_id)).images
                content = await images.get(image.image_uri)
                opened = Image.open(BytesIO(content))
                assert (opened.format, opened.size) == (form.upper(), (80, 40))
                assert np.abs(np.asarray(opened.convert("RGB"))[20, 40] - np.array([255, 0, 0])).max() <= 3
                told = opened.info if form is ImageFormat.PNG else opened.getexif()
                assert job_id in " ".join(map(str, told.values()))
                assert (image.index, image.format) == (0, form)
                assert (await thumbnail(images, disk, image.image_uri))[8:12] == b"WEBP"
                assert await images.get(image.image_uri) == content, "a thumbnail has a place of its own"


async def test_waiting_and_running_images_take_the_free_runs(resources: Resources) -> None:
    executor = UpscaleExecutor(Upscaler.load(None), resources.images, max_runs=2)
    red = await stored(resources, (255, 0, 0))
    assert not executor.has_work
    assert executor.step() == ()
    for run_id in "12":
        await executor.start(claim_of(red), [run_id])
    assert executor.free_runs == 0
    assert executor.progress() == {"1": (0, 1), "2": (0, 1)}
    assert executor.abort("2")
    assert not executor.abort("2")
    assert [run.run_id for run in executor.step()] == ["1"]
    assert executor.free_runs == 2
    assert executor.progress() == {}


class PausedUpscaler(Upscaler):
    """Reports its first tile of two, and goes on when it is allowed."""

    def __init__(self) -> None:
        super().__init__([], torch.device("cpu"))
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def upscale(self, rgb: Pixels, factor: int, on_progress: Callable[[int, int], None] | None = None) -> Pixels:
        assert on_progress is not None
        on_progress(1, 2)
        self._loop.call_soon_threadsafe(self.began.set)
        asyncio.run_coroutine_threadsafe(self.go.wait(), self._loop).result(30)
        on_progress(2, 2)
        return rgb


@pytest.mark.parametrize("abort", [True, False])
async def test_a_running_image_is_stopped_between_tiles(resources: Resources, abort: bool) -> None:
    upscaler = PausedUpscaler()
    executor = UpscaleExecutor(upscaler, resources.images)
    await executor.start(claim_of(await stored(resources, (255, 0, 0))), ["1"])
    step = asyncio.create_task(asyncio.to_thread(executor.step))
    await asyncio.wait_for(upscaler.began.wait(), 30)
    assert executor.progress() == {"1": (1, 2)}
    assert executor.free_runs == 1
    if abort:
        assert executor.abort("1")
    upscaler.go.set()
    assert [run.run_id for run in await step] == ([] if abort else ["1"])
    assert executor.free_runs == 2
    assert not executor.abort("1")


@pytest.mark.slow
@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_source_is_tried_again_where_it_cannot_be_read_now_and_not_where_it_is_gone(
    resources: Resources, is_gone: bool
) -> None:
    executor = UpscaleExecutor(Upscaler.load(None), resources.images)
    uri, folder = await stored(resources, (255, 0, 0)), resources.settings.data_dir / "images"
    if is_gone:
        await resources.images.delete(uri)
    else:
        folder.rename(folder.with_name("away"))
        folder.write_text("not a folder")
    with pytest.raises(RunFailed, match="no longer stored" if is_gone else "cannot be read") as refused:
        await executor.start(claim_of(uri), ["1"])
    assert refused.value.failure.code is FailureCode.GENERATION_FAILED
    assert refused.value.retry is not is_gone
    assert not executor.has_work
