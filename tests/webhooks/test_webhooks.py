"""Webhooks as a receiver sees them: a real one on this machine, which verifies with the library of Standard Webhooks."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiodns import DNSResolver
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from deployments.node_certificate import new_authority, write_certificate
from serve_app.api.jobs.records import job_record
from serve_app.domain.accounts import Scope
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import Variant
from serve_app.operations.housekeeping import reap_forever
from serve_app.webhooks import targets
from serve_app.webhooks.delivery import WebhookDelivery, pause_after
from serve_app.webhooks.endpoints import EVENTS
from serve_app.webhooks.targets import Targets, is_public
from tests.api.app import Member, TestService, open_service, refused
from tests.api.test_documents import document_of, validator
from tests.composition import Resources
from tests.faults.clock import by_the_callers_clock
from tests.made_jobs import ACCOUNT, accept
from tests.support import end_tasks, plain_redis, wait_until
from tests.webhooks.names import naming
from tests.webhooks.receiver import receiving

LOOPBACK = ("127.0.0.0/8",)


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestService]:
    """A service whose housekeeper runs."""
    folder = tmp_path_factory.mktemp("webhooks")
    public = "https://images.example"
    async with open_service(folder, webhook_networks=LOOPBACK, public_url=public) as opened:
        task = asyncio.create_task(reap_forever(opened.resources.for_housekeeping))
        yield opened
        await end_tasks([task])


@pytest.fixture
async def member(service: TestService) -> Member:
    return await service.member()


async def _create(service: TestService, member: Member, url: str, **more: Any) -> tuple[str, str]:
    answer = await service.client.post("/v1/webhooks", json={"url": url, **more}, headers=member.b)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], answer.json()["secret"]


async def _deliveries(service: TestService, member: Member, endpoint: str) -> list[dict[str, Any]]:
    answer = await service.client.get(f"/v1/webhooks/{endpoint}/deliveries", headers=member.a)
    assert answer.status_code == 200, answer.text
    return answer.json()["deliveries"]


def _delivery(resources: Resources, **more: Any) -> WebhookDelivery:
    return WebhookDelivery(
        resources.process.redis,
        resources.settings,
        jobs=resources.jobs,
        images=resources.images,
        record_of=job_record,
        **more,
    )


@asynccontextmanager
async def _delivering(delivery: WebhookDelivery) -> AsyncGenerator[None]:
    task = asyncio.create_task(delivery.deliver_forever())
    try:
        yield
    finally:
        await end_tasks([task])


async def test_a_receiver_verifies_the_end_of_a_job_and_opens_its_images(
    service: TestService, member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with receiving() as receiver:
        endpoint, secret = await _create(service, member, receiver.url("/account"))
        job = await service.complete(await service.submit(member))
        await wait_until(lambda: receiver.got)
        ((headers, body),) = receiver.of("/account")
        message = Webhook(secret).verify(body, headers)
        shown = (await service.client.get(f"/v1/jobs/{job.id}", headers=member.a)).json()
        assert message["type"] == "job.completed"
        assert message["data"] == shown
        document = await document_of(service, "jobs")
        documented = document["webhooks"]["jobEnded"]["post"]
        validator(document, documented["requestBody"]["content"]["application/json"]["schema"]).validate(message)
        assert {each["name"] for each in documented["parameters"]} < headers.keys()
        image = await service.client.get(shown["images"][0]["url"].removeprefix("https://images.example"))
        assert image.status_code == 200
        assert headers["webhook-id"] == f"msg_{job.id}_1"
        assert headers["host"] == f"127.0.0.1:{receiver.port}"
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(body.replace("completed", "failed"), headers)

        async def is_delivered() -> bool:
            return (await _deliveries(service, member, endpoint))[0]["status"] == "delivered"

        await wait_until(is_delivered)
        path = f"/v1/webhooks/{endpoint}/deliveries/{headers['webhook-id']}/redeliver"
        assert (await service.client.post(path, headers=member.a)).status_code == 200
        await wait_until(lambda: len(receiver.got) == 2)
        again = receiver.got[-1][1]
        assert again["webhook-id"] == headers["webhook-id"]
    assert "/account" not in caplog.text


async def test_a_job_has_a_webhook_of_its_own_and_both_secrets_sign_after_a_roll(
    service: TestService, member: Member
) -> None:
    async with receiving() as receiver:
        rolled = [await service.client.post("/v1/webhooks/jobs/secret", headers=member.a) for _ in range(2)]
        secrets = [answer.json()["secret"] for answer in rolled]
        _, others = await _create(service, member, receiver.url("/account"))
        asked = {"prompt": "a boat", "webhook_url": receiver.url("/own")}
        own = (await service.client.post("/v1/jobs", json=asked, headers=member.a)).json()["id"]
        await service.client.post(f"/v1/jobs/{own}/cancel", headers=member.a)
        await wait_until(lambda: len(receiver.got) == 2)
        ((headers, body),) = receiver.of("/own")
        for secret in secrets:
            assert Webhook(secret).verify(body, headers)["data"]["status"] == "canceled"
        assert receiver.of("/account")[0][0]["webhook-id"] == headers["webhook-id"]
        with pytest.raises(WebhookVerificationError):
            Webhook(others).verify(body, headers)
        assert "wh" not in (await service.client.get("/v1/webhooks/jobs/deliveries", headers=member.a)).text[:20]


async def test_an_endpoint_is_told_of_what_it_asked_for_can_be_changed_and_tested(
    service: TestService, member: Member
) -> None:
    async def cancel_one() -> str:
        job_id = await service.submit(member)
        await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
        return f"msg_{job_id}_1"

    async def change(endpoint: str, **fields: Any) -> dict[str, Any]:
        answer = await service.client.patch(f"/v1/webhooks/{endpoint}", json=fields, headers=member.a)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async with receiving() as receiver:
        chosen, secret = await _create(service, member, receiver.url("/chosen"), events=["job.failed", "job.expired"])
        every, _ = await _create(service, member, receiver.url("/every"))
        first = await cancel_one()
        await wait_until(lambda: receiver.got)
        changed = await change(chosen, events=["job.canceled"], url=receiver.url("/moved"))
        assert (changed["events"], changed["url"]) == (["job.canceled"], receiver.url("/moved"))
        assert (await change(every, enabled=False))["status"] == "disabled"
        second = await cancel_one()
        await wait_until(lambda: len(receiver.got) == 2)
        told = [(path, headers["webhook-id"]) for path, headers, _ in receiver.got]
        assert told == [("/every", first), ("/moved", second)]
        assert (await change(every, enabled=True))["events"] == list(EVENTS)
        assert (await change(chosen, enabled=False))["status"] == "disabled"
        receiver.answer, once = b"HTTP/1.1 503 Later\r\n\r\n", member.a | {"Idempotency-Key": "once"}
        for _ in range(2):
            waiting = await service.client.post(f"/v1/webhooks/{chosen}/test", headers=once)
            assert (waiting.status_code, waiting.json()["type"]) == (200, "webhook.test"), waiting.text

        async def is_settled() -> bool:
            row = next(each for each in await _deliveries(service, member, chosen) if "job_id" not in each)
            return (row["status"], row.get("response_status")) == ("failed", 503)

        await wait_until(is_settled)
        ((headers, body),) = [row[1:] for row in receiver.got[2:]]
        message = Webhook(secret).verify(body, headers)
        assert (message["type"], message["data"]) == ("webhook.test", {"id": chosen})
    for fields, said in {
        '{"events": ["job.begun"]}': "events: must be a list of job.completed or job.failed or job.canceled or ",
        '{"events": []}': "events: must be a list of",
        '{"enabled": "yes"}': "enabled: must be true or false",
        '{"url": "http://10.0.0.1/"}': "url: must begin with https://",
        '{"secret": "x"}': "secret: unknown field; the fields are url, events, enabled",
    }.items():
        answer = await service.client.patch(f"/v1/webhooks/{chosen}", content=fields, headers=member.a)
        refused(answer, 400, "invalid_parameter", said)
    acts = [row.act for row in await service.resources.audit.rows(member.account.id)]
    assert acts == ["webhook_added"] * 2 + ["webhook_changed"] * 4
    assert (await service.client.post("/v1/webhooks/jobs/secret", headers=member.a)).status_code == 200
    for path, whose in (("jobs", member), (chosen, await service.member())):
        answer = await service.client.patch(f"/v1/webhooks/{path}", json={"enabled": True}, headers=whose.a)
        refused(answer, 404, "not_found")
        refused(await service.client.post(f"/v1/webhooks/{path}/test", headers=whose.a), 404, "not_found")


async def test_a_webhook_is_made_once_for_its_idempotency_key(service: TestService, member: Member) -> None:
    async def create(url: str, whose: Member = member) -> httpx.Response:
        headers = whose.a | {"Idempotency-Key": "k1"}
        return await service.client.post("/v1/webhooks", json={"url": url}, headers=headers)

    first = await create("https://1.1.1.1/")
    again = await create("https://1.1.1.1/")
    assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    assert "idempotency-replayed" not in first.headers
    refused(await create("https://1.1.1.1/other"), 409, "idempotency_conflict")
    assert (await create("https://1.1.1.1/", await service.member())).json()["id"] != first.json()["id"]
    assert len((await service.client.get("/v1/webhooks", headers=member.a)).json()["webhooks"]) == 1


async def test_images_have_the_address_that_the_caller_knows_where_none_is_configured(tmp_path: Path) -> None:
    async with open_service(tmp_path, webhook_networks=LOOPBACK) as service, receiving() as receiver:
        member = await service.member()
        await _create(service, member, receiver.url("/account"))
        asked = {"prompt": "a boat", "webhook_url": receiver.url("/own")}
        await service.complete((await service.client.post("/v1/jobs", json=asked, headers=member.a)).json()["id"])
        async with _delivering(_delivery(service.resources)):
            await wait_until(lambda: len(receiver.got) == 2)
        for _, _, body in receiver.got:
            assert json.loads(body)["data"]["images"][0]["url"].startswith("http://service.test/files/")


async def test_what_an_endpoint_answers_decides_whether_it_is_told_again(service: TestService, member: Member) -> None:
    endings = {
        b"HTTP/1.1 503 Later\r\n\r\n": ("waiting", 503, "active"),
        b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n": ("waiting", 302, "active"),
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 9999: ("delivered", 200, "active"),
        b"SSH-2.0-nonsense\r\n\r\n": ("waiting", None, "active"),
        b"HTTP/1.1 410 Gone\r\n\r\n": ("failed", 410, "disabled"),
    }
    async with receiving() as receiver:
        endpoint, _ = await _create(service, member, receiver.url())
        for answer, (status, code, endpoint_status) in endings.items():
            receiver.answer, told = answer, len(receiver.got)
            job_id = await service.submit(member)
            await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
            await wait_until(lambda told=told: len(receiver.got) > told)

            async def settled(job_id: str = job_id) -> list[dict[str, Any]]:
                rows = await _deliveries(service, member, endpoint)
                return [row for row in rows if row["job_id"] == job_id and (row.keys() & {"error", "response_status"})]

            await wait_until(settled)
            (row,) = await settled()
            assert (row["status"], row.get("response_status")) == (status, code), row
            assert ("next_attempt_at" in row) == (status == "waiting")
            (shown,) = (await service.client.get("/v1/webhooks", headers=member.a)).json()["webhooks"]
            assert shown["status"] == endpoint_status
        assert not receiver.of("/elsewhere")
        path, (row, *_) = f"/v1/webhooks/{endpoint}", await _deliveries(service, member, endpoint)
        assert (await service.client.delete(path, headers=member.a)).status_code == 204
        for method, rest in (("DELETE", ""), ("GET", "/deliveries"), ("POST", f"/deliveries/{row['id']}/redeliver")):
            refused(await service.client.request(method, path + rest, headers=member.a), 404, "not_found")

        tomorrow = _delivery(service.resources, rewrite=by_the_callers_clock(timedelta(days=1)))
        with plain_redis(service.resources.redis_url) as redis:
            async with _delivering(tomorrow):
                await wait_until(lambda: not redis.keys(f"*webhook*{member.account.id}*"))


async def test_a_delivery_whose_housekeeper_died_before_it_noted_the_answer_is_made_again_with_its_id(
    tmp_path: Path,
) -> None:
    async with open_service(tmp_path, webhook_networks=LOOPBACK) as service, receiving() as receiver:
        receiver.is_silent = True
        member = await service.member()
        await _create(service, member, receiver.url())
        job_id = await service.submit(member)
        await service.client.post(f"/v1/jobs/{job_id}/cancel", headers=member.a)
        async with _delivering(_delivery(service.resources)):
            await wait_until(lambda: receiver.got)
        async with _delivering(_delivery(service.resources)):
            receiver.is_silent = False
            later = _delivery(service.resources, rewrite=by_the_callers_clock(timedelta(seconds=61)))
            assert len(receiver.got) == 1
            async with _delivering(later):
                await wait_until(lambda: len(receiver.got) == 2)
        assert len({headers["webhook-id"] for _, headers, _ in receiver.got}) == 1


@pytest.mark.parametrize("slow", ["receivers", "names"])
async def test_an_account_with_slow_receivers_or_silent_names_delays_no_other(
    tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RESOLVE_S", 15.0)
    names = {"slow.example": ["127.0.0.1"], "quick.example": ["127.0.0.1"]}
    async with (
        open_service(tmp_path, webhook_networks=LOOPBACK) as service,
        receiving(is_silent=True) as silent,
        receiving() as quick,
        naming(names) as server,
        _delivering(_delivery(service.resources, nameservers=[server.address])),
    ):

        async def end_jobs(account_id: str, *urls: str) -> None:
            for url in urls:
                job_id = await accept(service.resources, account_id, webhook=url)
                await service.resources.queue.cancel(job_id, account_id=account_id)

        def held() -> set[str]:
            return {path for path, *_ in silent.got} | {name for name in server.asked if name.endswith(".silent")}

        urls = [silent.url(f"/{i}", host="slow.example") for i in range(20)]
        if slow == "names":
            urls = [silent.url(host=f"{i}.silent") for i in range(20)]
        await end_jobs("acct_slow", urls[0])
        await wait_until(held)  # one place is taken when all others are asked for
        await end_jobs("acct_slow", *urls[1:])
        await wait_until(lambda: len(held()) >= 8)
        await end_jobs("acct_quick", quick.url(host="quick.example"))
        await wait_until(lambda: quick.got, timeout=5)
        assert len(held()) == 8


HOSTILE = [
    "http://example.com/",
    "ftp://example.com/",
    "https:///nothing",
    "https://user:pw@1.1.1.1/",
    "https://1.1.1.1:8080/",
    "https://1.1.1.1/#x",
    "https://1.1.1.1:0/",
    "file:///etc/passwd",
    "gopher://1.1.1.1/",
    "https://1.1.1.1\\@10.0.0.1/",
    "https://@10.0.0.1/",
    "//1.1.1.1/",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0177.0.0.1/",
    "https://localhost/",
    "https://0.0.0.0/",
    "https://10.0.0.1/",
    "https://172.16.0.1/",
    "https://192.168.1.1/",
    "https://169.254.169.254/latest/meta-data/",
    "https://100.64.0.1/",
    "https://100.100.100.200/",
    "https://168.63.129.16/",
    "https://192.0.0.192/",
    "https://192.0.2.1/",
    "https://198.18.0.1/",
    "https://198.51.100.1/",
    "https://203.0.113.1/",
    "https://224.0.0.1/",
    "https://240.0.0.1/",
    "https://255.255.255.255/",
    "https://192.88.99.1/",
    "https://[::1]/",
    "https://[::]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:1.1.1.1]/",
    "https://[64:ff9b::7f00:1]/",
    "https://[64:ff9b:1::1]/",
    "https://[2002:7f00:1::]/",
    "https://[2001::1]/",
    "https://[2001:db8::1]/",
    "https://[3fff::1]/",
    "https://[fe80::1]/",
    "https://[fe80::1%25lo]/",
    "https://[fc00::1]/",
    "https://[fd00:ec2::254]/",
    "https://[ff02::1]/",
    "https://[::7f00:1]/",
    "https://[fec0::1]/",
    "https://127.0.0.1./",
    "https://0x7f.1/",
    "https://hooks.localhost/",
    "https://08.1.1.1/",
    "https://1.1.1.1.1/",
    "https://xn--/",
    "https://xn--a/",
    "https://xn--0.com/",
    "https://%31.1.1.1/",
    "https://a..example/",
    f"https://{'a' * 64}.example/",
    "https://hooks.example:99999/",
    "https://1.1.1.1/\tx",
    "https://1.1.1.1/ x",
    "https://exämple.com/",
    "https://1.1.1.1/" + "x" * 999,
]


async def test_hostile_targets_are_refused_when_they_are_made_and_when_they_are_delivered_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RESOLVE_S", 0.0)
    nowhere = Targets([])
    async with open_service(tmp_path) as service, DNSResolver(["127.0.0.1:9"]) as resolver:
        member = await service.member()
        for url in [*HOSTILE, "http://hooks.example/", "https://hooks.example:8443/"]:
            asked = {"prompt": "a boat", "webhook_url": url}
            for path, body in (("webhooks", {"url": url}), ("jobs", asked)):
                answer = await service.client.post(f"/v1/{path}", json=body, headers=member.a)
                refused(answer, 400, "invalid_parameter", "url: ")
            with pytest.raises(InvalidParameter):
                await nowhere.find(url, resolver)
        assert (await nowhere.find("https://1.1.1.1/x?y=1", resolver)).addresses == ["1.1.1.1"]
        assert (await nowhere.find("https://1.1/", resolver)).addresses == ["1.0.0.1"]
    assert is_public(ip_address("2606:4700:4700::1111"))


async def test_a_name_is_resolved_once_for_each_attempt_and_every_address_of_it_is_checked(tmp_path: Path) -> None:
    names = {"hooks.example": ["127.0.0.1"]}
    async with (
        open_service(tmp_path, webhook_networks=LOOPBACK) as service,
        receiving() as receiver,
        naming(names) as server,
    ):
        member, resources = await service.member(), service.resources
        await _create(service, member, receiver.url(host="hooks.example"))

        async def end_and_deliver(is_done: Callable[[], object]) -> None:
            job_id = await accept(resources, member.account.id)
            await resources.queue.cancel(job_id, account_id=member.account.id)
            async with _delivering(_delivery(resources, nameservers=[server.address])):
                await wait_until(is_done)

        await end_and_deliver(lambda: receiver.got)
        assert receiver.got[0][1]["host"] == f"hooks.example:{receiver.port}"
        for number, addresses in enumerate((["127.0.0.1", "10.0.0.1"], ["10.0.0.1"]), 2):
            names["hooks.example"] = addresses
            await end_and_deliver(lambda number=number: len(server.asked) == number)
        assert len(receiver.got) == 1


async def test_a_name_is_taken_unresolved_and_what_is_behind_it_is_told_by_no_word_and_no_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "RESOLVE_S", 0.3)
    names = {"inside.example": ["10.0.0.1"], "rebound.example": ["1.1.1.1", "10.0.0.1"]}
    hosts = [*names, "absent.example", "never.silent"]
    async with open_service(tmp_path) as service, naming(names) as server:
        member = await service.member()
        for host in hosts:
            asked = {"prompt": "a boat", "webhook_url": f"https://{host}/"}
            headers = member.a | {"Idempotency-Key": host}
            for is_again in (False, True):
                answer = await service.client.post("/v1/jobs", json=asked, headers=headers)
                assert (answer.status_code, "idempotency-replayed" in answer.headers) == (202, is_again), answer.text
            await service.client.post(f"/v1/jobs/{answer.json()['id']}/cancel", headers=member.a)
        await _create(service, member, "https://absent.example/")

        async def told() -> list[dict[str, Any]]:
            return [row for row in await _deliveries(service, member, "jobs") if "error" in row]

        async def are_all_told() -> bool:
            return len(await told()) == len(hosts)

        async with _delivering(_delivery(service.resources, nameservers=[server.address])):
            await wait_until(are_all_told)
        assert {(row["error"], row["status"]) for row in await told()} == {(targets.NOT_FOUND, "waiting")}
        async with DNSResolver([server.address]) as resolver:
            for host in hosts:
                began = time.monotonic()
                with pytest.raises(InvalidParameter):
                    await Targets([]).find(f"https://{host}/", resolver)
                assert time.monotonic() - began >= 0.3, host


async def test_tls_is_with_the_name_that_was_asked_for_at_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tls = write_certificate(new_authority(), tmp_path, "hooks.example"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["RAY_TLS_SERVER_CERT"], files["RAY_TLS_SERVER_KEY"])
    monkeypatch.setenv("SSL_CERT_FILE", files["RAY_TLS_CA_CERT"])
    names: dict[str, list[str]] = {f"{name}.example": ["127.0.0.1"] for name in ("hooks", "other")}
    async with (
        open_service(tmp_path / "service", webhook_networks=LOOPBACK) as service,
        receiving(tls=tls) as receiver,
        naming(names) as server,
    ):
        resources = service.resources
        for name in names:
            job_id = await accept(resources, webhook=receiver.url(f"/{name}", host=name))
            await resources.queue.cancel(job_id, account_id=None)

        async def errors() -> list[str]:
            rows = await resources.webhooks.deliveries(ACCOUNT, "jobs")
            return sorted(row.error or "" for row in rows if row.response_status or row.error)

        async def are_settled() -> bool:
            return len(await errors()) == 2

        async with _delivering(_delivery(resources, nameservers=[server.address])):
            await wait_until(are_settled)
        assert [path for path, *_ in receiver.got] == ["/hooks.example"]
        assert await errors() == ["", "no connection, or none that speaks HTTP (ConnectError)"]


async def test_a_proxy_is_asked_for_names_outside_and_not_for_what_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, tls = write_certificate(new_authority(), tmp_path, "hooks.example"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["RAY_TLS_SERVER_CERT"], files["RAY_TLS_SERVER_KEY"])
    monkeypatch.setenv("SSL_CERT_FILE", files["RAY_TLS_CA_CERT"])
    asked: list[str] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[0])
        inside, outside = await asyncio.open_connection("127.0.0.1", receiver.port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_copy(reader, outside), _copy(inside, writer))

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    names = {"private.example": ["10.1.2.3"]}
    async with (
        open_service(tmp_path / "service", webhook_networks=LOOPBACK, webhook_proxy=address) as service,
        receiving(tls=tls) as receiver,
        receiving() as inside,
        naming(names) as server,
        DNSResolver([server.address]) as resolver,
    ):
        resources = service.resources
        for url in ("https://hooks.example/out", inside.url("/in")):
            job_id = await accept(resources, webhook=url)
            await resources.queue.cancel(job_id, account_id=None)
        async with _delivering(_delivery(resources, nameservers=[server.address])):
            await wait_until(lambda: receiver.of("/out") and inside.of("/in"))
        monkeypatch.setattr(targets, "RESOLVE_S", 0.3)
        with pytest.raises(InvalidParameter):
            await Targets([], by_proxy=True).find("https://private.example/", resolver)
    assert asked == ["CONNECT hooks.example:443 HTTP/1.1"], "the name is the proxy's to resolve"
    proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()
    writer.close()


async def test_a_key_that_may_not_read_every_job_makes_no_webhook(service: TestService, member: Member) -> None:
    kept: list[dict[str, Any]] = [
        {"adapters": frozenset({"model_x"})},
        *({"scopes": frozenset({each})} for each in Scope),
    ]
    create = service.resources.api_keys.create
    made = [(await create(member.account.id, interfaces=frozenset(Variant), **each))[1] for each in kept]
    for secret in made:
        answer = await service.client.post(
            "/v1/webhooks", json={"url": "https://1.1.1.1/"}, headers={"X-API-Key": secret}
        )
        refused(answer, 403, "forbidden")
    await _create(service, member, "https://1.1.1.1/")
    stranger = await service.member()
    (shown,) = (await service.client.get("/v1/webhooks", headers=member.a)).json()["webhooks"]
    for method, rest in (("DELETE", ""), ("GET", "/deliveries")):
        path = f"/v1/webhooks/{shown['id']}{rest}"
        refused(await service.client.request(method, path, headers=stranger.a), 404, "not_found")
    assert [row.act for row in await service.resources.audit.rows(member.account.id)] == ["webhook_added"]


def test_attempts_are_spread_over_the_day() -> None:
    pauses = [pause_after(tries).total_seconds() for tries in range(1, 13)]
    assert 3.75 <= pauses[0] <= 6.25
    assert all(pause <= 5 * 3600 for pause in pauses)
    assert sum(pauses) > 0.75 * 86_400
    assert len({pause_after(1) for _ in range(9)}) > 1
