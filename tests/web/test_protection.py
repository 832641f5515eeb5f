"""The console's protection against other sites, other sessions and browser defaults."""

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from serve_app.domain.accounts import Account
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from tests.api.app import Member
from tests.composition import Resources, open_resources
from tests.web.browser import ORIGIN, Browser, Form
from tests.web.conftest import PASSWORD, Browsers

FORM_PAGES = [
    ("/console/settings/api", "Generate API key"),
    ("/console/settings/api-keys", "Create new API key"),
    ("/console/settings", "Sign out"),
]


CROSS_SITE: list[dict[str, str]] = [
    {},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "cross-site", "Origin": ORIGIN},
    {"Origin": "http://evil.test"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://service.test.evil.test"},
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "button"), FORM_PAGES)
async def test_a_post_that_another_site_sends_or_without_the_forms_token_is_refused(
    browser: Browser, resources: Resources, owner: Account, path: str, button: str
) -> None:
    form = (await browser.open(path)).form(button)
    for headers in CROSS_SITE:
        answer = await browser.http.post(form.action, data=form.fields, headers=headers)
        assert answer.status_code == 403, headers
    for token in ("", ".", "x.", "x", "0" * 64, "ü.ü", None):
        fields = {} if token is None else {"form_token": token}
        assert (await browser.send(Form(form.action, fields))).status == 403, token
    assert await resources.api_keys.list(owner.id) == []
    assert (await browser.open("/console/settings")).answer.url.path == "/console/settings", "still signed in"


@pytest.mark.slow
async def test_over_plain_http_the_origin_is_enough(browser: Browser) -> None:
    form = (await browser.open("/console/settings/api")).form("Generate API key")
    answer = await browser.http.post(form.action, data=form.fields, headers={"Origin": ORIGIN})
    assert answer.status_code == 200


@pytest.mark.slow
async def test_a_token_of_another_session_or_another_form_is_refused(
    browser: Browser, browsers: Browsers, owner: Account
) -> None:
    other = await browsers.signed_in()
    mine = (await browser.open("/console/settings/api")).form("Generate API key")
    theirs = (await other.open("/console/settings/api")).form("Generate API key")
    sign_out = (await browser.open("/console/settings")).form("Sign out")
    for stolen in (theirs.fields, sign_out.fields):
        assert (await browser.send(replace(mine, fields=stolen))).status == 403
    made = await browser.send(mine)
    revoke, sign_out = made.form("Revoke this key"), made.form("Sign out")
    assert (await browser.send(replace(revoke, fields=sign_out.fields))).status == 403
    assert (await browser.send(replace(sign_out, fields=revoke.fields))).status == 403


async def test_a_sign_in_form_of_another_browser_is_refused(browsers: Browsers, owner: Account) -> None:
    """Otherwise a site could sign a browser in to an account of its own choosing."""
    attacker, victim = browsers.new(), browsers.new()
    form = (await attacker.open("/console/sign-in")).form("Sign in")
    await victim.open("/console/sign-in")
    page = await victim.send(form, name="owner", password=PASSWORD)
    assert page.status == 403
    assert "atelier_session" not in victim.http.cookies


@pytest.mark.slow
async def test_every_answer_carries_the_headers(
    browser: Browser, browsers: Browsers, owner: Account, redis_db: redis.Redis
) -> None:
    anonymous = browsers.new()
    spoiled = await browsers.signed_in()
    answers = [
        (await browser.open("/console/settings")).answer,
        (await browser.open("/console/settings/api")).answer,
        (await anonymous.open("/console/sign-in")).answer,
        (await anonymous.open("/console/nowhere")).answer,
        (await anonymous.http.get("/static/site.css")),
        (await anonymous.http.put("/console/settings")),
        (await anonymous.http.put("/console/settings", headers={"Origin": ORIGIN})),
        (await anonymous.http.post("/console/sign-in")),
        (await anonymous.http.post("/console/sign-in", content=b"x" * 100_000, headers={"Origin": ORIGIN})),
    ]
    redis_db.set(redis_key("keys", owner.id), "not what it should be")
    answers.append((await spoiled.open("/console/settings/api")).answer)
    assert {answer.status_code for answer in answers} >= {200, 403, 404, 405, 413, 500}
    for answer in answers:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        is_static = answer.url.path.startswith("/static/")
        assert answer.headers["Cache-Control"] == ("no-cache" if is_static else "no-store")


async def test_pages_and_static_files_are_compressed_and_no_answer_of_the_api(browser: Browser, member: Member) -> None:
    """A page that repeats what it was asked for has another token each time, and each of them works."""
    opened = [await browser.open("/console/playground?prompt=a+boat") for _ in range(2)]
    tokens = {page.form("Generate").fields["form_token"] for page in opened}
    assert len(tokens) == 2
    for token in tokens:
        assert (await browser.press("/console/playground", "Generate", prompt="a boat", form_token=token)).status == 200
    packed = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    for path in (
        "/console/playground",
        "/",
        "/docs/jobs",
        "/openapi/a.json",
        "/static/site.css",
        "/docs/static/reference.js",
    ):
        answer = await browser.http.get(path)
        assert {name: answer.headers.get(name) for name in packed} == packed, path
        plain = await browser.http.get(path, headers={"Accept-Encoding": "gzip;q=0"})
        assert "content-encoding" not in plain.headers, path
        assert len(answer.text) == len(plain.text), path
        if "static" in path:
            assert len(answer.headers.get_list("content-length")) == 1
            assert plain.headers["etag"] == answer.headers["etag"]
            again = await browser.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
    listed = await browser.http.get("/v1/loras", headers=member.a)
    assert (listed.status_code, len(listed.content) > 1_000, "content-encoding" in listed.headers) == (200, True, False)


@pytest.mark.slow
async def test_with_the_store_gone_the_console_says_so(tmp_path: Path, settings: Settings) -> None:
    gone = settings.model_copy(update={"redis_url": f"unix://{tmp_path}/nothing.sock"})
    async with open_resources(gone) as resources:
        browser = Browser(resources.app())
        signing_in = await browser.sign_in("owner", PASSWORD)
        browser.http.cookies.set("atelier_session", "anything")
        signed_in = await browser.open("/console/settings")
        await browser.aclose()
    for page in (signing_in, signed_in):
        assert page.status == 503
        assert page.answer.headers["Retry-After"] == "5"
        assert "Content-Security-Policy" in page.answer.headers


async def test_behind_a_proxy_the_public_address_is_the_origin(resources: Resources, owner: Account) -> None:
    public = resources.with_parts(settings=resources.settings.model_copy(update={"public_url": "https://art.example"}))
    browser = Browser(public.app(), origin="https://10.0.0.5")
    page = await browser.open("/console/sign-in")
    form = page.form("Sign in")
    fields = {**form.fields, "name": "owner", "password": PASSWORD}
    answer = await browser.http.post(form.action, data=fields, headers={"Origin": "https://art.example"})
    assert answer.url.path == "/console/settings"
    made = await browser.press("/console/settings/api", "Generate API key")
    assert "curl https://art.example/v1/generate" in made.text
    await browser.aclose()
