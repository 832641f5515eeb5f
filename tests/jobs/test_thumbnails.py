"""Thumbnails are made when first asked for, and shown also where they cannot be stored."""

from datetime import UTC, datetime
from io import BytesIO

import pytest
from PIL import Image

from serve_app.domain.errors import NotFound
from serve_app.jobs.images import thumbnail_uri
from serve_app.jobs.previews import thumbnail, thumbnail_size
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.support import png_of


async def _put(resources: Resources, png: bytes) -> str:
    return await resources.images.put(resources.images.object_name("acct_a", "gen_a", 1, 0, datetime.now(UTC)), png)


async def test_a_thumbnail_is_small_made_once_and_gone_with_its_image(resources: Resources) -> None:
    uri = await _put(resources, png_of((640, 480)))
    webp = await thumbnail(resources.images, resources.space.disk, uri)
    with Image.open(BytesIO(webp)) as image:
        assert (image.format, image.size) == ("WEBP", (320, 240))
    await resources.images.put(resources.images.name(thumbnail_uri(uri)), b"as it was kept")
    assert await thumbnail(resources.images, resources.space.disk, uri) == b"as it was kept"
    await resources.images.delete(uri)
    with pytest.raises(NotFound):
        await thumbnail(resources.images, resources.space.disk, uri)


async def test_a_thumbnail_is_shown_also_where_it_cannot_be_kept(settings: Settings, resources: Resources) -> None:
    uri = await _put(resources, png_of((64, 64)))
    async with open_resources(settings.model_copy(update={"disk_reserve": 10**18})) as full:
        assert (await thumbnail(full.images, full.space.disk, uri))[:4] == b"RIFF"
        assert not await full.images.exists(thumbnail_uri(uri))


@pytest.mark.parametrize(
    ("size", "small"), [((1024, 1024), (320, 320)), ((256, 1024), (80, 320)), ((8, 8), (8, 8)), ((4096, 1), (320, 1))]
)
def test_a_thumbnail_keeps_the_shape(size: tuple[int, int], small: tuple[int, int]) -> None:
    assert thumbnail_size(*size) == small
