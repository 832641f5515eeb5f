"""A wire to Redis that is cut, slow, or loses one reply: for workers, and for the ingress."""

import asyncio
import gc
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.api.app import create_app
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, CommitReply, Failure, JobKind, JobState, StoredImage, new_image_id
from serve_app.service.resources import open_resources
from serve_app.settings import Settings
from serve_app.stores.jobs import JobStore, new_nonce
from serve_app.stores.redis import Rewrite, connect
from tests.api.house import House, Member, client_of, house_settings, png_of
from tests.faults.scene import HASTY, LONG, Scene
from tests.faults.wire import Wire, wire_to
from tests.faults.worker import Orders
from tests.support import wait_until

pytestmark = pytest.mark.timeout(300)

BODY = {"positive_prompt": "a lighthouse", "model_id": ""}
REFUSED_WITHIN_S = 15.0
"""One call's limit of three seconds, and what a crowded test machine adds."""


@pytest.fixture
async def wire(scene: Scene) -> AsyncIterator[Wire]:
    async with wire_to(scene.redis_url) as opened:
        yield opened


def _through(scene: Scene, wire: Wire, **changes: Any) -> Settings:
    """The scene's settings, with Redis at the other end of the wire."""
    fields = {name: getattr(scene.settings, name) for name in scene.settings.model_fields_set}
    return Settings.model_validate({**fields, "redis_url": wire.url, **changes})


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
async def test_a_worker_cut_off_past_its_lease_leaves_the_job_to_another(scene: Scene, wire: Wire, fault: str) -> None:
    job_id = await scene.accept(steps=LONG)
    scene.worker(settings=_through(scene, wire), lease=HASTY)
    await scene.until_running(job_id)
    getattr(wire, fault)()
    scene.worker()
    await scene.until_ended()
    assert (await scene.job(job_id)).attempt == 2
    wire.heal()
    await wait_until(lambda: len(scene.images) <= 1, timeout=60)  # the one that came back deletes what it had stored
    for process in scene.processes:
        process.terminate()
    await wait_until(lambda: all(process.exitcode == 0 for process in scene.processes), timeout=60)
    assert len(scene.images) == 1
    assert not await scene.audit()


@pytest.mark.soak
async def test_a_short_cut_costs_no_attempt(scene: Scene, wire: Wire) -> None:
    job_id = await scene.accept(steps=LONG)
    scene.worker(settings=_through(scene, wire))
    await scene.until_running(job_id)
    wire.refuse()
    wire.heal()
    await scene.until_ended()
    assert (await scene.job(job_id)).attempt == 1
    assert not await scene.audit()


MOVES = ("accept", "claim", "beat", "finish", "fail", "hand_back", "cancel", "reap")


@pytest.mark.parametrize("move", MOVES)
async def test_a_lost_reply_changes_nothing(scene: Scene, wire: Wire, move: str) -> None:
    await _one_life(scene, wire, lost=move)
    assert wire.lost_replies == 1
    assert not await scene.audit()


def _forgets_its_own_finish(name: str, text: str) -> str:
    return text.replace("if job.state == 'completed' then return 'duplicate' end", "") if name == "finish" else text


def _accepts_twice(name: str, text: str) -> str:
    return text.replace("if redis.call('EXISTS', K('job:' .. id)) == 1", "if false") if name == "accept" else text


@pytest.mark.parametrize(("move", "rewrite"), [("finish", _forgets_its_own_finish), ("accept", _accepts_twice)])
async def test_the_auditor_finds_a_lost_reply_that_did_harm(
    scene: Scene, wire: Wire, move: str, rewrite: Rewrite
) -> None:
    await _one_life(scene, wire, lost=move, rewrite=rewrite)
    assert await scene.audit()


async def _one_life(scene: Scene, wire: Wire, *, lost: str, rewrite: Rewrite | None = None) -> None:
    """A job goes through every move over the wire, which loses the reply to one of them. The client asks again by itself."""
    jobs = JobStore(connect(wire.url), scene.settings, rewrite=rewrite)
    digest = _teach(scene, jobs, lost)

    async def over_the_wire(move: str, call: Any) -> Any:
        if move == lost:
            wire.lose_reply_to(digest)
        return await call

    await over_the_wire("accept", scene.accept(jobs=jobs))
    (claim,) = await over_the_wire("claim", jobs.claim("w", kind=JobKind.GENERATION, nonce=new_nonce()))
    await over_the_wire("beat", jobs.beat(claim.lease, progress=40))
    await over_the_wire("hand_back", jobs.hand_back(claim.lease))
    (claim,) = await jobs.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
    image = await _stored(scene, claim)
    reply = await over_the_wire("finish", jobs.finish(claim.lease, [image], seconds=0.1))
    if reply not in (CommitReply.OK, CommitReply.DUPLICATE):
        await scene.resources.images.delete(image.image_uri)  # what an attempt does that believes itself fenced
    await _also_fails(scene, jobs, over_the_wire)
    await over_the_wire("reap", jobs.reap())


