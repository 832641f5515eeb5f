"""The console shows LoRAs, and uploads, changes, shares and removes the account's own."""

import re
from typing import Any

import pytest

from serve_app.accounts.sign_in import Limit
from serve_app.domain.accounts import Account
from serve_app.domain.audit import OWNER, Act
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import JobKind
from serve_app.domain.requests import Variant
from serve_app.jobs.queue import new_nonce
from serve_app.web.console import lora_cards, loras
from tests.api.app import LORA, Member, TestService
from tests.composition import Resources
from tests.support import POCKET, adapter_id, adapter_of, existing
from tests.web.browser import Browser, Page
from tests.web.conftest import PASSWORD, Browsers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_layer_tables")]

FOUND = {"summary": "pocket, rank 8, attention, from diffusers", "rank": 8, "layers": 64, "targets": ["attention"]}


async def _own(resources: Resources, owner: Account, **fields: Any) -> Adapter:
    """Register a LoRA of the account, whose file is not looked at."""
    usual = {"description": "Thin lines.", "trigger_words": ("ink drawing",), "found": FOUND, "size_bytes": 2 << 20}
    adapter = adapter_of(owner.id, **{**usual, **fields})
    await resources.adapter_registry.register(adapter)
    return adapter


async def _upload(browser: Browser, file: bytes, *, token: str | None = None, **fields: str) -> Page:
    """Send the form as a browser does, with an empty file where none was chosen."""
    form = (await browser.open("/console/loras/new")).form("Upload and check")
    said = {"name": "Ink", "base_model": "pocket", "description": "", "trigger_words": "", **fields}
    data = {"form_token": form.fields["form_token"] if token is None else token, **said}
    files = {"file": ("ink.safetensors", file), "adapter_config": ("", b"")}
    headers = {"Sec-Fetch-Site": "same-origin"}
    return Page(await browser.http.post(form.action, data=data, files=files, headers=headers))


def _thumbnails(page: Page) -> list[str]:
    return [attributes["src"] for tag, attributes in page.tags if tag == "img" and "thumbnail" in attributes["src"]]


def _cards(page: Page) -> list[str]:
    """Return the names of the LoRAs that a form offers, in its order."""
    return re.findall(r'<span class="of">([^<]+)</span>\s*</label>', page.answer.text)


def _left(resources: Resources) -> int:
    folder = resources.settings.data_dir / "uploads"
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.mark.slow
async def test_an_uploaded_file_is_checked_described_and_used_at_once(
    browser: Browser, resources: Resources, service: TestService, member: Member
) -> None:
    outline = (POCKET / "loras" / "outline.safetensors").read_bytes()
    page = await _upload(browser, outline, trigger_words="ink drawing, paper")
    assert page.status == 200, page.text
    assert "The file matches its base model." in page.text
    assert "Found in the file: pocket, rank 8, attention and convolution, from diffusers." in page.text
    lora_id = page.answer.url.path.rpartition("/")[2]
    assert await service.submit(member, lora_id=lora_id)
    same = await _upload(browser, outline)
    assert (same.answer.url.path, "already has these weights" in same.text) == (page.answer.url.path, True)
    assert (Act.LORA_ADDED, OWNER) in {(row.act, row.actor) for row in await resources.audit.rows(member.account.id)}
    assert _left(resources) == 0


async def test_what_cannot_be_used_is_refused_in_words_and_what_was_typed_stays(
    browser: Browser, resources: Resources
) -> None:
    page = await _upload(browser, b"no tensors", name="My ink", base_model="other")
    assert page.status == 400
    assert "Base model: there is no base model 'other'." in page.text
    assert page.form("Upload and check").fields["name"] == "My ink"
    assert "The file was refused: is required" in (await _upload(browser, b"")).text
    zipped = await _upload(browser, b"PK\x03\x04" + b"0" * 100)
    assert "The file was refused: the file is a zip archive: unpack it, and send the safetensors" in zipped.text
    assert _left(resources) == 0


