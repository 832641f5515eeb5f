"""The parts of a service as the processes compose them, in one place for tests."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

from starlette.types import ASGIApp

from serve_app.accounts.accounts import AccountStore, OperatorStore, UserStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.auth import Authenticator
from serve_app.accounts.sessions import SessionStore
from serve_app.accounts.sign_in import SignInLinks, SignIns, Throttle
from serve_app.accounts.usage import UsageReader
from serve_app.api.jobs.records import job_record
from serve_app.api.parts import AccountParts, JobParts, LoraParts, OperationParts
from serve_app.app import create_app
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.deletion import Deletions
from serve_app.jobs.history import DeadLetters, JobHistory, JobReader
from serve_app.jobs.images import ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.polling import Poller
from serve_app.jobs.previews import PreviewStore
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.samples import LoraSamples
from serve_app.jobs.submit import Hint, Submission
from serve_app.jobs.uploads import UploadRecords
from serve_app.jobs.waits import JobWaits
from serve_app.jobs.workers import RecentAdapters, WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import AdapterGrants, AdapterRegistry, CatalogReader
from serve_app.loras.registration import LoraRegistration, UploadPlaces
from serve_app.loras.stored_weights import LoraWeights
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import AccountDeletion, AccountRecords
from serve_app.operations.housekeeping import Housekeeping
from serve_app.operations.readiness import KeepsWorker, Readiness, never
from serve_app.operations.reports import OperatorReader
from serve_app.settings import Settings
from serve_app.store.measures import Measures
from serve_app.store.process import Background, Process, open_process
from serve_app.store.storage import Space
from serve_app.tracing import Traces
from serve_app.webhooks.endpoints import WebhookStore
from serve_app.worker.attempt import WorkerParts

P = TypeVar("P")


class At(Generic[P]):
    """A short name for the part at this path of what the processes compose."""

    def __init__(self, path: str) -> None:
        self._read = attrgetter(path)

    def __get__(self, resources: "Resources", _: type) -> P:
        return self._read(resources)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """A service's parts, one of each by a short name, and what its processes compose of them."""

    process: Process
    for_accounts: AccountParts
    for_loras: LoraParts
    for_jobs: JobParts
    for_operations: OperationParts
    for_workers: WorkerParts
    for_housekeeping: Housekeeping

    settings = At[Settings]("process.settings")
    redis_url = At[str]("process.redis_url")
    background = At[Background]("process.background")
    measures = At[Measures]("process.measures")
    traces = At[Traces]("process.traces")
    accounts = At[AccountStore]("for_accounts.store")
    users = At[UserStore]("for_accounts.users")
    api_keys = At[ApiKeyStore]("for_accounts.api_keys")
    auth = At[Authenticator]("for_accounts.auth")
    sessions = At[SessionStore]("for_accounts.sessions")
    sign_ins = At[SignIns]("for_accounts.sign_ins")
    sign_in_links = At[SignInLinks]("for_accounts.links")
    throttle = At[Throttle]("for_accounts.throttle")
    usage = At[UsageReader]("for_accounts.usage")
    audit = At[AuditLog]("for_accounts.audit")
    catalog = At[CatalogReader]("for_loras.catalog")
    applied_catalog = At[AppliedCatalog]("for_loras.applied_catalog")
    adapter_registry = At[AdapterRegistry]("for_loras.registry")
    adapter_grants = At[AdapterGrants]("for_loras.grants")
    weights = At[WeightStore]("for_loras.weights")
    uploads = At[UploadPlaces]("for_loras.uploads")
    lora_weights = At[LoraWeights]("for_loras.stored_weights")
    lora_samples = At[LoraSamples]("for_loras.samples")
    registration = At[LoraRegistration]("for_loras.registration")
    queue = At[JobQueue]("for_jobs.queue")
    queue_stats = At[QueueStats]("for_jobs.stats")
    jobs = At[JobReader]("for_jobs.reader")
    job_history = At[JobHistory]("for_jobs.history")
    dead_letters = At[DeadLetters]("for_jobs.dead_letters")
    poller = At[Poller]("for_jobs.poller")
    waits = At[JobWaits]("for_jobs.waits")
    images = At[ImageStore]("for_jobs.images")
    uploaded = At[UploadRecords]("for_jobs.uploads.records")
    space = At[Space]("for_jobs.space")
    previews = At[PreviewStore]("for_jobs.previews")
    webhooks = At[WebhookStore]("for_jobs.webhooks")
    moderation = At[Moderation]("for_jobs.submission.moderation")
    submission = At[Submission]("for_jobs.submission")
    deletions = At[Deletions]("for_jobs.deletion.deletions")
    operators = At[OperatorStore]("for_operations.operators")
    operator_sessions = At[SessionStore]("for_operations.sessions")
    operator_links = At[SignInLinks]("for_operations.links")
    operator_reader = At[OperatorReader]("for_operations.reader")
    account_records = At[AccountRecords]("for_operations.deletion.records")
    account_deletion = At[AccountDeletion]("for_operations.deletion")
    recent_adapters = At[RecentAdapters]("for_workers.recent_adapters")
    workers = At[WorkerStatus]("for_operations.workers")
    keeps_worker = At[KeepsWorker]("for_operations.state.keeps_worker")

    def with_parts(self, **parts: Any) -> "Resources":
        """Return the same service with other parts, by their short names, wherever a process uses them."""
        return _exchange(self, {id(getattr(self, name)): part for name, part in parts.items()})

    def app(self, *, requests_waiting: int = 1_000) -> ASGIApp:
        """Make the application of the API and the pages."""
        return create_app(
            self.settings,
            accounts=self.for_accounts,
            loras=self.for_loras,
            jobs=self.for_jobs,
            operations=self.for_operations,
            requests_waiting=requests_waiting,
        )

    async def readiness(self) -> Readiness:
        """Read what this service can do now."""
        return await self.for_operations.state.readiness()


