"""A job's events through a real port: at once, resumed after anything, and for nobody who may not read."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import pytest
import uvicorn

from serve_app.api.jobs import events
from serve_app.jobs import waits
from serve_app.jobs.previews import Preview
from serve_app.jobs.waits import JobWaits
from tests.api.app import ALL, Member, TestService, refused
from tests.api.test_documents import document_of, validator
from tests.support import wait_until

SHORT_S = 0.05


class Event(NamedTuple):
    name: str
    id: str
    data: Mapping[str, Any]


class Ingress(NamedTuple):
    client: httpx.AsyncClient
    waits: JobWaits

    @asynccontextmanager
    async def follow(
        self, job_id: str, headers: Mapping[str, str], last: str = "", address: str = ""
    ) -> AsyncGenerator[AsyncIterator[Event]]:
        asked = {**headers, **({"Last-Event-ID": last} if last else {})}
        async with self.client.stream("GET", address or f"/v1/jobs/{job_id}/events", headers=asked) as response:
            assert response.headers["content-type"].startswith("text/event-stream"), await response.aread()
            assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-store", "no")
            yield _events(response)


async def _events(response: httpx.Response) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        fields[name] = value
        if not line:
            if "event" in fields:
                yield Event(fields["event"], fields["id"], json.loads(fields["data"]))
            fields = {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(events, "CHECK_EVERY_S", SHORT_S)


@asynccontextmanager
async def ingress(service: TestService) -> AsyncGenerator[Ingress]:
    """Run the application with places of its own on a free port, and end it while its streams are open."""
    resources = service.resources
    own = JobWaits(resources.jobs, most=8, previews=resources.previews)
    app = resources.with_parts(waits=own).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        yield Ingress(client, own)
    server.should_exit = True
    await asyncio.wait_for(serving, 10)


async def test_a_listener_is_told_at_once_and_goes_on_at_another_ingress_without_loss_or_repetition(
    service: TestService, member: Member
) -> None:
    job_id, previews = await service.submit(member, num_images=2), service.resources.previews
    async with ingress(service) as first, first.follow(job_id, member.b) as told:
        snapshot = await anext(told)
        record = (await first.client.get(f"/v1/jobs/{job_id}", headers=member.b)).json()
        assert (snapshot.name, snapshot.data["request"]) == ("snapshot", record["request"])
        await service.run(job_id, 10)
        while (running := (await anext(told)).data)["progress"] == 0:  # claimed, and nothing told yet
            assert running["status"] == "running"
        assert running == {"status": "running", "attempt": 1, "progress": 10}
        await wait_until(lambda: previews.is_watched(job_id))
        await previews.put(job_id, {0: Preview(3, b"three"), 1: Preview(3, b"other")})
        shown = [await anext(told), await anext(told)]
        assert [(each.name, each.data["index"], each.data["step"]) for each in shown] == [
            ("preview", 0, 3),
            ("preview", 1, 3),
        ]
        assert base64.b64decode(shown[0].data["image"]) == b"three"
    await previews.put(job_id, {0: Preview(4, b"four")})
    async with ingress(service) as second:
        async with second.follow(job_id, member.a, shown[0].id) as told:
            missed = [await anext(told), await anext(told)]
            assert [(each.name, each.data["index"], each.data["step"]) for each in missed] == [
                ("preview", 0, 4),
                ("preview", 1, 3),
            ]
            await service.release(job_id)
            assert (await anext(told)).data["status"] == "queued"
        await service.complete(job_id)
        async with second.follow(job_id, member.a, missed[-1].id) as told:
            (end,) = [each async for each in told]
        assert (end.name, end.data["status"], len(end.data["images"])) == ("end", "completed", 2)
        document = await document_of(service, "jobs")
        stream = document["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]["content"]
        documented = validator(document, stream["text/event-stream"]["schema"]["contentSchema"])
        for each in (snapshot, Event("progress", shown[0].id, running), *shown, end):
            documented.validate({"event": each.name, "id": each.id, "data": each.data})
        over = await second.client.get(f"/v1/jobs/{job_id}/events", headers=member.a | {"Last-Event-ID": end.id})
        assert (over.status_code, over.content) == (204, b"")
        async with second.follow(job_id, member.a, "another text") as told:
            assert [each.name async for each in told] == ["snapshot", "end"]


async def test_each_block_is_an_event_and_silence_is_filled_by_lines_of_their_own(
    service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers such as httpx-sse take each empty line for the end of an event, whose data they then read as JSON."""
    monkeypatch.setattr(events, "HEARTBEAT_S", SHORT_S)
    job_id = await service.submit(member)
    path = f"/v1/jobs/{job_id}/events"
    async with ingress(service) as first, first.client.stream("GET", path, headers=member.a) as response:
        lines = response.aiter_lines()
        told = [await anext(lines) for _ in range(7)]
        assert [line.partition(":")[0] for line in told[:5]] == ["retry", "event", "id", "data", ""]
        assert told[5:] == [":", ":"]
        resumed = member.a | {"Last-Event-ID": told[2].removeprefix("id: ")}
        async with first.client.stream("GET", path, headers=resumed) as again:
            lines = again.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["retry: 1000", ":", ":"]


