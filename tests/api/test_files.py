"""Image addresses: whoever holds one may open it, and any other address is a plain 404."""

import httpx
import pytest

from tests.api.app import Member, TestService, open_service, refused
from tests.support import png_of, wait_until


@pytest.fixture
async def url(service: TestService, member: Member) -> httpx.URL:
    job = await service.complete(await service.submit(member))
    answer = await service.client.get(f"/v1/generate/{job.id}", headers=member.a)
    return httpx.URL(answer.json()["images"][0]["url"])


async def test_an_image_opens_without_a_key(service: TestService, url: httpx.URL) -> None:
    answer = await service.client.get(url)
    assert answer.status_code == 200
    assert answer.content == png_of((512, 512))
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"].startswith("private, ")
    assert "sandbox" in answer.headers["content-security-policy"]
    assert "x-request-id" in answer.headers
    assert "x-ratelimit-limit" in answer.headers


async def test_head_returns_the_size(service: TestService, url: httpx.URL) -> None:
    answer = await service.client.head(url)
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(png_of((512, 512)))


CHANGES = {
    "no signature": {"sig": None},
    "an empty signature": {"sig": ""},
    "another signature": {"sig": "0" * 64},
    "a signature beyond ASCII": {"sig": "é" * 64},
    "no expiry": {"exp": None},
    "another expiry": {"exp": "99999999999"},
    "an expiry in the past": {"exp": "1000000000"},
    "an expiry in words": {"exp": "tomorrow"},
    "a negative expiry": {"exp": "-1"},
    "an expiry of 5000 digits": {"exp": "9" * 5000},
    "an expiry in other digits": {"exp": "١٢٣"},
    "no key id": {"kid": None},
    "another key id": {"kid": "other"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
async def test_a_changed_address_is_not_found(
    service: TestService, url: httpx.URL, change: dict[str, str | None]
) -> None:
    params = {name: value for name, value in (dict(url.params) | change).items() if value is not None}
    refused(await service.client.get(url.copy_with(params=params)), 404, "not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/files/",
        "/files/x",
        "/files/..%2f..%2fsecrets.json",
        "/files/images%00",
        "/files/images/../secrets.json",
        "/files//etc/passwd",
        "/files/%ff",
    ],
)
async def test_no_other_file_opens(service: TestService, url: httpx.URL, path: str) -> None:
    refused(await service.client.get(f"http://service.test{path}?{url.query.decode()}"), 404, "not_found")


async def test_a_signature_opens_its_own_image_only(service: TestService, member: Member, url: httpx.URL) -> None:
    other = await service.complete(await service.submit(member))
    answer = await service.client.get(f"/v1/generate/{other.id}", headers=member.a)
    second = httpx.URL(answer.json()["images"][0]["url"])
    assert second.path != url.path
    refused(await service.client.get(second.copy_with(query=url.query)), 404, "not_found")


async def test_an_image_that_is_gone_is_not_found(service: TestService, member: Member) -> None:
    job = await service.complete(await service.submit(member))
    answer = await service.client.get(f"/v1/generate/{job.id}", headers=member.a)
    await service.resources.images.delete(job.images[0].image_uri)
    refused(await service.client.get(answer.json()["images"][0]["url"]), 404, "not_found")


async def test_an_image_takes_no_other_method(service: TestService, url: httpx.URL) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = await service.client.request(method, url)
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("images.example", "http://images.example"),
        ("10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("evil.example/path?", "http://service.test"),
        ("a@b", "http://service.test"),
        ('"><script>', "http://service.test"),
    ],
)
async def test_the_address_begins_where_the_caller_reached_us(
    service: TestService, member: Member, host: str, expected: str
) -> None:
    job = await service.complete(await service.submit(member))
    for asked, begins in (("first.example", "http://first.example"), (host, expected)):
        answer = await service.client.get(f"/v1/generate/{job.id}", headers=member.a | {"Host": asked})
        assert answer.status_code == 200
        assert answer.json()["images"][0]["url"].startswith(f"{begins}/files/")


async def test_a_public_address_goes_before_the_caller_s(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with open_service(tmp_path_factory.mktemp("public"), public_url="https://cdn.example/atelier/") as public:
        member = await public.member()
        job = await public.complete(await public.submit(member))
        answer = await public.client.get(f"/v1/generate/{job.id}", headers=member.a)
        assert answer.json()["images"][0]["url"].startswith("https://cdn.example/atelier/files/images/")
        document = (await public.client.get("/openapi/a.json")).json()
        assert document["servers"] == [{"url": "https://cdn.example/atelier"}]


@pytest.mark.slow
@pytest.mark.parametrize("is_open_already", [False, True])
async def test_an_address_ends_when_its_account_is_disabled(
    service: TestService, member: Member, url: httpx.URL, is_open_already: bool
) -> None:
    if is_open_already:
        assert (await service.client.get(url)).status_code == 200
    await service.resources.accounts.set_disabled(member.account.id, True)

    async def has_ended() -> bool:
        return (await service.client.get(url)).status_code == 404

    await wait_until(has_ended, timeout=10)
    await service.resources.accounts.set_disabled(member.account.id, False)
    assert (await service.client.get(url)).status_code == 200