async def test_an_upload_needs_the_forms_token_and_the_consoles_own_page(
    browser: Browser, resources: Resources
) -> None:
    assert (await _upload(browser, b"no tensors", token="0" * 64)).status == 403
    answer = await browser.http.post(
        "/console/loras/new", headers={"Sec-Fetch-Site": "cross-site"}, files={"file": b"x"}
    )
    assert answer.status_code == 403
    assert _left(resources) == 0


async def test_uploads_and_shares_of_an_account_are_bounded(
    browser: Browser, resources: Resources, owner: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "TRIES", Limit("console-loras", 1, loras.TRIES.per))
    lora = await _own(resources, owner)
    form = (await browser.open(f"/console/loras/{lora.id}")).form("Share")
    assert "There is no such account." in (await browser.send(form, account="nobody")).text
    assert (await browser.send(form, account="nobody")).status == 429
    assert (await _upload(browser, b"no tensors")).status == 429


async def test_the_cards_say_whose_each_lora_is_and_show_a_picture_that_it_made(
    browser: Browser, service: TestService, member: Member
) -> None:
    other = await service.resources.accounts.create("zeta")
    mine = await _own(service.resources, member.account, name="Mine")
    theirs = await _own(service.resources, other, name="Theirs")
    await _own(service.resources, other, name="Secret")
    await service.resources.adapter_grants.grant(theirs.id, member.account.id)
    job = await service.complete(await service.submit(member))
    page = await browser.open("/console/loras")
    places = [
        page.text.index(words)
        for words in ("Yours", "Mine", "Shared with you", "Theirs", "Provided by this service", "Outline")
    ]
    assert places == sorted(places)
    assert "1 of 10 LoRAs, 2.1 MB of 2.1 GB" in page.text
    assert "rank 8 · “ink drawing”" in page.text
    assert "Secret" not in page.text
    assert "Theirs Thin lines. Shared by zeta pocket" in page.text
    assert _thumbnails(page) == [f"/console/history/{job.id}/{job.images[0].image_id}/thumbnail"]
    assert mine.id in page.text
    assert "/static/samples/neon.webp" in {attributes.get("src") for _, attributes in page.tags}


async def test_of_many_loras_a_page_shows_few_and_finds_the_others(
    browser: Browser, service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_cards, "MOST", 3)
    monkeypatch.setattr(loras, "MOST", 3)
    for number in range(4):
        await _own(service.resources, member.account, name=f"Ink {number}")
    await service.submit(member, lora_id=LORA)
    page = await browser.open("/console/loras")
    assert [f"Ink {number}" in page.text for number in range(4)] == [False, True, True, True], "the newest"
    page = await browser.open(next(link for link in page.links if link.endswith("page=2")))
    assert ("Ink 0" in page.text, "Ink 1" in page.text) == (True, False)
    assert "/console/loras" in page.links, "back to the first page"
    page = await browser.open("/console/loras?find=THIN+0")
    assert ("Ink 0" in page.text, "Ink 1" in page.text, "1 LoRA found" in page.text) == (True, False, True)
    assert "0 LoRAs found" in (await browser.open("/console/loras?find=%3Cscript%3E")).text

    page = await browser.open(f"/console/playground?lora_id={adapter_id('neon')}&prompt=a+boat")
    assert _cards(page) == ["Neon", "Outline", "Ink 3"], "the chosen, the last used, the newest"
    form = page.form("Generate")
    assert form.buttons == ["Find", "Generate"]
    form.fields = {"form_token": form.fields["form_token"], "prompt": "a red boat", "lora_id": adapter_id("neon")}
    form.action = "/console/playground/cards"
    page = await browser.send(form, find="ink 0")
    assert (_cards(page), "a red boat" in page.text) == (["Neon", "Ink 0"], True)
    assert "form_token" not in str(page.answer.url)
    assert "1 of 13 LoRAs match" in page.text
    part = await browser.open(f"/console/playground/cards?find=ink&lora_id={adapter_id('neon')}")
    assert (_cards(part), part.forms) == (["Neon", "Ink 3", "Ink 2"], [])
    part = await browser.open(f"/console/compare/cards?find=ink+1&lora:{LORA}=yes&lora:{adapter_id('neon')}=yes")
    assert _cards(part) == ["Outline", "Neon", "Ink 1"]
    form.action = "/console/compare/cards"
    form.fields = {"form_token": form.fields["form_token"], f"lora:{LORA}": "yes", "weights": "0.5"}
    assert _cards(await browser.send(form, find="ink 2")) == ["Outline", "Ink 2"]


