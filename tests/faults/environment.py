"""A service without Ray that a test may break: its own Redis, storage and worker processes."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx

from serve_app.domain.digests import Digests
from serve_app.domain.jobs import Failure, Job, JobKind, JobState, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, image_seeds
from serve_app.jobs.queue import JobQueue
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis, stop_redis
from serve_app.worker.attempt import retry_until_available
from tests.api.app import Member, TestService, service_settings
from tests.composition import Resources, open_resources
from tests.faults.reconciliation import AcknowledgedJobs, audit_service, unfinished
from tests.faults.storage import register_faulty
from tests.faults.worker import WorkerBehavior, start_worker
from tests.made_jobs import new_job
from tests.served import Served, served
from tests.support import adapter_id, plain_redis, wait_until, write_catalog

ACCOUNT = "acct_faults"
SHORT, LONG = 3, 40
"""Steps of 256x256: over in half a second, and long enough to be met while running."""
ENDLESS = 400
"""Steps that outlast any lease of a second or two."""
LEASE = timedelta(seconds=20)
"""A lease far longer than any pause of a crowded machine: only a worker that is dead or cut off loses it."""
HASTY = timedelta(seconds=1.5)
"""A lease for a worker that is to lose its jobs."""
SETTLE = timedelta(seconds=100)
"""Whatever a service does by itself may take this long, on a crowded machine."""


class Environment:
    """`accept` notes what was acknowledged; `audit` compares it with what there is."""

    def __init__(self, settings: Settings, resources: Resources) -> None:
        self.settings = settings
        self.resources = resources
        self.acknowledged = AcknowledgedJobs()
        self.processes: list[BaseProcess] = []

    async def accept(self, **args: Any) -> str:
        """Ask until it is acknowledged, always for the same job; `args` are those of `ask`."""
        job_id = new_job_id(JobKind.GENERATION)
        return await retry_until_available(lambda: self.ask(job_id=job_id, **args), within=SETTLE)

    async def ask(
        self,
        *,
        job_id: str = "",
        steps: int = SHORT,
        seed: int = 7,
        prompt: str = "a red circle",
        lora: str = "outline",
        size: int = 256,
        account: str = ACCOUNT,
        key: str | None = None,
        adapter_id: str = "",
        may_end_as: Sequence[JobState] = (),
        queue: JobQueue | None = None,
        catalog: CatalogReader | None = None,
    ) -> str:
        """Submit once, by `adapter_id` as a caller who must be allowed to use it.

        An id that is returned is noted as acknowledged; `StoreUnavailable` means that nothing was promised.
        """
        request = picture(steps=steps, seed=seed, prompt=prompt, lora=lora, size=size)
        if adapter_id:
            request = replace(request, loras=(LoraUse(adapter_id),))
        adapter = await (catalog or self.resources.catalog).adapter(request.lora_id)
        acceptance = await (queue or self.resources.queue).accept(
            new_job(
                account,
                request=request,
                job_id=job_id or new_job_id(JobKind.GENERATION),
                weights=adapter.sha256 if adapter else "",
                lora_id=adapter_id,
                idempotency_key=key,
                body=Digests("body"),
            )
        )
        self.acknowledged.note(account, acceptance.job.id, may_end_as=may_end_as)
        return acceptance.job.id

    def worker(
        self,
        behavior: WorkerBehavior | None = None,
        *,
        settings: Settings | None = None,
        lease: timedelta | None = None,
    ) -> BaseProcess:
        """A worker claims and heartbeats with the lease of its own settings."""
        name = f"w{len(self.processes) + 1}"
        known = settings or self.settings
        process = start_worker(known if lease is None else known.model_copy(update={"lease": lease}), name, behavior)
        self.processes.append(process)
        return process

    async def job(self, job_id: str) -> Job:
        found = await retry_until_available(lambda: self.resources.jobs.find(job_id), within=SETTLE)
        assert found is not None, job_id
        return found

    async def failure(self, job_id: str) -> Failure:
        failure = (await self.job(job_id)).failure
        assert failure is not None, job_id
        return failure

    async def until(self, job_id: str, state: JobState) -> Job:
        async def is_there() -> bool:
            return (await self.job(job_id)).state is state

        await wait_until(is_there, timeout=SETTLE.total_seconds())
        return await self.job(job_id)

    async def until_running(self, job_id: str) -> None:
        """A worker has taken steps on it."""

        async def has_progress() -> bool:
            return (await self.job(job_id)).progress > 0

        await wait_until(has_progress, timeout=SETTLE.total_seconds())

    async def until_ended(self, *, timeout: float = SETTLE.total_seconds()) -> None:  # noqa: ASYNC109 - passed on to `wait_until`
        """Every acknowledged job has ended. Leases are reaped meanwhile."""

        async def is_over() -> bool:
            await self.resources.queue.reap()
            return not await unfinished(self.resources, self.acknowledged)

        await wait_until(is_over, timeout=timeout)

    async def until_counted(self, what: str) -> None:
        """One of the counters of jobs has begun to count."""

        async def is_counted() -> bool:
            return (await self.resources.queue_stats.counts()).get(what, 0) > 0

        await wait_until(is_counted, timeout=SETTLE.total_seconds())

    async def ends_well(self) -> None:
        """Wait until every acknowledged job has ended, as the auditor confirms."""
        await self.until_ended()
        assert not await self.audit()

    async def cancel_all(self) -> None:
        """The cheapest way to end every acknowledged job."""
        for job_id in self.acknowledged.all:
            await retry_until_available(
                lambda job_id=job_id: self.resources.queue.cancel(job_id, account_id=None), within=SETTLE
            )

    async def cancels_well(self) -> None:
        """Cancel every acknowledged job, which the auditor confirms."""
        await self.cancel_all()
        assert not await self.audit()

    async def audit(self) -> list[str]:
        return await retry_until_available(lambda: audit_service(self.resources, self.acknowledged), within=SETTLE)

    @property
    def images(self) -> list[Path]:
        """Every file in the image folder, drafts included."""
        return [path for path in (self.settings.data_dir / "images").rglob("*") if path.is_file()]

    def redis(self) -> Any:
        """A plain client, to break the server with."""
        return plain_redis(self.redis_url)

    @property
    def redis_url(self) -> str:
        return ensure_redis(self.settings.data_dir).url

    def kill_redis(self) -> None:
        os.kill(ensure_redis(self.settings.data_dir).pid, signal.SIGKILL)

    async def start_redis(self) -> None:
        await asyncio.to_thread(ensure_redis, self.settings.data_dir)

    async def crash_redis(self) -> None:
        """Kill the server, and start it again."""
        self.kill_redis()
        await self.start_redis()

    def end_processes(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


@asynccontextmanager
async def open_environment(folder: Path, **changes: Any) -> AsyncGenerator[Environment]:
    """Open an environment in `folder`; `changes` are settings."""
    fields: dict[str, Any] = {
        "data_dir": folder / "var",
        "catalog": write_catalog(folder / "catalog"),
        "lease": LEASE,
        **changes,
    }
    register_faulty()
    settings = Settings.model_validate(fields)
    try:
        async with open_resources(settings) as resources:
            env = Environment(settings, resources)
            try:
                yield env
            finally:
                env.end_processes()
    finally:
        stop_redis(settings.data_dir)


class Ingress:
    """The application on a port of its own and on uvloop, as Ray runs it, and a caller with keys."""

    def __init__(self, env: Environment, client: httpx.AsyncClient, member: Member) -> None:
        self._env = env
        self.client = client
        self.member = member

    async def post(
        self, body: dict[str, Any], headers: dict[str, str], *, may_end_as: Sequence[JobState] = ()
    ) -> httpx.Response:
        """Ask for an image; its id is among the acknowledged once the service has sent it."""
        answer = await self.client.post("/v1/generate", json=body, headers=headers)
        if answer.is_success:
            job_id = answer.json().get("request_id") or answer.json()["run_id"]
            self._env.acknowledged.note(self.member.account.id, job_id, may_end_as=may_end_as)
        return answer


@asynccontextmanager
async def open_ingress(env: Environment, folder: Path, settings: Settings) -> AsyncGenerator[Ingress]:
    plans = service_settings(folder / "plans", []).plans
    settings = settings.model_copy(update={"plans": plans})
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, (running := ExitStack()).close)
        service = await asyncio.to_thread(running.enter_context, served(Served(), settings))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=service.base_url, timeout=60))
        making = TestService(service.resources, client).member()
        yield Ingress(env, client, await asyncio.to_thread(service.run, making))


def picture(*, steps: int, seed: int, prompt: str, lora: str, size: int) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        loras=(LoraUse(adapter_id(lora)),),
        width=size,
        height=size,
        steps=steps,
        seeds=image_seeds(seed, 1),
    )
