"""The parts of a service as the processes compose them, in one place for tests."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from starlette.types import ASGIApp

from serve_app.accounts.accounts import AccountStore, UserStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog, AuditReader
from serve_app.accounts.auth import Authenticator
from serve_app.accounts.operators import OperatorStore
from serve_app.accounts.sessions import SessionStore
from serve_app.accounts.sign_in import SignInLinks, SignIns, Throttle
from serve_app.accounts.usage import UsageReader
from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.app import create_app
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.deletion import Deletions
from serve_app.jobs.history import DeadLetters, JobHistory, JobReader
from serve_app.jobs.images import ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.polling import JobWaits, Poller
from serve_app.jobs.previews import PreviewStore
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.samples import LoraSamples
from serve_app.jobs.submit import Hint, Submission
from serve_app.jobs.workers import RecentAdapters, WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.loras.registration import LoraRegistration, UploadPlaces
from serve_app.loras.registry import AdapterGrants, AdapterRegistry
from serve_app.loras.stored_weights import LoraWeights
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import AccountDeletion, AccountRecords
from serve_app.operations.housekeeping import Housekeeping
from serve_app.operations.overview import KeepsWorker, Readiness, never, readiness
from serve_app.operations.reports import OperatorReader
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.measures import Measures
from serve_app.store.process import Background, open_process
from serve_app.store.storage import Space
from serve_app.tracing import Traces
from serve_app.worker.attempt import WorkerParts

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """A service's parts, one of each by a short name, and what its processes compose of them."""

    settings: Settings
    redis_url: str
    for_accounts: AccountParts
    for_loras: LoraParts
    for_jobs: JobParts
    for_operations: OperationParts
    for_workers: WorkerParts
    for_housekeeping: Housekeeping
    background: Background
    measures: Measures
    traces: Traces
    accounts: AccountStore
    users: UserStore
    api_keys: ApiKeyStore
    auth: Authenticator
    sessions: SessionStore
    sign_ins: SignIns
    sign_in_links: SignInLinks
    throttle: Throttle
    usage: UsageReader
    audit: AuditLog
    catalog: CatalogReader
    applied_catalog: AppliedCatalog
    adapter_registry: AdapterRegistry
    adapter_grants: AdapterGrants
    weights: WeightStore
    uploads: UploadPlaces
    lora_weights: LoraWeights
    lora_samples: LoraSamples
    registration: LoraRegistration
    queue: JobQueue
    queue_stats: QueueStats
    jobs: JobReader
    job_history: JobHistory
    dead_letters: DeadLetters
    poller: Poller
    waits: JobWaits
    images: ImageStore
    space: Space
    previews: PreviewStore
    moderation: Moderation
    submission: Submission
    deletions: Deletions
    operators: OperatorStore
    operator_sessions: SessionStore
    operator_links: SignInLinks
    operator_reader: OperatorReader
    audit_reader: AuditReader
    account_records: AccountRecords
    account_deletion: AccountDeletion
    recent_adapters: RecentAdapters
    workers: WorkerStatus
    keeps_worker: KeepsWorker

    def with_parts(self, **parts: Any) -> "Resources":
        """The same service with other parts, by their short names, wherever a process uses them."""
        return _exchange(self, {id(getattr(self, name)): part for name, part in parts.items()})

    def app(self, *, requests_waiting: int = 1_000) -> ASGIApp:
        """The application of the API and the pages."""
        return create_app(
            self.settings,
            accounts=self.for_accounts,
            loras=self.for_loras,
            jobs=self.for_jobs,
            operations=self.for_operations,
            requests_waiting=requests_waiting,
        )

    async def readiness(self) -> Readiness:
        """What this service can do now."""
        return await readiness(
            self.queue_stats, self.images, self.space, self.workers, self.keeps_worker, self.settings
        )


@asynccontextmanager
async def open_resources(
    settings: Settings, *, hint: Hint | None = None, keeps_worker: KeepsWorker = never
) -> AsyncGenerator[Resources]:
    """Open what all processes of a service stand on, in this one, and compose their parts."""
    async with open_process(settings) as process:
        accounts = AccountParts(process)
        loras = LoraParts(process, accounts)
        jobs = JobParts(process, accounts, loras, hint=hint)
        operations = OperationParts(process, accounts, jobs, keeps_worker=keeps_worker)
        workers, housekeeping = WorkerParts(process), Housekeeping(process)
        workers.queue = housekeeping.queue = jobs.queue
        workers.images = housekeeping.images = jobs.images
        workers.previews, workers.moderation = jobs.previews, jobs.submission.moderation
        workers.weights = loras.weights
        await loras.applied_catalog.apply_file_once()
        yield Resources(
            settings=settings,
            redis_url=settings.redis_url or ensure_redis(settings.data_dir).url,
            for_accounts=accounts,
            for_loras=loras,
            for_jobs=jobs,
            for_operations=operations,
            for_workers=workers,
            for_housekeeping=housekeeping,
            background=process.background,
            measures=process.measures,
            traces=process.traces,
            accounts=accounts.store,
            users=accounts.users,
            api_keys=accounts.api_keys,
            auth=accounts.auth,
            sessions=accounts.sessions,
            sign_ins=accounts.sign_ins,
            sign_in_links=accounts.links,
            throttle=accounts.throttle,
            usage=accounts.usage,
            audit=accounts.audit,
            catalog=loras.catalog,
            applied_catalog=loras.applied_catalog,
            adapter_registry=loras.registry,
            adapter_grants=loras.grants,
            weights=loras.weights,
            uploads=loras.uploads,
            lora_weights=loras.stored_weights,
            lora_samples=loras.samples,
            registration=loras.registration,
            queue=jobs.queue,
            queue_stats=jobs.stats,
            jobs=jobs.reader,
            job_history=jobs.history,
            dead_letters=jobs.dead_letters,
            poller=jobs.poller,
            waits=jobs.waits,
            images=jobs.images,
            space=jobs.space,
            previews=jobs.previews,
            moderation=jobs.submission.moderation,
            submission=jobs.submission,
            deletions=jobs.deletion.deletions,
            operators=operations.operators,
            operator_sessions=operations.sessions,
            operator_links=operations.links,
            operator_reader=operations.reader,
            audit_reader=operations.audit,
            account_records=operations.deletion.records,
            account_deletion=operations.deletion,
            recent_adapters=workers.recent_adapters,
            workers=operations.workers,
            keeps_worker=keeps_worker,
        )


def _exchange(parts: P, exchanged: dict[int, Any]) -> P:
    """Parts, and what is composed of them, with some of them exchanged."""
    found = {each.name: getattr(parts, each.name) for each in fields(parts)} if is_dataclass(parts) else vars(parts)
    changed = {
        name: exchanged[id(part)] if id(part) in exchanged else _exchange(part, exchanged)
        for name, part in found.items()
        if id(part) in exchanged or is_dataclass(part) or isinstance(part, _COMPOSED)
    }
    if is_dataclass(parts):
        return replace(parts, **changed)  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportReturnType]
    other = copy(parts)
    vars(other).update(changed)
    return other


_COMPOSED = (AccountParts, LoraParts, JobParts, OperationParts, WorkerParts, Housekeeping)