async def test_a_lora_added_by_http_has_a_card_with_its_sample_however_old(
    browser: Browser, browsers: Browsers, service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample is drawn as an ordinary job; other LoRAs' jobs and removals do not hide it."""
    monkeypatch.setattr(loras, "RECENT", 1)
    said = {"name": "Ink", "base_model": "pocket", "trigger_words": "ink drawing"}
    file = (POCKET / "loras" / "outline.safetensors").read_bytes()
    added = await service.client.post("/v1/loras", headers=member.a, data=said, files={"file": file})
    assert added.status_code == 201, added.text
    assert not await service.resources.queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce()), "a worker is there"
    job_id = await service.resources.for_housekeeping.samples.draw_next()
    assert "No picture yet" in (await browser.open("/console/loras")).text
    await service.complete(job_id)
    await service.complete(await service.submit(member))
    address = f"/console/loras/{added.json()['id']}/sample"
    for path in ("/console/loras", "/console/playground", "/console/compare"):
        assert address in {attributes.get("src") for _, attributes in (await browser.open(path)).tags}, path
    assert (await browser.http.get(address)).headers["content-type"] == "image/webp"
    assert (await browser.http.get(f"/console/loras/{LORA}/sample")).status_code == 404
    other = browsers.new()
    zeta = await service.resources.accounts.create("zeta", password=PASSWORD)
    await other.sign_in(zeta.name, PASSWORD)
    assert (await other.http.get(address)).status_code == 404
    await service.resources.adapter_grants.grant(added.json()["id"], zeta.id)
    assert (await other.http.get(address)).content[:4] == b"RIFF", "whoever may use it may see what it draws"
    await service.resources.adapter_registry.remove(added.json()["id"])
    assert await service.resources.lora_samples.jobs([added.json()["id"]]) == {}


