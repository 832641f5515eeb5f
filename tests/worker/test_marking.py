"""A worker marks what it makes where the settings say so, and the job's record tells; otherwise not a byte changes."""

from datetime import UTC, datetime
from io import BytesIO

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from serve_app.api.jobs.records import job_record
from serve_app.client.records import Record
from serve_app.domain.jobs import Job, JobState, new_image_id
from serve_app.domain.requests import ImageFormat, UpscaleRequest
from serve_app.marking.certificates import make_for_development
from serve_app.marking.marker import MARKS
from serve_app.marking.watermark import THRESHOLD, Watermark, luminance_of
from serve_app.marking.xmp import SourceType, source_type_in
from serve_app.settings import Settings
from serve_app.upscale.upscaler import Upscaler
from serve_app.worker.image_files import JPEG, WEBP, generator_name
from serve_app.worker.upscale import UpscaleExecutor
from tests.composition import open_resources
from tests.made_jobs import accept, job_of
from tests.marking.test_watermark import photo
from tests.worker.scripted_executor import until, working

SOURCE = photo(128, 96)


async def enlarged(settings: Settings, form: ImageFormat, *, from_upload: bool = False) -> tuple[Job, bytes]:
    """Return the job of an enlarged image, which has completed, and its file."""
    async with open_resources(settings) as resources:
        out = BytesIO()
        Image.fromarray(SOURCE).save(out, "png")
        name = resources.images.object_name("acct", new_image_id(), 1, 0, datetime.now(UTC))
        request = UpscaleRequest(
            image_id="img", source_uri=await resources.images.put(name, out.getvalue()), source_width=128,
            source_height=96, output_format=form, from_upload=from_upload,
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


@pytest.mark.parametrize("from_upload", [False, True])
async def test_an_image_is_marked_by_what_it_was_made_from(marking: Settings, from_upload: bool) -> None:
    source = SourceType.COMPOSITE if from_upload else SourceType.GENERATED
    job, content = await enlarged(marking, ImageFormat.PNG, from_upload=from_upload)
    picture = Image.open(BytesIO(content))
    assert source_type_in(picture.info["XML:com.adobe.xmp"].encode()) == source
    assert b"caBX" in content, "the chunk of C2PA"
    assert Watermark(marking.watermark_key).score(luminance_of(picture)) >= THRESHOLD
    record = job_record(job, lambda uri: uri)
    assert record["marking"] == {"source_type": source, "marks": list(MARKS)}
    assert Record.read(record).marking == record["marking"]


@pytest.mark.parametrize("form", ImageFormat)
async def test_without_marking_not_a_byte_changes(settings: Settings, form: ImageFormat) -> None:
    """The file is what Pillow writes of the pixels and the generator's name, as before there was marking."""
    job, content = await enlarged(settings, form)
    large = np.asarray(Image.fromarray(Upscaler.load(None).upscale(SOURCE, 2)))
    out = BytesIO()
    if form is ImageFormat.PNG:
        text = PngInfo()
        text.add_text("Software", generator_name())
        Image.fromarray(large).save(out, "png", pnginfo=text, compress_level=4)
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Software] = generator_name()
        Image.fromarray(large).save(out, form, exif=exif, **(JPEG if form is ImageFormat.JPEG else WEBP))
    assert content == out.getvalue()
    assert "marking" not in job_record(job, lambda uri: uri)
    assert Record.read(job_record(job, lambda uri: uri)).marking == {}
