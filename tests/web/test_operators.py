"""The operators' pages: who gets in, and what they do there."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from serve_app.accounts.sessions import Holder
from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor, operator
from serve_app.domain.errors import FailureCode, NotFound
from serve_app.domain.jobs import Failure, JobKind
from serve_app.operations.store_checks import check_catalog
from serve_app.store.keys import redis_key
from tests.api.app import Member, TestService
from tests.composition import Resources
from tests.support import adapter_id, adapter_of, existing, memory_limit, put_in_group
from tests.web.browser import ORIGIN, Browser, Form, Page
from tests.web.conftest import PASSWORD, Browsers

PAGES = ("", "live", "accounts", "failures", "models", "audit", "checks")
HOSTILE = "<script>alert(1)</script>\"'"


@pytest.fixture
async def alice(browsers: Browsers, resources: Resources) -> Browser:
    """A browser in which the operator alice has signed in."""
    await resources.operators.create("alice", password=PASSWORD)
    browser = browsers.new()
    assert (await sign_in(browser, "alice", PASSWORD)).answer.url.path == "/operators/"
    return browser


async def sign_in(browser: Browser, name: str, password: str) -> Page:
    return await browser.press("/operators/sign-in", "Sign in", name=name, password=password)


async def fail(service: TestService, member: Member, code: FailureCode, prompt: str = "a tree") -> str:
    job_id = await service.submit(member, prompt=prompt)
    lease = await service.lease(job_id)
    await service.resources.queue.fail(lease, Failure(code=code, message="the brush broke"), retry=False)
    return job_id


async def test_every_page_opens_for_an_operator_alone(
    alice: Browser, browser: Browser, browsers: Browsers, resources: Resources
) -> None:
    """`browser` is a customer's, signed in to the console."""
    for path in PAGES:
        assert (await alice.open(f"/operators/{path}")).status == 200, path
        for other in (browser, browsers.new()):
            assert (await other.open(f"/operators/{path}")).answer.url.path == "/operators/sign-in", path
    assert (await alice.open("/console/settings")).answer.url.path == "/console/sign-in"


async def test_one_session_is_none_of_the_others(
    alice: Browser, browser: Browser, resources: Resources, owner: Account
) -> None:
    """The token of one opens nothing as the cookie of the other, even where an operator has an account's id as name."""
    await resources.operators.create(owner.id)
    mine, theirs = alice.http.cookies["atelier_operator"], browser.http.cookies["atelier_session"]
    alice.http.cookies.set("atelier_operator", theirs, path="/operators")
    alice.http.cookies.delete("atelier_operator", domain="service.test")
    assert (await alice.open("/operators/")).answer.url.path == "/operators/sign-in"
    browser.http.cookies.delete("atelier_session")
    browser.http.cookies.set("atelier_session", mine)
    assert (await browser.open("/console/settings")).answer.url.path == "/console/sign-in"


async def test_the_cookie_goes_to_the_operators_pages_alone(browsers: Browsers, resources: Resources) -> None:
    await resources.operators.create("alice", password=PASSWORD)
    browser = browsers.new(origin="https://service.test")
    browser.http.follow_redirects = False
    page = await sign_in(browser, "alice", PASSWORD)
    [line] = [
        line for line in page.answer.headers.get_list("set-cookie") if line.startswith("__Secure-atelier_operator=")
    ]
    assert {"HttpOnly", "Path=/operators", "SameSite=strict", "Secure"} <= set(line.split("; "))
    assert "default-src 'none'" in page.answer.headers["Content-Security-Policy"]
    assert page.answer.headers["Cache-Control"] == "no-store"


