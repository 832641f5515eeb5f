"""An ingress tells a replica of new jobs at once, not for each of many, and waits on Ray without its event loop."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deployments import ingress, nodes
from deployments.ingress import Hints, KeptWorkers
from serve_app.domain.jobs import JobKind
from tests.composition import Resources
from tests.support import wait_until


async def test_the_first_job_gives_a_hint_and_all_that_follow_shortly_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "HINT_EVERY_S", 0.02)
    sent: list[asyncio.Future[None]] = []

    def remote() -> asyncio.Future[None]:
        sent.append(asyncio.get_running_loop().create_future())
        return sent[-1]

    handle: Any = SimpleNamespace(hint=SimpleNamespace(remote=remote), is_initialized=True)  # Ray's
    hints = Hints({JobKind.GENERATION: handle})
    await hints(JobKind.GENERATION, "gen_1")
    await wait_until(lambda: len(sent) == 1)
    for number in range(2, 9):
        await hints(JobKind.GENERATION, f"gen_{number}")
    sent[0].set_result(None)
    await wait_until(lambda: len(sent) == 2)
    sent[1].set_exception(ConnectionError("a replica that ends"))
    await wait_until(lambda: not any(task.get_name().startswith("hint ") for task in asyncio.all_tasks()))
    assert len(sent) == 2
    await hints(JobKind.GENERATION, "gen_9")
    await wait_until(lambda: len(sent) == 3)
    sent[2].set_result(None)


async def test_a_router_that_is_not_made_while_the_head_is_silent_holds_one_thread_and_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "HINT_TIMEOUT_S", 0.02)
    head_answers, sent = threading.Event(), asyncio.Event()
    asked: list[str] = []

    class Handle:
        """Ray's: its first use asks the head."""

        is_initialized = False

        @property
        def hint(self) -> Any:
            asked.append(threading.current_thread().name)
            head_answers.wait(5)
            self.is_initialized = True
            return SimpleNamespace(remote=self.remote)

        async def remote(self) -> None:
            sent.set()

    handle: Any = Handle()
    hints = Hints({JobKind.GENERATION: handle})
    await hints.prepare()
    for number in range(3):
        await hints(JobKind.GENERATION, f"gen_{number}")
        await wait_until(lambda: not any(task.get_name().startswith("hint ") for task in asyncio.all_tasks()))
    assert asked == ["Ray_0"]
    head_answers.set()
    await wait_until(lambda: handle.is_initialized)
    await hints(JobKind.GENERATION, "gen_3")
    await wait_until(sent.is_set)


async def test_readiness_and_checks_give_up_a_silent_head_which_one_thread_asks(
    resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, limit in ((ingress, "CONTROLLER_TIMEOUT_S"), (nodes, "ANSWER_LIMIT_S"), (nodes, "CONTROLLER_LIMIT_S")):
        monkeypatch.setattr(module, limit, 0.01)
    head_answers, asked = threading.Event(), set[str]()

    def get_actor(*_name: Any, **_namespace: Any) -> None:
        asked.add(threading.current_thread().name)
        assert head_answers.wait(5)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    kept = KeptWorkers({JobKind.GENERATION: "generator"}, "atelier")
    there = resources.with_parts(keeps_worker=kept)
    try:
        assert (await there.readiness()).states["generator"] == "scaled to zero", "nobody knows what Serve promises"
        (check,) = await nodes.check_machines()
    finally:
        head_answers.set()
    assert (check.name, check.found) == ("cluster nodes", "Ray does not answer")
    assert asked <= {"Ray_0"}
