"""Images on a local disk, in memory and on an S3-compatible server: the same promises."""

import asyncio
import os
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from serve_app.domain.errors import NotFound, StoreUnavailable
from serve_app.domain.requests import ImageFormat
from serve_app.jobs.images import ImageStore, thumbnail_uri
from serve_app.settings import Settings

WHEN = datetime(2026, 11, 21, 12, tzinfo=UTC)
PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 100_000


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ImageStore:
    settings: dict[str, Any] = {"data_dir": tmp_path, "redis_url": "unix:///unused"}
    if request.param == "memory":
        settings["storage_url"] = f"memory://{tmp_path.name}"
    if request.param == "s3":
        settings |= {"storage_url": f"s3://pictures/{tmp_path.name}", "storage_options": request.getfixturevalue("s3")}
    return ImageStore(Settings(**settings))


def _name(store: ImageStore, attempt: int = 1, index: int = 0, form: ImageFormat = ImageFormat.PNG) -> str:
    return store.object_name("acct_x", "gen_x", attempt, index, WHEN, form)


@pytest.mark.slow
async def test_what_is_put_is_what_is_got_until_it_is_deleted(store: ImageStore) -> None:
    """Each may be done twice."""
    uri = await store.put(_name(store), PNG)
    assert await store.put(_name(store), PNG) == uri
    assert await store.get(uri) == PNG
    assert await store.exists(uri)
    assert store.name(uri) == _name(store)
    assert store.uri(_name(store)) == uri
    for _ in range(2):
        await store.delete(uri)
    assert not await store.exists(uri)
    with pytest.raises(NotFound):
        await store.get(uri)


@pytest.mark.slow
async def test_a_thumbnail_goes_with_its_image_and_has_no_address(store: ImageStore) -> None:
    uri = await store.put(_name(store, form=ImageFormat.WEBP), PNG)
    thumbnail = await store.put(store.name(thumbnail_uri(uri)), b"webp")
    assert thumbnail_uri(thumbnail) == thumbnail
    assert (await store.get(thumbnail), await store.get(uri)) == (b"webp", PNG)
    if not uri.startswith("s3"):
        url = urlsplit(store.url(thumbnail, base_url="http://x"))
        signature = {name: values[0] for name, values in parse_qs(url.query).items()}
        assert not store.verify(store.name(thumbnail), **signature)
    await store.delete(uri)
    assert not await store.exists(thumbnail)


async def test_objects_are_listed_by_name(store: ImageStore) -> None:
    assert await store.names() == []
    names = sorted(_name(store, attempt, index) for attempt in (1, 2) for index in (0, 1))
    await asyncio.gather(*(store.put(name, PNG) for name in names))
    assert sorted(await store.names()) == names
    day = names[0].rsplit("/", 2)[0]
    assert sorted(await store.names(day)) == names
    assert await store.folders("images") == [names[0].rsplit("/", 5)[0]]
    assert await store.folders("nothing") == []


async def test_a_uri_of_another_place_is_no_image_of_ours(store: ImageStore) -> None:
    uri = await store.put(_name(store), PNG)
    for foreign in ("file:///etc/passwd", uri + "/../../x", store.uri("../secrets.json"), store.uri("images/x"), ""):
        with pytest.raises(NotFound):
            await store.get(foreign)


async def test_images_of_a_storage_that_has_moved_are_found_by_their_old_uris(store: ImageStore) -> None:
    """A restore into another folder, another bucket: the names are the same."""
    name = _name(store)
    await store.put(name, PNG)
    for place in ("file:///var/before/images", "s3://before", "s3://before/a/b", "memory://"):
        assert await store.get(f"{place}/{name}") == PNG


def test_a_name_hides_the_account_and_holds_the_attempt(store: ImageStore) -> None:
    name = _name(store, attempt=3, index=1)
    assert name.startswith("images/")
    assert name.endswith("/2026/11/21/gen_x/a3-1.png")
    assert "acct_x" not in name
    assert store.object_name("acct_y", "gen_x", 3, 1, WHEN) != name


async def test_an_address_opens_the_image(store: ImageStore) -> None:
    uri = await store.put(_name(store), PNG)
    url = store.url(uri, base_url="http://localhost:8000/")
    parts = urlsplit(url)
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    if uri.startswith("s3://"):
        for form in ImageFormat:
            url = store.url(await store.put(_name(store, form=form), PNG), base_url="")
            answer = await asyncio.to_thread(urllib.request.urlopen, url)
            assert (answer.read(), answer.headers["content-type"]) == (PNG, form.media_type)
        return
    assert url.startswith("http://localhost:8000/files/images/")
    assert store.verify(parts.path.removeprefix("/files/"), query["exp"], query["kid"], query["sig"])


