"""Wall clocks an hour off, at the door and at the bench, while Redis keeps the true time: nothing expires, nothing is stolen."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.api.app import create_app
from serve_app.domain.jobs import BeatReply, CommitReply, JobKind, JobState, Lease
from serve_app.domain.requests import Variant
from serve_app.service.resources import open_resources
from serve_app.stores.jobs import JobStore, new_nonce
from serve_app.stores.redis import connect
from tests.api.house import ALL, BODY_A, BODY_B, House, Member, client_of, house_settings
from tests.faults.clock import by_the_callers_clock, clock_off_by
from tests.faults.scene import Scene, open_scene
from tests.faults.worker import Orders

pytestmark = pytest.mark.timeout(300)

AHEAD, BEHIND = timedelta(hours=1), timedelta(hours=-1)
HALF_AN_HOUR = timedelta(minutes=30)
CLOSE = timedelta(minutes=5)
"""What a crowded test machine may lose between two readings; far from an hour."""


def _true_time(scene: Scene) -> datetime:
    with scene.redis() as client:
        seconds, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues] - redis-py types both kinds of client
    return datetime.fromtimestamp(seconds, UTC)


class Door:
    """The application in this process, whose clock the test sets, and a caller."""

    def __init__(self, scene: Scene, client: httpx.AsyncClient, member: Member) -> None:
        self._scene = scene
        self.client = client
        self.member = member

    async def post(self, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        answer = await self.client.post("/v1/generate", json=body, headers=headers)
        assert answer.is_success, answer.text
        job_id = answer.json().get("request_id") or answer.json()["run_id"]
        self._scene.ledger.note(self.member.account.id, job_id)
        return answer

    async def cancel(self, job_id: str) -> None:
        await self.client.post(f"/v1/jobs/{job_id}/cancel", headers=self.member.a)
        self._scene.ledger.may_end_as[job_id] = frozenset({JobState.CANCELED})


@pytest.fixture
async def door(scene: Scene, tmp_path: Path) -> AsyncIterator[Door]:
    plans = house_settings(tmp_path / "plans", []).plans
    settings = scene.settings.model_copy(update={"plans": plans, "redis_url": scene.redis_url})
    async with open_resources(settings) as resources, client_of(create_app(resources)) as client:
        yield Door(scene, client, await House(resources, client).member())


@pytest.mark.parametrize("error", [AHEAD, BEHIND], ids=["ahead", "behind"])
async def test_a_job_goes_from_a_door_to_a_bench_with_opposite_errors(
    scene: Scene, door: Door, error: timedelta
) -> None:
    began = _true_time(scene)
    with clock_off_by(error):
        run = await door.post(BODY_B | {"width": 256, "height": 256}, door.member.b)
        asked = await door.post(BODY_A, door.member.a)
        await door.cancel(asked.json()["request_id"])
        assert timedelta(seconds=run.json()["estimated_time"]) < CLOSE
        assert int(run.headers["RateLimit"].rpartition("t=")[2]) <= 3600
        scene.worker(Orders(clock_error=-error, reaps=True))
        await scene.until_ended()
        image = (await door.client.get(f"/v1/generations/{run.json()['run_id']}", headers=door.member.b)).json()
        assert (await door.client.get(image["image_url"])).content.startswith(b"\x89PNG")
        assert not await scene.audit()
    promised = datetime.fromisoformat(asked.json()["estimated_completion_time"])
    ended = _true_time(scene)
    assert abs(promised - began) < CLOSE
    for job_id in scene.ledger.all:
        job = await scene.job(job_id)
        assert job.finished_at is not None
        assert began <= job.created_at + timedelta(seconds=1)
        assert job.created_at <= (job.started_at or job.created_at) <= job.finished_at <= ended + timedelta(seconds=1)


async def test_an_address_signed_by_a_slow_clock_opens_by_a_fast_one(door: Door, scene: Scene) -> None:
    run_id = (await door.post(BODY_B | {"width": 256, "height": 256}, door.member.b)).json()["run_id"]
    scene.worker(Orders(reaps=True))
    await scene.until_ended()
    for signing, checking in ((BEHIND, AHEAD), (AHEAD, BEHIND)):
        with clock_off_by(signing):
            image = (await door.client.get(f"/v1/generations/{run_id}", headers=door.member.b)).json()
        with clock_off_by(checking):
            assert (await door.client.get(image["image_url"])).is_success


@pytest.fixture
async def strict(tmp_path: Path) -> AsyncIterator[Scene]:
    """A scene where half an hour too much would end everything."""
    async with open_scene(tmp_path, max_attempts=1, queue_age_limit=HALF_AN_HOUR, lease=HALF_AN_HOUR) as scene:
        yield scene


async def _one_waits_one_runs(scene: Scene) -> Lease:
    for seed in range(2):
        await scene.accept(seed=seed, may_end_as=[JobState.CANCELED])
    (claim,) = await scene.resources.jobs.claim("w", kind=JobKind.GENERATION, nonce=new_nonce())
    return claim.lease


async def test_a_reaper_with_a_fast_clock_steals_nothing_and_ends_nothing(strict: Scene) -> None:
    jobs = strict.resources.jobs
    with clock_off_by(BEHIND):
        lease = await _one_waits_one_runs(strict)
    with clock_off_by(AHEAD):
        assert await jobs.reap() == 0
    assert await jobs.beat(lease, progress=1) is BeatReply.OK
    assert await jobs.hand_back(lease) is CommitReply.REQUEUED
    await strict.cancel_all()
    assert not await strict.audit()


async def test_the_auditor_finds_what_a_script_by_its_callers_clock_would_end(strict: Scene) -> None:
    await _one_waits_one_runs(strict)
    wrong = JobStore(connect(strict.redis_url), strict.settings, rewrite=by_the_callers_clock(AHEAD))
    assert await wrong.reap() == 2
    problems = await strict.audit()
    assert any("ended failed" in problem for problem in problems)
    assert any("ended expired" in problem for problem in problems)


async def test_sessions_keys_and_repeats_do_not_end_early(scene: Scene) -> None:
    accounts, sessions = scene.resources.accounts, scene.resources.sessions
    with clock_off_by(BEHIND):
        account = await accounts.create_account("acme")
        _, secret = await accounts.create_key(account.id, interfaces=ALL, expires_in=HALF_AN_HOUR)
        token = await sessions.create(account.id)
        first = await scene.accept(key="once", may_end_as=[JobState.CANCELED])
    with clock_off_by(AHEAD):
        assert (await accounts.gate(secret, Variant.A, counted=True)).caller is not None
        assert await sessions.get(token) == account.id
        assert await scene.accept(key="once", may_end_as=[JobState.CANCELED]) == first