def _teach(scene: Scene, jobs: JobStore, move: str) -> str:
    """Let the server know the script, so that the reply lost is that of a script which ran; its digest, as seen on the wire."""
    script = jobs._scripts[move]  # pyright: ignore[reportPrivateUsage]
    with scene.redis() as client:
        return str(client.script_load(script.text))


async def _also_fails(scene: Scene, jobs: JobStore, over_the_wire: Any) -> None:
    await scene.accept(seed=8, may_end_as=[JobState.FAILED], jobs=scene.resources.jobs)
    canceled = await scene.accept(seed=9, may_end_as=[JobState.CANCELED], jobs=scene.resources.jobs)
    await over_the_wire("cancel", jobs.cancel(canceled, account_id=None))
    (claim,) = await jobs.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="boom")
    await over_the_wire("fail", jobs.fail(claim.lease, failure, retry=False))


async def _stored(scene: Scene, claim: Claim) -> StoredImage:
    png = png_of((256, 256))
    lease, images = claim.lease, scene.resources.images
    name = images.object_name(claim.account_id, lease.job_id, lease.attempt, 0, datetime.now(UTC))
    return StoredImage(
        image_id=new_image_id(),
        image_uri=await images.put(name, png),
        width=256,
        height=256,
        sha256=hashlib.sha256(png).hexdigest(),
        size_bytes=len(png),
    )


class Door:
    """The application on one side of the wire, and a caller with keys."""

    def __init__(self, client: httpx.AsyncClient, member: Member, scene: Scene) -> None:
        self._client = client
        self._member = member
        self._scene = scene

    async def post(self, key: str) -> httpx.Response:
        """Ask for an image; an acknowledged id is in the ledger."""
        lora = self._scene.resources.catalog.all()[0].id
        answer = await self._client.post(
            "/v1/generate", json=BODY | {"model_id": lora}, headers=self._member.b | {"Idempotency-Key": key}
        )
        if answer.is_success:
            self._scene.ledger.note(
                self._member.account.id, answer.json()["run_id"], may_end_as=[JobState.CANCELED, JobState.COMPLETED]
            )
        return answer


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A full collection of all that a test session has made stops its only thread for 0.6 s, for 1.5 s on a busy machine
    (measured), and then calls that have their answer are out of time together."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def door(scene: Scene, wire: Wire, tmp_path: Path) -> AsyncIterator[Door]:
    plans = house_settings(tmp_path / "plans", []).plans
    async with (
        open_resources(_through(scene, wire, plans=plans)) as resources,
        client_of(create_app(resources)) as client,
    ):
        yield Door(client, await House(resources, client).member(), scene)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("fault", ["blackhole", "refuse"])
async def test_an_ingress_cut_off_refuses_in_time_and_takes_the_request_later(
    scene: Scene, wire: Wire, door: Door, fault: str
) -> None:
    assert (await door.post("first")).is_success
    getattr(wire, fault)()
    began = time.monotonic()
    answers = await asyncio.gather(*(door.post(f"key-{n}") for n in range(40)))
    took = time.monotonic() - began
    assert {answer.status_code for answer in answers} == {503}
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in answers)
    assert all(answer.json()["error"]["code"] == "unavailable" for answer in answers)
    assert took < REFUSED_WITHIN_S
    wire.heal()
    again = await asyncio.gather(*(door.post(f"key-{n}") for n in range(40)))
    assert [answer.text for answer in again if not answer.is_success] == []
    assert len(set(scene.ledger.all)) == 41
    await scene.cancel_all()
    assert not await scene.audit()


@pytest.mark.soak
async def test_a_slow_wire_slows_and_refuses_nobody(scene: Scene, wire: Wire, door: Door) -> None:
    wire.slow(0.2)
    answers = await asyncio.gather(*(door.post(f"key-{n}") for n in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    await scene.cancel_all()
    assert not await scene.audit()


async def test_replies_lost_at_the_door_make_no_second_job(scene: Scene, wire: Wire, door: Door) -> None:
    assert (await door.post("first")).is_success
    wire.lose_reply_to(_teach(scene, scene.resources.jobs, "accept"))
    assert (await door.post("second")).is_success
    assert wire.lost_replies == 1
    await scene.cancel_all()
    assert len(scene.ledger.all) == 2
    assert (await scene.resources.jobs.counts())["accepted"] == 2
    assert not await scene.audit()


@pytest.mark.soak
async def test_workers_behind_a_slow_wire_finish_their_jobs(scene: Scene, wire: Wire) -> None:
    wire.slow(0.2)
    for seed in range(3):
        await scene.accept(seed=seed)
    scene.worker(Orders(reaps=True), settings=_through(scene, wire))
    await scene.until_ended()
    assert not await scene.audit()