async def test_customers_reach_a_bucket_by_an_endpoint_of_their_own_or_through_the_service(s3: dict[str, Any]) -> None:
    """The host is part of what is signed: moto answers here by another name than it has for the service."""
    theirs = s3["client_kwargs"]["endpoint_url"].replace("127.0.0.1", "localhost")

    def opened(endpoint: str, options: dict[str, Any] = s3) -> ImageStore:
        return ImageStore(Settings(storage_url="s3://pictures/two", storage_options=options, image_endpoint=endpoint))

    uri = await opened("").put(_name(opened("")), PNG)
    address = opened(theirs).url(uri, base_url="")
    assert address.startswith(f"{theirs}/pictures/two/images/")
    at_the_top = {"key": "test", "secret": "test", "endpoint_url": s3["client_kwargs"]["endpoint_url"]}
    assert opened(theirs, at_the_top).url(uri, base_url="").startswith(f"{theirs}/pictures/two/images/")
    assert (await asyncio.to_thread(urllib.request.urlopen, address)).read() == PNG
    assert opened("service").url(uri, base_url="http://x").startswith("http://x/files/images/")
    assert await opened("service").get(uri) == PNG


@pytest.fixture
def local(tmp_path: Path) -> ImageStore:
    return ImageStore(Settings(data_dir=tmp_path, redis_url="unix:///unused"))


def _signed(store: ImageStore) -> tuple[str, str, str, str]:
    parts = urlsplit(store.url(store.uri(_name(store)), base_url="http://h"))
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return parts.path.removeprefix("/files/"), query["exp"], query["kid"], query["sig"]


def test_an_address_with_any_character_changed_does_not_open(local: ImageStore) -> None:
    good = _signed(local)
    assert local.verify(*good)
    for part in range(4):
        for place, letter in enumerate(good[part]):
            spoiled = list(good)
            spoiled[part] = good[part][:place] + ("1" if letter != "1" else "2") + good[part][place + 1 :]
            assert not local.verify(*spoiled), spoiled
    for odd in ("", "é", "٣", "-1", "1e9", " 1", "9" * 5000):
        assert not local.verify(good[0], odd, good[2], good[3])
        assert not local.verify(good[0], good[1], odd, good[3])
        assert not local.verify(good[0], good[1], good[2], odd)


def test_an_address_ends(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, redis_url="unix:///unused")
    over = ImageStore(settings.model_copy(update={"image_url_life": timedelta(seconds=-2)}))
    assert not over.verify(*_signed(over))


def test_an_old_key_verifies_while_it_is_kept(tmp_path: Path) -> None:
    def store(**keys: str) -> ImageStore:
        return ImageStore(Settings(data_dir=tmp_path, redis_url="unix:///unused", signing_keys=keys))  # pyright: ignore[reportArgumentType]

    old, new = {"old": "o" * 16}, {"new": "n" * 16}
    signed = _signed(store(**old))
    assert store(**new, **old).verify(*signed)
    assert not store(**new).verify(*signed)
    assert _signed(store(**new, **old))[2] == "new"


async def test_a_reader_never_sees_half_an_image(local: ImageStore) -> None:
    uri = await local.put(_name(local), PNG)
    path, stop, seen = Path(uri.removeprefix("file://")), threading.Event(), set[int]()

    def read() -> None:
        while not stop.is_set():
            seen.add(len(path.read_bytes()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        await local.put(_name(local), PNG)
    stop.set()
    reader.join()
    assert seen == {len(PNG)}
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no draft is left


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_directory_that_refuses_is_an_outage(local: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir(mode=0o500)
    with pytest.raises(StoreUnavailable):
        await local.put(_name(local), PNG)


async def test_a_full_or_broken_disk_is_an_outage(local: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file where the folder should be")
    with pytest.raises(StoreUnavailable, match="write"):
        await local.put(_name(local), PNG)


@pytest.mark.slow
async def test_a_cloud_that_cannot_be_reached_is_an_outage(tmp_path: Path) -> None:
    options = {
        "key": "x",
        "secret": "x",
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1},
    }
    store = ImageStore(
        Settings(data_dir=tmp_path, redis_url="unix:///unused", storage_url="s3://pictures", storage_options=options)
    )
    with pytest.raises(StoreUnavailable):
        await store.put(_name(store), PNG)