async def test_a_wrong_password_is_recorded_and_then_has_to_wait(browsers: Browsers, resources: Resources) -> None:
    await resources.operators.create("alice", password=PASSWORD)
    browser = browsers.new()
    answers = [(await sign_in(browser, "alice", "wrong")).status for _ in range(6)]
    assert answers == [403] * 5 + [429]
    assert (await sign_in(browser, "alice", PASSWORD)).status == 429, "the right one waits, too"
    assert [row.act for row in await resources.audit.rows(operator("alice"))] == [Act.SIGN_IN_FAILED] * 5
    await sign_in(browsers.new(), PASSWORD, "a password in the wrong field")
    assert len(await resources.audit.rows()) == 5


async def test_a_link_lets_a_new_operator_choose_a_password_once(browsers: Browsers, resources: Resources) -> None:
    await resources.operators.create("bob")
    path = f"/operators/links/{await resources.operator_links.create('bob', LinkPurpose.NEW_PASSWORD)}"
    browser = browsers.new()
    page = await browser.press(path, "Set password and sign in", new_password=PASSWORD, new_password_again=PASSWORD)
    assert page.answer.url.path == "/operators/"
    gone = await browsers.new().open(path)
    assert (gone.status, "This link has been used" in gone.text) == (404, True)
    assert (await browsers.new().open(path.replace("/operators/", "/console/"))).status == 404
    assert (await sign_in(browsers.new(), "bob", PASSWORD)).status == 200


