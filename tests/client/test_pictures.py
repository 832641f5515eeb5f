"""Images are begun from, masked by and enlarged from pictures, however these are given."""

import re
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image as PilImage

from serve_app.client import AsyncClient, Client, InvalidRequest, NotFound, Picture
from serve_app.client.pictures import MAX_FILE_BYTES
from tests.client.conftest import RecordingTransport
from tests.live import Live

PROMPT = "a harbour at night"


def a_picture(color: str = "red") -> PilImage.Image:
    return PilImage.new("RGB", (320, 256), color)


def as_jpeg(picture: PilImage.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()


def test_a_picture_is_a_file_bytes_a_pillow_image_or_an_image_of_the_service(client: Client, tmp_path: Path) -> None:
    def begun_from(picture: Picture) -> str:
        return client.generate(PROMPT, image=picture, strength=0.5, wait=False).request["image_id"]

    file = tmp_path / "photo.jpg"
    file.write_bytes(as_jpeg(a_picture()))
    photo = client.images.upload(file)
    assert (photo.width, photo.height) == (320, 256)
    data = f"data:image/jpeg;base64,{b64encode(file.read_bytes()).decode()}"
    with file.open("rb") as opened:
        for same in (file, str(file), file.read_bytes(), opened, BytesIO(file.read_bytes()), data, photo, photo.id):
            assert begun_from(same) == photo.id, "the same bytes are stored once"
    drawn = client.generate(PROMPT, image=a_picture("blue"), mask=photo)
    assert drawn.request["image_id"] != drawn.request["mask_image_id"] == photo.id
    image = drawn.images[0]
    assert begun_from(image) == begun_from(image.image_id) == image.image_id
    assert client.upscale(file, 2).wait().images[0].width == 640
    assert client.images.get(photo.id).sha256 == photo.sha256
    assert (photo.job_id, client.images.get(image.image_id).job_id) == (None, drawn.id)
    assert [each.id for each in client.images.list()] == [drawn.request["image_id"], photo.id]
    client.images.delete(photo.id)
    with pytest.raises(NotFound):
        client.images.get(photo.id)
    assert client.images.upload(file).id != photo.id


def test_what_is_no_picture_makes_no_job(client: Client, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(bytes(MAX_FILE_BYTES + 1))
    for missing in ("photo.png", "A" * 5000):
        with pytest.raises(FileNotFoundError, match=rf"{missing[:9]}.*: no such file, and no image's id or address"):
            client.generate(PROMPT, image=missing)
    with large.open() as text, pytest.raises(TypeError, match="a file opened with 'rb'"):
        client.generate(PROMPT, image=text)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has 20000001 bytes, and the service takes 20000000"):
        client.generate(PROMPT, image=large)
    with pytest.raises(TypeError, match=r"a picture is a path, an address, bytes, .* not 7"):
        client.generate(PROMPT, image=7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="either mask or mask_image_id"):
        client.generate(PROMPT, image=a_picture(), mask=a_picture(), mask_image_id="img_x")
    with pytest.raises(InvalidRequest, match="file: must be a PNG, JPEG or WebP"):
        client.generate(PROMPT, image=b"MZ" + bytes(500))
    assert client.jobs() == []


class OtherServer(httpx.HTTPTransport):
    """Answers for another host, and sends the rest to the service."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        super().__init__()
        self._answer, self.asked = answer, list[httpx.Request]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.host.endswith(".test"):
            return super().handle_request(request)
        self.asked.append(request)
        return self._answer(request)


def test_a_picture_is_fetched_from_its_address_without_the_key(live: Live, key: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/moved":
            return httpx.Response(302, headers={"Location": "https://cdn.test/photo.jpg"})
        if path == "/down":
            raise httpx.ConnectError("refused", request=request)
        body = as_jpeg(a_picture()) if path == "/photo.jpg" else b"<html>sign in"
        return httpx.Response(404 if path == "/gone" else 200, content=body, headers={"Content-Type": "text/html"})

    others = OtherServer(answer)
    with Client(live.base_url, key, transport=others) as client:
        photo = client.images.upload(as_jpeg(a_picture()))
        job = client.generate(PROMPT, image="https://photos.test/moved", wait=False)
        assert job.request["image_id"] == photo.id
        for path, said in (("gone", "answered 404"), ("page", "is text/html, and no PNG"), ("down", "refused")):
            address = f"http://photos.test/{path}"
            with pytest.raises(OSError, match=re.escape(f"{address}: {said}")):
                client.upscale(address)
    assert [request.url.host for request in others.asked[:2]] == ["photos.test", "cdn.test"]
    assert not [each for request in others.asked for each in request.headers.values() if key in each]


def test_many_are_begun_from_a_picture_that_is_sent_once(live: Live, key: str) -> None:
    transport = RecordingTransport()
    with Client(live.base_url, key, transport=transport) as client:
        jobs = client.map(PROMPT, seeds=[1, 2, 3], image=as_jpeg(a_picture()), mask=a_picture("white"), strength=0.4)
        client.images.upload(as_jpeg(a_picture()))
    assert len({(job.request["image_id"], job.request["mask_image_id"], job.request["strength"]) for job in jobs}) == 1
    uploads = [request for request in transport.requests if request.url.path == "/v1/images"]
    keys = {request.headers["idempotency-key"] for request in uploads}
    assert (len(uploads), len(keys)) == (3, 3), "with the key of an earlier call its time would not begin again"


async def test_the_async_client_takes_pictures_too(live: Live, key: str) -> None:
    async with AsyncClient(live.base_url, key, interface="b") as client:
        photo = await client.images.upload(as_jpeg(a_picture()))
        job = await client.generate(PROMPT, image=photo, strength=0.5)
        again = await client.generate(PROMPT, image=job.images[0], mask=a_picture("white"))
        assert (job.request["image_id"], again.request["image_id"]) == (photo.id, job.images[0].image_id)
        assert (await client.images.get(photo.id)).sha256 == photo.sha256
        assert photo.id in [each.id for each in await client.images.list()]
        await client.images.delete(photo.id)
        with pytest.raises(NotFound):
            await client.images.get(photo.id)