async def test_a_drain_lets_everybody_go_and_the_end_comes_from_the_next_ingress(
    service: TestService, member: Member
) -> None:
    job_id = await service.submit(member)
    async with ingress(service) as first, first.follow(job_id, member.a) as told:
        snapshot = await anext(told)
        poll = first.client.get(f"/v1/jobs/{job_id}", headers=member.a | {"Prefer": "wait=30"})
        polling = asyncio.create_task(poll)
        await wait_until(lambda: first.waits.count == 2)
        numbers = (await first.client.get("/metrics", headers=service.operator)).text
        assert "\natelier_event_streams 1.0\n" in numbers, "a poll that waits is no stream"
        first.waits.end_all()
        assert [each async for each in told] == []
        assert (await polling).json()["status"] == "queued"
        async with first.follow(job_id, member.a, snapshot.id) as told:
            assert [each async for each in told] == [], "one that comes during the drain goes again"
    await service.complete(job_id)
    async with ingress(service) as second, second.follow(job_id, member.a, snapshot.id) as told:
        assert [each.name async for each in told] == ["end"]


async def test_a_stream_ends_with_the_right_to_read_and_a_place_with_its_reader(
    service: TestService, member: Member
) -> None:
    job_id = await service.submit(member)
    path, other = f"/v1/jobs/{job_id}/events", await service.member()
    key, secret = await service.resources.api_keys.create(member.account.id, interfaces=ALL)
    revoked = {"X-API-Key": secret}
    async with ingress(service) as first:
        assert (await first.client.get(path, headers=other.a)).status_code == 404
        async with first.follow(job_id, revoked) as told, first.follow(job_id, revoked):
            assert (await anext(told)).name == "snapshot"
            full = await first.client.get(path, headers=member.a)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
            await service.resources.api_keys.revoke(key.id)
            assert [each async for each in told] == []
        async with first.follow(job_id, member.a) as told:
            await anext(told)
        await wait_until(lambda: first.waits.count == 0)
        async with first.follow(job_id, member.a) as told:
            await anext(told)
            await service.resources.accounts.set_disabled(member.account.id, True)
            assert [each async for each in told] == []


async def test_a_reader_that_takes_nothing_loses_its_place(
    service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SEND_LIMIT_S", SHORT_S)
    job_id = await service.submit(member)
    never = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await never.wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    path, header = f"/v1/jobs/{job_id}/events", (b"authorization", member.a["Authorization"].encode())
    scope = {"method": "GET", "path": path, "raw_path": path.encode(), "headers": [header]}
    async with asyncio.timeout(5):
        await service.call(scope, receive, send)
    assert service.resources.waits.count == 0


async def test_a_browser_follows_one_job_by_an_address_of_its_own_as_long_as_the_key_reads(
    service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, other = await service.submit(member), await service.submit(member)
    async with ingress(service) as here:

        async def made() -> str:
            answer = await here.client.get(f"/v1/jobs/{job_id}/events/address", headers=member.b)
            assert answer.status_code == 200, answer.text
            return answer.json()["url"]

        address = await made()
        monkeypatch.setattr(events, "TOKEN_LIFE", timedelta(seconds=-1))
        forged = address[:-1] + ("0" if address[-1] != "0" else "1")
        for wrong in (address.replace(job_id, other), await made(), forged, address.partition("=")[0] + "=é.é"):
            refused(await here.client.get(wrong), 401, "unauthorized", "not valid any more")
        refused(await here.client.get(address.replace("/events?", "?")), 401, "unauthorized")
        [key] = await service.resources.api_keys.list(member.account.id)
        async with here.follow(job_id, {}, address=address) as told:
            assert (await anext(told)).data["id"] == job_id
            await service.resources.api_keys.revoke(key.id)
            assert [each async for each in told] == []
        refused(await here.client.get(address), 401, "unauthorized")
