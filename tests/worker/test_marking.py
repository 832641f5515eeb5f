"""A worker marks what it makes where the settings say so, and the job's record tells; otherwise not a byte changes."""

from datetime import UTC, datetime, timedelta
from io import BytesIO

import numpy as np
import pytest
import redis
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from serve_app.api.jobs.records import job_record
from serve_app.client.records import Record
from serve_app.domain.jobs import Job, JobState, new_image_id
from serve_app.domain.requests import ImageFormat, UpscaleRequest
from serve_app.marking.certificates import make_for_development
from serve_app.marking.marker import MARKS, Marker
from serve_app.marking.watermark import THRESHOLD, Watermark, luminance_of
from serve_app.marking.xmp import SourceType, source_type_in
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.upscale.upscaler import Upscaler
from serve_app.worker.image_files import JPEG, WEBP, generator_name
from serve_app.worker.reports import report
from serve_app.worker.upscale import UpscaleExecutor
from serve_app.worker.worker import Worker
from tests.composition import open_resources
from tests.made_jobs import accept, job_of
from tests.marking.test_watermark import photo
from tests.support import wait_until
from tests.worker.scripted_executor import ScriptedExecutor, until, working

SOURCE = photo(128, 96)
QUALITIES = [(ImageFormat.JPEG, 20), (ImageFormat.WEBP, 0)]


async def enlarged(
    settings: Settings, form: ImageFormat, *, from_upload: bool | None = None, quality: int | None = None
) -> tuple[Job, bytes]:
    """Return the job of an enlarged image, which has completed, and its file."""
    async with open_resources(settings) as resources:
        out = BytesIO()
        Image.fromarray(SOURCE).save(out, "png")
        name = resources.images.object_name("acct", new_image_id(), 1, 0, datetime.now(UTC))
        request = UpscaleRequest(
            image_id="img", source_uri=await resources.images.put(name, out.getvalue()), source_width=128,
            source_height=96, output_format=form, from_upload=from_upload, quality=quality,
        )  # fmt: skip
        async with working(resources, UpscaleExecutor(Upscaler.load(None), resources.images)):
            job_id = await accept(resources, request=request)
            await until(resources, job_id, JobState.COMPLETED)
        job = await job_of(resources, job_id)
        return job, await resources.images.get(job.images[0].image_uri)


@pytest.fixture
def marking(settings: Settings) -> Settings:
    make_for_development(*settings.marking_files)
    return settings.model_copy(update={"mark_images": True})


@pytest.mark.parametrize("from_upload", [False, True, None])
async def test_an_image_is_marked_by_what_it_was_made_from(marking: Settings, from_upload: bool | None) -> None:
    """Records of before 28 November 2026 do not tell."""
    source = SourceType.GENERATED if from_upload is False else SourceType.COMPOSITE
    job, content = await enlarged(marking, ImageFormat.PNG, from_upload=from_upload)
    picture = Image.open(BytesIO(content))
    assert source_type_in(picture.info["XML:com.adobe.xmp"].encode()) == source
    assert b"caBX" in content, "the chunk of C2PA"
    assert Watermark(marking.watermark_key).score(luminance_of(picture)) >= THRESHOLD
    record = job_record(job, lambda uri: uri)
    assert record["marking"] == {"source_type": source, "marks": list(MARKS)}
    assert Record.read(record).marking == record["marking"]


@pytest.mark.parametrize(("form", "quality"), [*((form, None) for form in ImageFormat), *QUALITIES])
async def test_without_marking_not_a_byte_changes(settings: Settings, form: ImageFormat, quality: int | None) -> None:
    """The file is what Pillow writes of the pixels and the generator's name, as before there was marking."""
    job, content = await enlarged(settings, form, quality=quality)
    large = np.asarray(Image.fromarray(Upscaler.load(None).upscale(SOURCE, 2)))
    out = BytesIO()
    if form is ImageFormat.PNG:
        text = PngInfo()
        text.add_text("Software", generator_name())
        Image.fromarray(large).save(out, "png", pnginfo=text, compress_level=4)
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Software] = generator_name()
        usual = JPEG if form is ImageFormat.JPEG else WEBP
        Image.fromarray(large).save(out, form, exif=exif, **usual | ({} if quality is None else {"quality": quality}))
    assert content == out.getvalue()
    assert "marking" not in job_record(job, lambda uri: uri)
    assert Record.read(job_record(job, lambda uri: uri)).marking == {}


@pytest.mark.parametrize("is_drawn", [False, True], ids=["before it is taken", "while it is drawn"])
async def test_a_job_waits_while_the_certificate_has_ended_and_the_worker_reads_the_next(
    marking: Settings, redis_db: redis.Redis, caplog: pytest.LogCaptureFixture, is_drawn: bool
) -> None:
    """A clock that is ahead is the end of the certificate, whose files hold one that ended yesterday."""
    now, drawing = datetime.now(UTC), list[Worker]()

    def clock() -> datetime:
        has_ended = not is_drawn or any(worker.open_jobs or "waits" in caplog.text for worker in drawing)
        return now + timedelta(days=900) if has_ended else now

    def replace_files(ends: datetime | None = None) -> None:
        for file in marking.marking_files:
            file.unlink()
        make_for_development(*marking.marking_files, ends=ends)

    async with open_resources(marking) as resources:
        marker = resources.for_workers.marker = Marker(marking, clock=clock)
        replace_files(ends=now - timedelta(days=1))
        job_id, executor = await accept(resources), ScriptedExecutor()

        async def is_told() -> bool:
            """Whether the worker is known to live, and why it idles."""
            shown = await resources.measures.shown(executor.pool)
            return [worker.gauges["workers_unable_to_mark"] for worker in shown] == [1]

        async with working(resources, executor, name="w") as worker:
            drawing.append(worker)
            await wait_until(lambda: "takes no jobs until there is a new certificate" in caplog.text)
            assert "certificate.pem has expired" in caplog.text
            await until(resources, job_id, JobState.QUEUED, attempt=int(is_drawn))
            assert redis_db.hget(redis_key("job", job_id), "tries") in (None, "0"), "that was no attempt of its own"
            await report(resources.measures, executor, worker="w", marker=marker)
            await wait_until(is_told)
            replace_files()
            redis_db.zadd(redis_key("delay", "generation"), {job_id: 1}, xx=True)
            await until(resources, job_id, JobState.COMPLETED, attempt=1 + is_drawn)
        assert (await job_of(resources, job_id)).marks == ("xmp", "c2pa"), "8 × 8 pixels hold no watermark"
