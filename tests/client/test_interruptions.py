"""Nothing draws on after its caller has gone: Ctrl-C, errors and canceled tasks cancel the jobs that a call began."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import redis

from serve_app.client import AsyncClient, Client, JobCanceled, WaitTimeout
from serve_app.domain.accounts import Account
from serve_app.domain.jobs import JobState
from serve_app.settings import Settings
from tests.client.conftest import LORA, with_plan
from tests.live import Live, live_service
from tests.support import ROOT, wait_until


class InterruptedTransport(httpx.HTTPTransport):
    """Ctrl-C comes in the place of the `nth` answer to a method: before a poll is held back, after a POST arrived."""

    def __init__(self, method: str, nth: int = 1) -> None:
        super().__init__()
        self._method, self._left = method, nth

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._left -= request.method == self._method
        is_last = self._left == 0 and request.method == self._method
        if is_last and request.method == "GET":
            raise KeyboardInterrupt
        response = super().handle_request(request)
        if is_last:
            raise KeyboardInterrupt
        return response


@pytest.fixture
def tiny(settings: Settings, redis_db: redis.Redis, tmp_path: Path) -> Iterator[Live]:
    """A service whose jobs stay in the queue, with a plan of five requests an hour."""
    with live_service(with_plan(settings, tmp_path, limit=5, window_s=3600)) as live:
        live.outcome = "leave"
        yield live


def states(live: Live, account: Account) -> list[JobState]:
    return [job.state for job in live.run(live.resources.job_history.list(account.id))]


CALLS: dict[str, tuple[str, Callable[[Client], Any]]] = {
    "generate": ("GET", lambda client: client.generate("a boat", loras=LORA)),
    "generate, while it is sent": ("POST", lambda client: client.generate("a boat", loras=LORA, wait=False)),
    "wait": ("GET", lambda client: client.generate("a boat", lora_id=LORA).wait()),
    "map": ("GET", lambda client: client.map("a boat", loras=LORA, seeds=range(5))),
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_cancels_what_a_call_began_although_the_plan_is_used_up(tiny: Live, call: str) -> None:
    method, draw = CALLS[call]
    account, key = tiny.member(plan_a="tiny")
    with Client(tiny.base_url, key) as before:
        others = 0 if call == "map" else 3
        for _ in range(others):
            before.generate("a flower", lora_id=LORA)
    with Client(tiny.base_url, key, transport=InterruptedTransport(method)) as client:
        with pytest.raises(KeyboardInterrupt) as stop:
            draw(client)
        made = states(tiny, account)
        begun = len(made) - others
        assert made == [JobState.CANCELED] * begun + [JobState.QUEUED] * others
        if method == "GET":
            assert f"{begun} jobs: see client.interrupted" in stop.value.__notes__[0]
            assert len({job.id for job in client.interrupted}) == begun == (5 if call == "map" else 1)
            with pytest.raises(JobCanceled):
                client.interrupted[-1].wait()


def test_what_had_ended_when_a_call_broke_off_keeps_its_images(live: Live, key: str) -> None:
    with Client(live.base_url, key, transport=InterruptedTransport("POST", nth=3)) as client:
        with pytest.raises(KeyboardInterrupt):
            client.map("a boat", loras=LORA, seeds=range(3), concurrency=1)
        assert [job.images[0].seed for job in client.interrupted] == [0, 1]


def test_a_wait_that_is_over_and_a_wait_for_another_clients_job_cancel_nothing(tiny: Live) -> None:
    account, key = tiny.member(plan_a="tiny")
    with Client(tiny.base_url, key) as client:
        job = client.generate("a boat", lora_id=LORA)
        with pytest.raises(WaitTimeout):
            job.wait(timeout=0.3)
    with Client(tiny.base_url, key, transport=InterruptedTransport("GET", nth=2)) as other:
        watched = other.run(job.id)
        with pytest.raises(KeyboardInterrupt):
            watched.wait()
    assert states(tiny, account) == [JobState.QUEUED]


async def test_a_canceled_task_cancels_its_jobs(tiny: Live) -> None:
    account, key = tiny.member()
    async with AsyncClient(tiny.base_url, key) as client:
        drawing = asyncio.create_task(client.map("a boat", loras=LORA, seeds=range(4)))
        await wait_until(lambda: tiny.resources.waits.count == 1)
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
        assert states(tiny, account) == [JobState.CANCELED] * 4
        async with anyio.create_task_group() as group:
            group.start_soon(partial(client.generate, "a boat", loras=LORA))
            await wait_until(lambda: tiny.resources.waits.count == 1)
            group.cancel_scope.cancel()  # which cancels each await of the task, also those that clean up
        await wait_until(lambda: states(tiny, account) == [JobState.CANCELED] * 5)


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_stops_the_command_and_its_job(tiny: Live) -> None:
    account, key = tiny.member(plan_a="tiny")
    environment = os.environ | {"ATELIER_URL": tiny.base_url, "ATELIER_KEY": key}
    words = (sys.executable, "-m", "deployments", "generate", "a boat")
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # `make test &` would pass on that it is ignored
    ) as command:  # fmt: skip
        asyncio.run(wait_until(lambda: tiny.resources.waits.count == 1))
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=30)
    assert (states(tiny, account), command.returncode) == ([JobState.CANCELED], 130)
    assert re.fullmatch(r"atelier: interrupted; job_\w+ is canceled\n", told)
