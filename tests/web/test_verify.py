"""The page that reads the marks of a picture: for who is signed in, bounded, and nothing of what is sent stays."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from serve_app.domain.accounts import Account
from serve_app.domain.requests import ImageFormat, Variant
from serve_app.loras.registration import UPLOADS_AT_ONCE
from serve_app.marking.certificates import make_for_development
from serve_app.marking.marker import Marker
from serve_app.marking.reading import MAX_FILE_BYTES
from serve_app.marking.xmp import SourceType
from serve_app.worker.image_files import encode
from tests.composition import Resources
from tests.marking.test_watermark import photo
from tests.support import wait_until
from tests.web.browser import Browser, Page
from tests.web.conftest import Browsers


async def sent(browser: Browser, file: bytes, *, token: str | None = None, length: int | None = None) -> Page:
    form = (await browser.open("/verify")).form("Read its marks")
    data = {"form_token": form.fields["form_token"] if token is None else token}
    headers = {"Sec-Fetch-Site": "same-origin"}
    headers |= {} if length is None else {"Content-Length": str(length)}
    answer = await browser.http.post(form.action, data=data, files={"file": ("picture", file)}, headers=headers)
    return Page(answer)


async def test_a_picture_says_what_marks_it_has(browser: Browser, resources: Resources) -> None:
    settings = resources.settings
    make_for_development(*settings.marking_files)
    form = ImageFormat.WEBP
    file = Marker(settings).mark(photo(256, 256), form, SourceType.GENERATED, lambda p, xmp: encode(p, form, xmp=xmp))
    shown = (await sent(browser, file)).text
    for words in (
        "WEBP, 256 × 256 pixels", "XMP made by a model: trainedAlgorithmicMedia", "C2PA Valid: nothing has changed",
        "Development signer, Atelier development", "Watermark of this service found: score",
    ):  # fmt: skip
        assert words in shown
    assert "C2PA none" in (await sent(browser, encode(photo(256, 256), form))).text
    assert [*(Path(settings.data_dir) / "uploads").iterdir()] == []


async def test_one_counts_as_a_request_and_waits_for_its_place(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    left = (await resources.auth.window(owner.id, Variant.A)).remaining
    decoding = resources.for_jobs.uploads.decoding
    async with decoding:
        sending = asyncio.create_task(sent(browser, encode(photo(256, 256), ImageFormat.PNG)))
        await wait_until(decoding.locked)
        assert (await sending).status == 200
    assert (await resources.auth.window(owner.id, Variant.A)).remaining == left - 1
    async with AsyncExitStack() as places:
        for _ in range(UPLOADS_AT_ONCE):
            await places.enter_async_context(resources.uploads.hold(owner.id))
        assert "uploads in progress" in (await sent(browser, b"hello")).text


async def test_what_cannot_be_read_or_was_not_sent_by_the_page_is_refused(browser: Browser, browsers: Browsers) -> None:
    for file, words in ((b"hello", "is no PNG, JPEG or WebP"), (b"", "choose a PNG, JPEG or WebP file")):
        refused = await sent(browser, file)
        assert (refused.status, words in refused.text) == (400, True)
        assert refused.tagged("problem")
    assert (await sent(browser, b"x", token="0" * 64)).status == 403
    large = await sent(browser, b"x", length=MAX_FILE_BYTES + (1 << 20))
    assert (large.status, "must be at most 64 MB." in large.text) == (413, True)
    assert "Sign in" in (await browsers.new().open("/verify")).text
