"""The guide is built of all documents, and is read, searched and fetched by anybody, under a strict policy."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from playwright.async_api import BrowserContext, expect
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from serve_app.web.guide import Guide
from tests.browser.checks import findings
from tests.browser.site import Site
from tests.support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser"), pytest.mark.timeout(180)]

OF_THE_THEME = ("empty-table-header", "heading-order", "landmark-unique", "region")
"""Zensical's theme breaks these rules of axe-core, of which none is serious."""


@pytest.fixture(scope="module")
def guide(site: Site) -> str:
    """The address of the guide, which make builds here where it is not yet, or is older than a document."""
    subprocess.run(["make", "--silent", "--old-file=setup", "guide"], cwd=ROOT, check=True)
    return f"{site.base_url}/guide/"


@pytest.fixture
def client(guide: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guide) as client:
        yield client


def test_every_document_is_in_the_navigation_with_its_markdown(client: httpx.Client) -> None:
    pages = re.findall(r"^- \[.+\]\((.+?)\): .{10}", client.get("llms.txt").text, re.MULTILINE)
    documents = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert documents < set(pages), "zensical.toml names every page"
    for page in pages:
        address = re.sub(r"(^|/)(index|README)$", r"\1", page.removesuffix(".md"))
        shown, text = client.get(f"{address}/".removeprefix("/").replace("//", "/")), client.get(page)
        assert (shown.status_code, text.status_code) == (200, 200), page
        assert text.headers["content-type"] == "text/markdown; charset=utf-8"
        assert text.text.startswith("# ")


def test_files_are_sent_as_browsers_and_proxies_want_them(client: httpx.Client) -> None:
    page = client.get("")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (page.headers["content-encoding"], page.headers["vary"]) == ("gzip", "Accept-Encoding")
    for accepted in ("identity", "br, gzip;q=0", "gzip ; q=0.0,br"):
        plain = client.get("", headers={"Accept-Encoding": accepted})
        assert ("content-encoding" in plain.headers, plain.text == page.text) == (False, True), accepted
    assert client.get("", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    head = client.head("")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", page.headers["etag"])
    [script] = re.findall(r'src="\./(assets/javascripts/bundle[^"]+)"', page.text)
    kept = {address: client.get(address).headers["cache-control"] for address in ("", script, f"{script[:-3]}x.js")}
    assert list(kept.values()) == ["no-cache", "public, max-age=31536000, immutable", "no-cache"]
    folder = client.get("integrate?h=seed")
    assert (folder.is_redirect, folder.headers["location"]) == (True, "/guide/integrate/?h=seed")
    missing = client.get("nothing-here")
    assert (missing.status_code, "md-search" in missing.text, missing.headers["content-security-policy"]) == (
        404, True, policy,
    )  # fmt: skip
    assert client.get("..%2f__init__.py").status_code == 404
    assert f"({client.base_url}llms.txt)" in client.get("../llms.txt").text


def test_all_that_a_page_names_is_there_behind_a_prefix_too(guide: str) -> None:
    client = TestClient(Starlette(routes=[Mount("/guide", Guide())]), root_path="/studio")
    for path, status in (("a/b/c", 404), ("integrate/", 200)):
        page = client.get(f"/studio/guide/{path}")
        named = set(re.findall(r'(?:href|src)="([^"#:]+)', page.text))
        files = {each for each in (urljoin(f"/studio/guide/{path}", each) for each in named) if "/guide/" in each}
        assert (page.status_code, len(files) > 20) == (status, True)
        assert [each for each in files if client.get(each).status_code != 200] == []


def test_builds_wait_for_each_other_and_touch_no_other_folder(tmp_path: Path) -> None:
    build = (sys.executable, ROOT / "configs" / "guide" / "build.py")
    (tmp_path / ".atelier-guide-killed" / "old").mkdir(parents=True)
    at_once = [subprocess.Popen([*build, tmp_path / "guide"], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [each.wait(120) for each in at_once] == [0, 0]
    assert {each.name for each in tmp_path.iterdir()} == {"guide"}
    assert (tmp_path / "guide" / "integrate" / "index.html.gz").exists()
    done = subprocess.run([*build, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, "something else than a guide" in done.stderr, (tmp_path / "guide").exists()) == (
        1,
        True,
        True,
    )


async def test_a_reader_searches_and_finds_without_signing_in(context: BrowserContext, guide: str) -> None:
    """An error in the console, as of a script or style that the policy refuses, fails the test."""
    page = await context.new_page()
    elsewhere: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(guide) else elsewhere.append(request.url))
    found: list[str] = []
    for path in ("", "integrate/jobs/", "operate/settings/"):
        await page.goto(guide + path)
        found += await findings(page, without=OF_THE_THEME)
    await page.keyboard.press("Control+k")
    await expect(page.get_by_role("searchbox", name="Search")).to_be_focused()
    await page.keyboard.type("how do I repeat with an idempotency key")
    await page.get_by_role("link", name=re.compile("Retry safely")).first.click()
    await expect(page).to_have_url(re.compile("/guide/integrate/errors/"))
    assert (found, [url for url in elsewhere if not url.startswith("data:")]) == ([], [])


def test_a_service_without_a_built_guide_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="`make guide` builds it"):
        TestClient(Guide(tmp_path)).get("/")