async def test_a_lora_of_another_is_not_found_and_one_that_is_shared_not_changed(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    mine, other = await _own(resources, owner), await resources.accounts.create("zeta")
    secret, shared = await _own(resources, other), await _own(resources, other)
    await resources.adapter_grants.grant(shared.id, owner.id)
    assert (await browser.open(f"/console/loras/{secret.id}")).status == 404
    page = await browser.open(f"/console/loras/{mine.id}")
    for lora_id in (secret.id, shared.id, LORA):
        for button in ("Save", "Share", "Delete for good"):
            form = page.form(button)
            form.action = form.action.replace(mine.id, lora_id)
            assert (await browser.send(form, account=owner.name)).status == 404
            form.action = form.action.replace(lora_id, mine.id)
    forms = [form for form in (await browser.open(f"/console/loras/{shared.id}")).forms if shared.id in form.action]
    assert forms == []
    assert {each.id for each in await resources.catalog.all()} >= {secret.id, shared.id, LORA}


async def test_a_lora_is_renamed_and_a_wrong_name_refused_in_words(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    lora = await _own(resources, owner)
    form = (await browser.open(f"/console/loras/{lora.id}")).form("Save")
    page = await browser.send(form, name="Ink 2", trigger_words=" a ,, b ")
    assert "The changes are saved." in page.text
    changed = existing(await resources.catalog.adapter(lora.id))
    assert (changed.name, changed.trigger_words, changed.description) == ("Ink 2", ("a", "b"), "Thin lines.")
    for wrong, words in (
        ({"name": " "}, "Name: must be 1 to 100"),
        ({"trigger_words": "x" * 65}, "Trigger words: must be at most 20"),
    ):
        refused = await browser.send(form, **wrong)
        assert (refused.status, words in refused.text) == (400, True)


async def test_a_lora_is_shared_by_name_and_no_more(
    browsers: Browsers, browser: Browser, resources: Resources, owner: Account
) -> None:
    lora = await _own(resources, owner)
    zeta = await resources.accounts.create("zeta", password=PASSWORD)
    page = await browser.press(f"/console/loras/{lora.id}", "Share", account="zeta")
    assert "The LoRA is shared." in page.text
    second = await browsers.signed_in(zeta.name)
    theirs = await second.open(f"/console/loras/{lora.id}")
    assert "Shared by owner" in theirs.text
    assert "1 other account can no longer use it" in page.text
    page = await browser.send(page.form("Stop"))
    assert "The LoRA is no longer shared." in page.text
    assert (await second.open(f"/console/loras/{lora.id}")).status == 404


async def test_the_page_shows_what_the_trainer_wrote_to_the_owner_alone(
    browsers: Browsers, browser: Browser, resources: Resources, owner: Account
) -> None:
    found = {
        **FOUND,
        "algorithm": "LoHa",
        "suggested_trigger_words": ["ink drawing", "inkwash", "<b>"],
        "metadata": {"ss_optimizer": "AdamW <script>", "modelspec.author": "someone"},
    }
    lora = await _own(resources, owner, found=found)
    page = await browser.open(f"/console/loras/{lora.id}")
    for words in ("Algorithm LoHa", "ss_optimizer AdamW <script>", "The file suggests: inkwash, <b>"):
        assert words in page.text
    zeta = await resources.accounts.create("zeta", password=PASSWORD)
    await resources.adapter_grants.grant(lora.id, zeta.id)
    second = await browsers.signed_in(zeta.name)
    theirs = await second.open(f"/console/loras/{lora.id}")
    assert ("Algorithm LoHa" in theirs.text, "ss_optimizer" in theirs.text) == (True, False)


async def test_no_form_of_a_lora_works_without_its_token(
    browser: Browser, resources: Resources, owner: Account
) -> None:
    lora, zeta = await _own(resources, owner), await resources.accounts.create("zeta")
    await resources.adapter_grants.grant(lora.id, zeta.id)
    page = await browser.open(f"/console/loras/{lora.id}")
    for button in ("Save", "Share", "Stop", "Delete for good"):
        form = page.form(button)
        other = next(each for each in page.forms if each.action != form.action and lora.id in each.action)
        for token in ("", "0" * 64, other.fields["form_token"]):
            assert (await browser.send(form, form_token=token, account=zeta.id)).status == 403, button


async def test_before_a_lora_is_deleted_the_page_says_what_uses_it(
    browser: Browser, service: TestService, member: Member
) -> None:
    lora = await _own(service.resources, member.account)
    await service.submit(member, lora_id=lora.id)
    other = await service.member(plan_a="basic", plan_b="basic")
    await service.resources.adapter_grants.grant(lora.id, other.account.id)
    for _ in range(2):
        await service.submit(other, lora_id=lora.id)
    await service.resources.api_keys.create(
        member.account.id, name="poster shop", interfaces=frozenset(Variant), adapters=frozenset({lora.id})
    )
    page = await browser.open(f"/console/loras/{lora.id}")
    for words in (
        "1 unfinished job of this account that uses it will fail.",
        "1 API key for this LoRA (poster shop) can no longer generate with it.",
        "2 waiting jobs of other accounts will fail.",
        "1 other account can no longer use it.",
    ):
        assert words in page.text
    page = await browser.send(page.form("Delete for good"))
    assert page.answer.url.path == "/console/loras"
    assert await service.resources.catalog.adapter(lora.id) is None