@asynccontextmanager
async def open_resources(
    settings: Settings, *, hint: Hint | None = None, keeps_worker: KeepsWorker = never
) -> AsyncGenerator[Resources]:
    """Open what all processes of a service stand on, in this one, and compose their parts."""
    async with open_process(settings) as process:
        accounts = AccountParts(process)
        loras = LoraParts(process, accounts)
        jobs = JobParts(process, accounts, loras, hint=hint)
        operations = OperationParts(process, accounts, loras, jobs, keeps_worker=keeps_worker)
        workers, housekeeping = WorkerParts(process), Housekeeping(process, job_record)
        workers.queue = housekeeping.queue = jobs.queue
        workers.images = housekeeping.images = jobs.images
        workers.previews, workers.moderation = jobs.previews, jobs.submission.moderation
        workers.weights = loras.weights
        await loras.applied_catalog.apply_file_once()
        yield Resources(
            process=process,
            for_accounts=accounts,
            for_loras=loras,
            for_jobs=jobs,
            for_operations=operations,
            for_workers=workers,
            for_housekeeping=housekeeping,
        )


def _exchange(parts: P, exchanged: dict[int, Any]) -> P:
    """Return the parts, and what is composed of them, with some of them exchanged."""
    found = {each.name: getattr(parts, each.name) for each in fields(parts)} if is_dataclass(parts) else vars(parts)
    changed = {
        name: exchanged[id(part)] if id(part) in exchanged else _exchange(part, exchanged)
        for name, part in found.items()
        if id(part) in exchanged or is_dataclass(part) or isinstance(part, _COMPOSED)
    }
    if is_dataclass(parts):
        return replace(cast(Any, parts), **changed)
    other = copy(parts)
    vars(other).update(changed)
    return other


_COMPOSED = (AccountParts, LoraParts, JobParts, OperationParts, WorkerParts, Housekeeping)