async def test_a_link_for_an_operator_opens_no_account_nor_the_reverse(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    """This holds even for an operator whose name is an account's id."""
    await resources.operators.create(owner.id)
    links = {"operators": resources.operator_links, "console": resources.sign_in_links}
    tokens = {site: await made.create(owner.id, LinkPurpose.SIGN_IN) for site, made in links.items()}
    opened = {
        (site, at): (await browsers.new().open(f"/{at}/links/{token}")).status
        for site, token in tokens.items()
        for at in links
    }
    assert {pair for pair, status in opened.items() if status == 200} == {("operators",) * 2, ("console",) * 2}


async def test_a_session_ends_by_signing_out_and_with_its_operator(alice: Browser, resources: Resources) -> None:
    token = alice.http.cookies["atelier_operator"]
    await alice.press("/operators/", "Sign out")
    assert await resources.operator_sessions.get(token) is None
    await sign_in(alice, "alice", PASSWORD)
    await resources.operators.delete("alice")
    assert (await alice.open("/operators/")).answer.url.path == "/operators/sign-in"
    live = await alice.http.get("/operators/live", headers={"HX-Request": "true"})
    assert live.headers["HX-Redirect"] == "/operators/sign-in"


async def test_what_an_earlier_password_opened_is_closed(resources: Resources) -> None:
    """So is a session that is opened beside the change, or by an earlier operator of the same name."""
    sessions, operators, links = resources.operator_sessions, resources.operators, resources.operator_links
    await operators.create("alice", password=PASSWORD)
    shown = existing(await operators.check_password("alice", PASSWORD))
    credential_version = await operators.set_password("alice", f"x{PASSWORD}")
    assert await sessions.get(await sessions.create("alice", credential_version=shown.credential_version)) is None
    token, link = (
        await sessions.create("alice", credential_version=credential_version),
        await links.create("alice", LinkPurpose.SIGN_IN),
    )
    assert await sessions.get(token) == Holder("alice", "", credential_version)
    await operators.delete("alice")
    await operators.create("alice")
    assert await sessions.get(token) is None
    assert await links.get(link) is None
    await operators.delete("alice")
    with pytest.raises(NotFound):
        await operators.set_password("alice", PASSWORD)
    assert (await operators.create("alice")).has_password is False


async def test_the_live_page_does_not_keep_a_session_open(alice: Browser, redis_db: Any) -> None:
    [session] = redis_db.keys(redis_key("operator_session", "*"))
    redis_db.expire(session, 60)
    await alice.http.get("/operators/live")
    assert redis_db.ttl(session) <= 60
    await alice.open("/operators/accounts")
    assert redis_db.ttl(session) > 60


async def test_a_form_of_another_site_or_without_its_token_does_nothing(
    alice: Browser, resources: Resources, owner: Account
) -> None:
    form = (await alice.open(f"/operators/accounts/{owner.id}")).form("Disable account")
    for headers in ({}, {"Sec-Fetch-Site": "cross-site", "Origin": ORIGIN}, {"Origin": "http://evil.test"}):
        assert (await alice.http.post(form.action, data=form.fields, headers=headers)).status_code == 403
    plans = (await alice.open(f"/operators/accounts/{owner.id}")).form("Change plans")
    for token in ("", "0" * 64, plans.fields["form_token"]):
        assert (await alice.send(Form(form.action, {"form_token": token}))).status == 403
    account = existing(await resources.accounts.get(owner.id))
    assert not account.disabled


async def test_plans_access_and_links_of_an_account_change_and_are_recorded(
    alice: Browser, browser: Browser, resources: Resources, owner: Account, browsers: Browsers
) -> None:
    at = f"/operators/accounts/{owner.id}"
    page = await alice.send(
        (await alice.open("/operators/accounts?name=owner")).form("Change plans"), plan_a="enterprise", plan_b="premium"
    )
    assert "The plans are saved: enterprise on the bearer interface, premium" in page.text
    changed = existing(await resources.accounts.get(owner.id))
    assert (changed.plan_a, changed.plan_b) == ("enterprise", "premium")
    assert (await alice.send(page.form("Change plans"), plan_a="made up", plan_b="free")).status == 400
    made = await alice.press(at, "Make a link")
    [url] = [text for text in made.text.split() if "/console/links/" in text]
    assert (await browsers.new().open(url)).form("Set password and sign in")
    await alice.press(at, "Disable account")
    assert (await browser.open("/console/settings")).answer.url.path == "/console/sign-in"
    await alice.press(at, "Enable account")
    rows = [row for row in await resources.audit.rows(owner.id) if row.actor == operator("alice")]
    assert [row.act for row in rows] == [
        Act.PLANS_CHANGED,
        Act.SIGN_IN_LINK_MADE,
        Act.ACCOUNT_DISABLED,
        Act.ACCOUNT_ENABLED,
    ]
    assert all(row.address for row in rows)
    shown = await alice.open("/operators/audit?account=owner&act=account_disabled")
    assert "operator:alice" in shown.text
    assert "plans changed operator:alice" not in shown.text


async def test_failed_jobs_are_counted_by_code_requeued_and_dropped(
    alice: Browser, service: TestService, member: Member
) -> None:
    first = await fail(service, member, FailureCode.GENERATION_FAILED)
    second = await fail(service, member, FailureCode.OUT_OF_MEMORY)
    third = await fail(service, member, FailureCode.OUT_OF_MEMORY)
    page = await alice.open("/operators/failures")
    assert "1 generation_failed" in page.text
    assert "2 out_of_memory" in page.text
    page = await alice.open(f"/operators/failures?code=out_of_memory&account={member.account.name}&window=hour")
    assert first[:12] not in page.text
    page = await alice.send(page.form("Requeue all"))
    assert "2 jobs queued again" in page.text
    page = await alice.press("/operators/failures", "Drop")
    assert "1 job dropped" in page.text
    assert await service.resources.dead_letters.list() == []
    states = {job.id: job.state for job in await service.resources.job_history.list(member.account.id)}
    assert states == {first: "failed", second: "queued", third: "queued"}
    acts = [(row.act, row.subject) for row in await service.resources.audit.rows(member.account.id)]
    assert {(Act.JOB_REQUEUED, second), (Act.JOB_REQUEUED, third), (Act.JOB_DROPPED, first)} <= set(acts)


async def test_delayed_jobs_and_those_that_must_run_alone_wait_by_account_as_they_do_by_plan(
    alice: Browser, service: TestService, resources: Resources, redis_db: Any
) -> None:
    made = [await resources.accounts.create(name, plan_a="enterprise") for name in ("back", "lost", "both")]
    back, lost, both = [Member(account, await service.key(account)) for account in made]
    for member in (back, both):
        lease = await service.lease(await service.submit(member))
        await resources.queue.release(lease, pause=timedelta(hours=1))
    job_id = (await service.lease(await service.submit(lost))).job_id
    redis_db.hset(redis_key("job", job_id), "losses", 1)
    redis_db.zadd(redis_key("lease", JobKind.GENERATION), {job_id: 1})
    await resources.queue.reap()
    assert redis_db.zrange(redis_key("quarantine", JobKind.GENERATION), 0, -1) == [job_id]
    await service.submit(both)
    reader = resources.operator_reader
    rows = await reader.queues(JobKind.GENERATION, 9)
    assert {row.account_id: row.waiting for row in rows} == {
        back.account.id: 1,
        lost.account.id: 1,
        both.account.id: 2,
    }
    assert sum(each.jobs for each in (await resources.queue_stats.waiting(["a:enterprise"])).values()) == 4
    assert [row.account_id for row in await reader.queues(JobKind.GENERATION, 1)] == [rows[0].account_id]
    assert {"back", "lost", "both"} <= set((await alice.open("/operators/")).text.split())


async def test_prompts_are_shown_of_running_and_failed_jobs_alone(
    alice: Browser, service: TestService, member: Member
) -> None:
    jobs = {name: await service.submit(member, prompt="a secret island") for name in ("running", "done")}
    await service.lease(jobs["running"])
    await service.complete(jobs["done"])
    jobs["failed"] = await fail(service, member, FailureCode.GENERATION_FAILED, prompt="a secret island")
    jobs["waiting"] = await service.submit(member, prompt="a secret island")
    shown = {name: "a secret island" in (await alice.open(f"/operators/jobs/{job}")).text for name, job in jobs.items()}
    assert shown == {"running": True, "done": False, "waiting": False, "failed": True}


async def test_what_customers_write_is_escaped_on_every_page(
    alice: Browser, service: TestService, resources: Resources
) -> None:
    account = await resources.accounts.create(HOSTILE, plan_a="enterprise")
    member = Member(account, await service.key(account))
    job_id = await fail(service, member, FailureCode.GENERATION_FAILED, prompt=HOSTILE)
    running = await service.submit(member, prompt=HOSTILE)
    await service.lease(running)
    await service.submit(member)
    adapter = existing(await resources.catalog.adapter(adapter_id("outline")))
    await resources.adapter_registry.register(
        replace(adapter, id="model_hostile", name=HOSTILE, owner=account.id, created_at=datetime.now(UTC))
    )
    await resources.audit.record(account.id, Act.KEY_CREATED, Actor("owner"), HOSTILE)
    for path in (
        *PAGES[:-1],
        f"accounts/{account.id}",
        f"jobs/{job_id}",
        f"jobs/{running}",
        f"failures?account={HOSTILE}",
    ):
        page = await alice.open(f"/operators/{path}")
        assert page.status == 200, path
        assert "<script>alert" not in page.answer.text, path
        assert "&lt;script&gt;" in page.answer.text, path


async def test_the_audit_log_pages_through_all_accounts_newest_first(
    alice: Browser, resources: Resources, owner: Account
) -> None:
    other = await resources.accounts.create("other")
    for number in range(60):
        await resources.audit.record((owner, other)[number % 2].id, Act.KEY_CREATED, Actor("x"), f"key_{number:03}")
    page = await alice.open("/operators/audit?act=key_created")
    newest = subjects(page)
    [older] = [link for link in page.links if "before=" in link]
    listed = newest + subjects(await alice.open(older))
    assert len(newest) >= 50
    assert sorted(listed) == [f"key_{number:03}" for number in range(60)], "each once"
    for log in (0, 1):  # rows of two logs may have been written in one millisecond
        of_one = [subject for subject in listed if int(subject[4:]) % 2 == log]
        assert of_one == sorted(of_one, reverse=True)


def subjects(page: Page) -> list[str]:
    return [word for word in page.text.split() if word.startswith("key_")]


async def test_a_base_model_and_a_lora_show_where_they_are_loaded(
    alice: Browser, service: TestService, member: Member, redis_db: Any
) -> None:
    resources, lora = service.resources, adapter_id("outline")
    await service.complete(await service.submit(member, lora_id=lora))
    await resources.measures.show(
        JobKind.GENERATION, "tests", {"runs": 1, "runs_limit": 8}, base_models=["pocket"], loras=[lora]
    )
    page = await alice.open("/operators/models")
    assert "loaded by 1 of 1 worker" in page.text
    assert "sdxl" not in page.text
    assert "in memory of 1 worker" in page.text
    page = await alice.open("/operators/")
    assert "1 of 8" in page.text
    assert " free, 537 MB in reserve" in page.text
    assert "the last, or the first account, is" in page.text, "a copy of Redis"
    assert "new jobs are refused" not in page.text
    redis_db.setrange("filler", 2**25, "x")  # beside it the buffers of other connections are few
    with memory_limit(redis_db, int(redis_db.info("memory")["used_memory"] * 1.05)):
        assert "new jobs are refused" in (await alice.open("/operators/")).text


async def test_each_group_of_base_models_has_its_numbers(
    alice: Browser, service: TestService, member: Member, browser: Browser, redis_db: Any
) -> None:
    """A job that has waited for minutes without a worker is marked, and its owner reads why it waits."""
    resources = service.resources
    own = await resources.adapter_registry.register(adapter_of(member.account.id, name="Own"))
    await resources.adapter_grants.grant(own.lora_id, (await resources.accounts.create("friend")).id)
    assert "its owner, 1 by a grant" in (await alice.open("/operators/models")).text
    put_in_group(resources.settings.catalog, "sdxl")
    await resources.applied_catalog.apply_file()
    await resources.workers.note_failure("generation.sdxl", "no space on the card")
    job_id = await service.submit(member, lora_id=adapter_id("outline"))
    redis_db.hincrby(redis_key("job", job_id), "created", -240_000)
    redis_db.zincrby(redis_key("age", "generation.sdxl"), -240_000, job_id)
    assert "no generator has answered for 4 min" in (await browser.open(f"/console/playground/{job_id}")).text
    page = await alice.open("/operators/models")
    assert "pocket sdxl" in page.text
    assert "no worker is running" in page.text
    assert "The last generator of the group sdxl that tried could not start: no space on the card" in page.text
    page = await alice.open("/operators/")
    assert "1 generations (sdxl) waiting" in page.text
    assert "of work; no generator answers" in page.text
    assert "Generator sdxl" in page.text
    assert "cannot start: no space on the card" in page.text
    await resources.workers.note_progress("generation.sdxl", "loading pocket: 3.1 of 6.9 GB")
    page = await alice.open("/operators/")
    assert "A worker starts generation.sdxl : loading pocket: 3.1 of 6.9 GB" in page.text
    await resources.workers.note_failure(JobKind.UPSCALE, "MemoryError: 2 GB")
    page = await alice.open("/operators/")
    assert "The last upscaler that tried could not start: MemoryError: 2 GB" in page.text
    assert [row.account_id for row in await resources.operator_reader.queues("generation.sdxl", 9)] == [
        member.account.id
    ]


async def test_the_checks_run_on_a_button(alice: Browser, resources: Resources) -> None:
    page = await alice.press("/operators/checks", "Check now")
    assert "written, read, deleted" in page.text
    assert "adapters read and checked" in page.text
    *_, weights = await check_catalog(resources.settings, limit=None, weights_within=timedelta(0))
    assert weights.found.startswith("0 of 9 "), "a person does not wait for many large files"
