"""The ingress deployment: the API as an ASGI app, with a hint to replicas after each job."""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import GENERATOR
from deployments.nodes import check_machines
from deployments.proxy import proxy_secret
from deployments.proxy.answers import take
from deployments.ray_internals import admin_socket, at_drain, has_haproxy, least_replicas, off_the_loop, prepare_replica
from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.api.request_context import with_forwarded_address
from serve_app.app import create_app
from serve_app.domain import metrics
from serve_app.domain.jobs import DEFAULT_GROUP, JobKind, group_of_pool, pool_of
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.http_server import allow_connections, freeze_startup_objects
from serve_app.store.measures import SEND_EVERY_S, Measures
from serve_app.store.process import open_process, repeat, watch_loop

log = logging.getLogger(__name__)

HINT_TIMEOUT_S = 5.0
"""A replica that has not taken a hint by now finds the job by itself."""
HINT_EVERY_S = 0.05
"""A hint costs the ingress as much processor time as two polls: with many jobs a second, one speaks for several."""
CONTROLLER_TIMEOUT_S = 2.0
"""Serve's controller is waited for this long, less than a probe waits; one that restarts takes longer."""


class Hints:
    """Tells a replica that there is work. A lost hint changes nothing: replicas also look."""

    def __init__(self, handles: dict[str, DeploymentHandle[Any]]) -> None:
        """Send hints to `handles`, by pool, and to the deployments of further groups once they have a job."""
        self._handles = handles
        self._wanted: set[str] = set()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def prepare(self) -> None:
        """Make the routers while Serve's controller answers, so that hints are given while it is silent, too."""
        await asyncio.gather(*(_try(self._routed(pool)) for pool in [*self._handles]))

    async def __call__(self, pool: str, job_id: str) -> None:
        """Return at once. One hint per pool at a time is enough: it says "look", not what to take."""
        self._wanted.add(pool)
        if pool not in self._under_way:
            self._under_way[pool] = asyncio.create_task(self._send_wanted(pool), name=f"hint {job_id}")

    async def _send_wanted(self, pool: str) -> None:
        """Send a hint, and another if there were more jobs meanwhile: the first may have come too early."""
        try:
            while pool in self._wanted:
                self._wanted.discard(pool)
                await _try(self._hint(pool))
                await asyncio.sleep(HINT_EVERY_S)
        finally:
            del self._under_way[pool]

    async def _hint(self, pool: str) -> None:
        await (await self._routed(pool)).hint.remote()

    async def _routed(self, pool: str) -> DeploymentHandle[Any]:
        """Return the pool's handle with Serve's router; one of an application that is not there waits until it is.

        Its first use makes the router, for which Serve asks its controller and waits without a limit.
        """
        if pool not in self._handles:
            self._handles[pool] = DeploymentHandle(GENERATOR, group_of_pool(pool))
        handle = self._handles[pool]
        if not handle.is_initialized:
            await off_the_loop(lambda: handle.hint)
        return handle


async def _try(hint: Awaitable[object]) -> None:
    try:
        async with asyncio.timeout(HINT_TIMEOUT_S):
            await hint
    except Exception as error:  # noqa: BLE001 - Ray's many errors all mean the same here: no hint
        log.debug("no hint given: %r", error)


class KeptWorkers:
    """Tells whether Serve keeps a worker of a pool even when idle."""

    def __init__(self, own: dict[str, str], application: str) -> None:
        """Ask for the deployments `own` (by pool) of this application, and for those that other groups have."""
        self._own = own
        self._application = application

    async def __call__(self, pool: str) -> bool | None:
        """Whether a worker is kept: None where nothing serves the pool, False while Serve's controller does not answer."""
        group = group_of_pool(pool)
        if pool not in self._own and group == DEFAULT_GROUP:
            return None
        name, application = (self._own[pool], self._application) if pool in self._own else (GENERATOR, group)
        try:
            async with asyncio.timeout(CONTROLLER_TIMEOUT_S):
                least = await least_replicas(name, application)
                return None if least is None else least > 0
        except (RayError, ValueError, TimeoutError) as error:
            log.debug("Serve's controller does not answer: %r", error)
            return False


async def count_proxy_errors(measures: Measures, socket: Path) -> None:
    """Count what HAProxy has answered itself on this node. Raises `OSError` before HAProxy has been started here."""
    for status, number in (await asyncio.to_thread(take, socket)).items():
        measures.count(metrics.PROXY_ERRORS, status, by=number)


def without_request_id(app: ASGIApp) -> ASGIApp:
    """The app, with `X-Request-Id` left to Serve, which adds the very same one to every response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await app(scope, receive, pass_on)

    return answer


@serve.ingress()  # pyright: ignore[reportUntypedClassDecorator]
class Ingress:
    """Serves the API, bound to the deployments that it sends hints to, and to those that only have to run with it.

    Everything it promises is in Redis before it answers.
    """

    async def __init__(
        self,
        generator: DeploymentHandle[Any] | None,
        upscaler: DeploymentHandle[Any],
        *_beside: DeploymentHandle[Any],
        requests_at_once: int | None = None,
        requests_waiting: int,
        max_rank: int = DEFAULT_MAX_RANK,
    ) -> None:
        allow_connections()
        settings = prepare_replica(takes_requests=True)
        if requests_at_once is not None:
            settings = settings.with_requests_at_once(requests_at_once)
        handles = {str(JobKind.UPSCALE): upscaler}
        if generator is not None:
            handles[pool_of(DEFAULT_GROUP)] = generator
        names = {pool: handle.deployment_name for pool, handle in handles.items()}
        kept = KeptWorkers(names, serve.get_replica_context().app_name)
        self._stack = AsyncExitStack()
        process = await self._stack.enter_async_context(open_process(settings))
        accounts = AccountParts(process)
        loras = LoraParts(process, accounts, max_rank=max_rank)
        hints = Hints(handles)
        await hints.prepare()
        jobs = JobParts(process, accounts, loras, hint=hints)
        at_drain(jobs.waits.end_all)
        operations = OperationParts(process, accounts, loras, jobs, keeps_worker=kept, check_machines=check_machines)
        await loras.applied_catalog.apply_file_once()
        for work in (loras.uploads.sweep_forever(), loras.catalog.read_ahead()):
            self._stack.callback(asyncio.create_task(work).cancel)
        if has_haproxy():
            count = partial(count_proxy_errors, process.measures, admin_socket())
            counting = asyncio.create_task(repeat("counting HAProxy's errors", count, SEND_EVERY_S, log.debug))
            self._stack.callback(counting.cancel)
        self._app = create_app(
            settings,
            accounts=accounts,
            loras=loras,
            jobs=jobs,
            operations=operations,
            requests_waiting=requests_waiting,
        )
        self._stack.callback(watch_loop(process.measures))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook: gives the app that the replica has built, so that nothing of it is pickled."""
        app = without_request_id(self._app)
        freeze_startup_objects()
        return with_forwarded_address(app, proxy_secret()) if has_haproxy() else app

    async def __del__(self) -> None:
        await self._stack.aclose()
