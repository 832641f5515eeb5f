"""The parts of the service that the API, the pages and the commands use, composed by concern."""

from collections.abc import Awaitable, Callable

from serve_app.accounts.accounts import AccountStore, OperatorStore, UserStore
from serve_app.accounts.api_keys import ApiKeyStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.auth import Authenticator
from serve_app.accounts.sessions import CUSTOMERS, OPERATORS, SessionStore
from serve_app.accounts.sign_in import SignInLinks, SignIns, Throttle
from serve_app.accounts.usage import UsageReader
from serve_app.engine_options import DEFAULT_MAX_RANK
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.deletion import Deletions, JobDeletion
from serve_app.jobs.history import DeadLetters, JobHistory, JobReader
from serve_app.jobs.images import ImageAccess, ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.polling import Poller
from serve_app.jobs.previews import PreviewStore
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.resolution import Resolution
from serve_app.jobs.samples import LoraSamples
from serve_app.jobs.submit import Hint, Submission
from serve_app.jobs.uploads import UploadRecords, Uploads
from serve_app.jobs.waits import JobWaits, SharedCalls
from serve_app.jobs.workers import WorkerStatus
from serve_app.loras.account_loras import AccountLoras
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import AdapterGrants, AdapterRegistry, CatalogReader
from serve_app.loras.registration import LoraRegistration, UploadPlaces
from serve_app.loras.stored_weights import LoraFiles, LoraWeights
from serve_app.loras.vocabulary import Vocabulary
from serve_app.loras.weights import WeightStore
from serve_app.operations.account_deletion import AccountDeletion
from serve_app.operations.checks import Check
from serve_app.operations.operator_acts import OperatorActs
from serve_app.operations.readiness import KeepsWorker, ServiceState, never
from serve_app.operations.reports import OperatorReader
from serve_app.store.measures import MemoryReserve
from serve_app.store.process import Process
from serve_app.store.storage import DiskReserve, Space
from serve_app.webhooks.endpoints import WebhookStore


class AccountParts:
    """Accounts, how their users sign in and their programs authenticate, and what they used."""

    def __init__(self, process: Process) -> None:
        redis, settings = process.redis, process.settings
        self.store = AccountStore(redis, settings)
        self.users = UserStore(redis)
        self.api_keys = ApiKeyStore(redis, settings)
        self.auth = Authenticator(redis, settings)
        self.audit = AuditLog(redis, settings)
        self.sessions = SessionStore(redis, CUSTOMERS)
        self.sign_ins = SignIns(redis, self.audit)
        self.links = SignInLinks(redis, CUSTOMERS)
        self.throttle = Throttle(redis)
        self.usage = UsageReader(redis)


class LoraParts:
    """The catalog, and what accounts and operators do with LoRAs."""

    def __init__(self, process: Process, accounts: AccountParts, *, max_rank: int = DEFAULT_MAX_RANK) -> None:
        """Compose the parts. LoRAs of at most `max_rank` are registered."""
        redis, settings = process.redis, process.settings
        self.max_rank = max_rank
        self.catalog = CatalogReader(redis)
        self.applied_catalog = AppliedCatalog(redis, settings)
        self.vocabulary = Vocabulary(self.applied_catalog)
        self.registry = AdapterRegistry(redis, settings)
        self.grants = AdapterGrants(redis)
        self.weights = WeightStore(settings)
        self.stored_weights = LoraWeights(redis, LoraFiles(settings))
        self.samples = LoraSamples(redis)
        self.uploads = UploadPlaces(settings.data_dir)
        self.registration = LoraRegistration(
            settings=settings,
            applied_catalog=self.applied_catalog,
            catalog=self.catalog,
            registry=self.registry,
            weights=self.stored_weights,
            draw_later=self.samples.ask,
            max_rank=max_rank,
        )
        self.owned = AccountLoras(
            settings=settings,
            catalog=self.catalog,
            registration=self.registration,
            registry=self.registry,
            grants=self.grants,
            weights=self.weights,
            accounts=accounts.store,
            audit=accounts.audit,
            background=process.background,
        )


class JobParts:
    """Jobs from their acceptance to their deletion, and their images."""

    def __init__(self, process: Process, accounts: AccountParts, loras: LoraParts, *, hint: Hint | None = None) -> None:
        """Compose the parts. `hint` is told of each accepted job. Raises `BadModeration`."""
        redis, settings = process.redis, process.settings
        self.queue = JobQueue(redis, settings)
        self.stats = QueueStats(redis)
        self.reader = JobReader(redis)
        self.history = JobHistory(redis)
        self.dead_letters = DeadLetters(redis, settings)
        self.poller = Poller(redis, settings)
        self.images = ImageStore(settings, process.measures)
        self.access = ImageAccess(redis)
        make_space = (loras.uploads.sweep, loras.weights.make_space)
        self.space = Space(DiskReserve(settings, self.images.local_folder, *make_space), MemoryReserve(redis))
        self.previews = PreviewStore(redis)
        moderation = Moderation(settings)
        shown = self.previews if settings.previews and not moderation.is_on else None
        self.shared_calls = SharedCalls(redis)
        self.waits = JobWaits(self.reader, most=settings.waiting_polls, previews=shown)
        self.webhooks = WebhookStore(redis, settings)
        self.deletion = JobDeletion(
            deletions=Deletions(redis, self.images),
            images=self.images,
            audit=accounts.audit,
            background=process.background,
        )
        self.uploads = Uploads(
            settings=settings,
            records=UploadRecords(redis, settings),
            jobs=self.reader,
            images=self.images,
            deletion=self.deletion,
            background=process.background,
        )
        self.submission = Submission(
            settings=settings,
            queue=self.queue,
            catalog=loras.catalog,
            space=self.space,
            moderation=moderation,
            traces=process.traces,
            background=process.background,
            resolution=Resolution(loras.catalog, loras.applied_catalog, self.uploads, loras.max_rank),
            hint=hint,
        )


class OperationParts:
    """What operators see and do, and the deletion of accounts."""

    def __init__(
        self,
        process: Process,
        accounts: AccountParts,
        loras: LoraParts,
        jobs: JobParts,
        *,
        keeps_worker: KeepsWorker = never,
        check_machines: Callable[[], Awaitable[list[Check]]] | None = None,
    ) -> None:
        """Compose the parts.

        `check_machines` asks every machine of the deployment what the doctor compares. It is None where there is only
        this one.
        """
        redis = process.redis
        self.operators = OperatorStore(redis)
        self.sessions = SessionStore(redis, OPERATORS)
        self.links = SignInLinks(redis, OPERATORS)
        self.reader = OperatorReader(redis)
        self.acts = OperatorActs(
            accounts=accounts.store,
            sessions=accounts.sessions,
            links=accounts.links,
            queue=jobs.queue,
            jobs=jobs.reader,
            dead_letters=jobs.dead_letters,
            audit=accounts.audit,
        )
        self.deletion = AccountDeletion(process, jobs.images)
        self.workers = WorkerStatus(redis)
        self.measures = process.measures
        self.state = ServiceState(
            settings=process.settings,
            measures=process.measures,
            stats=jobs.stats,
            images=jobs.images,
            space=jobs.space,
            workers=self.workers,
            catalog=loras.applied_catalog,
            keeps_worker=keeps_worker,
        )
        self.check_machines = check_machines
