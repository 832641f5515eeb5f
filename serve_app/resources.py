"""The stores of one process, opened once."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from serve_app.accounts.accounts import AccountStore, UserStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog, AuditReader
from serve_app.accounts.auth import Authenticator
from serve_app.accounts.operator_sessions import OperatorSessions
from serve_app.accounts.operators import OperatorStore
from serve_app.accounts.sessions import SessionStore
from serve_app.accounts.sign_in import SignInLinks, SignIns, Throttle
from serve_app.accounts.usage import UsageReader
from serve_app.domain.errors import AtelierError, StoreUnavailable
from serve_app.domain.jobs import JobKind
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.deletion import Deletions
from serve_app.jobs.history import DeadLetters, JobHistory, JobReader
from serve_app.jobs.images import ImageAccess, ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.polling import JobWaits, Poller
from serve_app.jobs.previews import PreviewStore
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.samples import LoraSamples
from serve_app.jobs.workers import RecentAdapters, WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.registration import UploadPlaces
from serve_app.loras.registry import AdapterGrants, AdapterRegistry
from serve_app.loras.stored_weights import LoraWeights
from serve_app.loras.vocabulary import Vocabulary
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import AccountRecords
from serve_app.operations.checks import Check
from serve_app.operations.housekeeping import SweepLock
from serve_app.operations.reports import OperatorReader
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.keys import redis_key
from serve_app.store.measures import Measures, MemoryReserve, RedisMemory
from serve_app.store.redis_client import connect
from serve_app.store.storage import DiskReserve, close_to_others
from serve_app.tracing import Traces, open_traces

_log = logging.getLogger(__name__)

T = TypeVar("T")

INSPECTIONS_AT_ONCE = 2

Hint = Callable[[JobKind, str], Awaitable[None]]
"""Receives the kind and id of each accepted job, so that an idle replica starts at once. It may be lost, late or refused."""

KeepsWorker = Callable[[JobKind], Awaitable[bool]]


async def never(_kind: JobKind) -> bool:
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The stores of one service. `redis_url` is the server in use, the embedded one included."""

    settings: Settings
    redis_url: str
    queue: JobQueue
    jobs: JobReader
    job_history: JobHistory
    queue_stats: QueueStats
    recent_adapters: RecentAdapters
    image_access: ImageAccess
    dead_letters: DeadLetters
    poller: Poller
    waits: JobWaits
    accounts: AccountStore
    api_keys: ApiKeyStore
    auth: Authenticator
    sessions: SessionStore
    sign_ins: SignIns
    sign_in_links: SignInLinks
    users: UserStore
    operators: OperatorStore
    operator_reader: OperatorReader
    audit_reader: AuditReader
    operator_sessions: OperatorSessions
    operator_links: SignInLinks
    throttle: Throttle
    usage: UsageReader
    catalog: CatalogReader
    applied_catalog: AppliedCatalog
    adapter_registry: AdapterRegistry
    adapter_grants: AdapterGrants
    vocabulary: Vocabulary
    images: ImageStore
    disk: DiskReserve
    memory: MemoryReserve
    weights: WeightStore
    uploads: UploadPlaces
    lora_weights: LoraWeights
    lora_samples: LoraSamples
    sweep_lock: SweepLock
    audit: AuditLog
    deletions: Deletions
    account_records: AccountRecords
    moderation: Moderation
    previews: PreviewStore
    workers: WorkerStatus
    measures: Measures
    traces: Traces
    keeps_worker: KeepsWorker = never
    """Whether the deployment keeps a worker of this kind also without work."""
    max_rank: int = DEFAULT_MAX_RANK
    """Of LoRAs that are registered: what the generators take."""
    hint: Hint | None = None
    check_machines: Callable[[], list[Check]] | None = None
    """Asks every machine of the deployment what the doctor compares; blocks. None where there is only this one."""
    inspections: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(INSPECTIONS_AT_ONCE))
    """Places for processes that read customers' files, each with limits of its own."""
    background: set[asyncio.Task[Any]] = field(default_factory=lambda: set[asyncio.Task[Any]]())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run work that outlives its caller; closing waits for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self._forget)
        return task

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end, even when the caller is canceled: its client may disconnect."""
        return await asyncio.shield(self.spawn(work))

    async def check_space(self) -> RedisMemory | None:
        """Return Redis's memory, if known.

        Raises `StoreUnavailable` while a disk or Redis has only its reserve left.
        """
        await self.disk.check()
        return await self.memory.check()

    async def ensure_redis(self) -> None:
        """Start the embedded Redis if it is not running; never a server that the settings name."""
        if not self.settings.redis_url:
            await asyncio.to_thread(ensure_redis, self.settings.data_dir)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, AtelierError):  # an AtelierError goes to the caller
            _log.warning("background work ended with %s", type(error).__name__)


@asynccontextmanager
async def open_resources(
    settings: Settings,
    *,
    hint: Hint | None = None,
    keeps_worker: KeepsWorker = never,
    max_rank: int = DEFAULT_MAX_RANK,
    check_machines: Callable[[], list[Check]] | None = None,
) -> AsyncGenerator[Resources]:
    """Open the stores; start the embedded Redis if the settings name none.

    Raises `StoreUnavailable`, `CatalogError`, `TracesUnavailable`.
    """
    await asyncio.to_thread(close_to_others, settings.data_dir)
    redis_url = settings.redis_url or (await asyncio.to_thread(ensure_redis, settings.data_dir)).url
    traces = open_traces(settings)
    client = connect(redis_url, connections=settings.redis_connections, wait=settings.longest_redis_wait)
    try:
        measures = Measures(client)
        images = ImageStore(settings, measures)
        uploads, weights = UploadPlaces(settings.data_dir), WeightStore(settings)
        resources = Resources(
            settings=settings,
            redis_url=redis_url,
            queue=JobQueue(client, settings),
            jobs=(jobs := JobReader(client)),
            job_history=JobHistory(client),
            queue_stats=QueueStats(client),
            recent_adapters=RecentAdapters(client),
            image_access=ImageAccess(client),
            dead_letters=DeadLetters(client),
            poller=Poller(client, settings),
            waits=JobWaits(jobs, most=settings.waiting_polls),
            accounts=AccountStore(client, settings),
            api_keys=ApiKeyStore(client, settings),
            auth=Authenticator(client, settings),
            sessions=SessionStore(client, settings),
            sign_ins=SignIns(client),
            sign_in_links=SignInLinks(client),
            users=UserStore(client),
            operators=OperatorStore(client),
            operator_reader=OperatorReader(client),
            audit_reader=AuditReader(client),
            operator_sessions=OperatorSessions(client),
            operator_links=SignInLinks(client, "operator_link", "operator"),
            throttle=Throttle(client),
            usage=UsageReader(client),
            catalog=CatalogReader(client),
            applied_catalog=(applied_catalog := AppliedCatalog(client, settings)),
            adapter_registry=AdapterRegistry(client, settings),
            adapter_grants=AdapterGrants(client),
            vocabulary=Vocabulary(applied_catalog),
            images=images,
            disk=DiskReserve(settings, images.local_folder, uploads.sweep, weights.make_space),
            memory=MemoryReserve(client),
            weights=weights,
            uploads=uploads,
            lora_weights=LoraWeights(client),
            lora_samples=LoraSamples(client),
            sweep_lock=SweepLock(client),
            audit=AuditLog(client, settings),
            deletions=Deletions(client, images),
            account_records=AccountRecords(client),
            moderation=Moderation(settings),
            previews=PreviewStore(client),
            workers=WorkerStatus(client),
            measures=measures,
            traces=traces,
            keeps_worker=keeps_worker,
            max_rank=max_rank,
            hint=hint,
            check_machines=check_machines,
        )
        await _refuse_older_jobs(client)
        await _seed_once(applied_catalog)
        sending = asyncio.create_task(measures.send_forever())
        sweeping = asyncio.create_task(uploads.sweep_forever())
        try:
            yield resources
        finally:
            await asyncio.gather(*resources.background, return_exceptions=True)
            sending.cancel()
            sweeping.cancel()
            await measures.send_last()
            if traces.is_on:
                await asyncio.to_thread(traces.close)
    finally:
        await client.aclose()


async def _refuse_older_jobs(client: Any) -> None:
    """Raise `StoreUnavailable` for a Redis with jobs of a version whose records this one does not read."""
    try:
        has_older_jobs = await client.exists(redis_key("sequence"))
    except StoreUnavailable:
        return
    if has_older_jobs:
        raise StoreUnavailable("this Redis holds jobs of an earlier version of the service: begin with an empty one")


async def _seed_once(catalog: AppliedCatalog) -> None:
    """Apply the catalog file to a Redis without one.

    While Redis is away, that is left to the next process that opens it.
    """
    try:
        await catalog.apply_file_once()
    except StoreUnavailable as outage:
        _log.info("the catalog was not looked for: %s", outage.message)
