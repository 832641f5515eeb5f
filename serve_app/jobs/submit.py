"""Submits a request: one durable accept, which checks permission, then a hint to a replica."""

import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import sqrt
from typing import Any

from serve_app import tracing
from serve_app.domain.accounts import Caller, Plan
from serve_app.domain.digests import Digests
from serve_app.domain.errors import Forbidden, InvalidParameter, NotFound
from serve_app.domain.jobs import Job, JobKind, NewJob, StoredImage, new_job_id
from serve_app.domain.requests import (
    MAX_RANDOM_SEED,
    GenerationRequest,
    Request,
    UpscaleRequest,
    Variant,
    fingerprint,
)
from serve_app.jobs.acceptance import Acceptance
from serve_app.jobs.history import JobReader
from serve_app.jobs.images import ImageStore
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.records import JOB_BYTES
from serve_app.jobs.uploads import UploadRecords
from serve_app.jobs.wishes import Wish, Wishes
from serve_app.log import log_ids
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import Settings
from serve_app.store.measures import RedisMemory
from serve_app.store.process import Background, to_its_end
from serve_app.store.storage import Space

log = logging.getLogger(__name__)

ADAPTER_PREFIX = "model_"
"""Ids in a catalog begin with this, by convention."""
MAX_OUTPUT_PIXELS = 16_000_000
USUAL_JOB_BYTES = JOB_BYTES + 512
"""A job whose prompts have a thousand characters together takes this many bytes of Redis."""
ONE_DAY = timedelta(days=1)
"""Stored bytes are counted by days: a day's last bytes stop counting up to a day after its first could."""
MAX_QUEUE_SHARE = 8.0
"""A plan's share of a busy queue is the root of its rate over the lowest plan's, and at most this."""


Hint = Callable[[str, str], Coroutine[Any, Any, None]]
"""Receives the pool and id of each accepted job, so that an idle replica starts at once. It may be lost or late."""


@dataclass(frozen=True, slots=True)
class Call:
    """What an HTTP request says besides what it asks for; in the console there is no idempotency key."""

    request_id: str = ""
    idempotency_key: str | None = None
    seed_is_given: bool = False
    """Whether the idempotency key stands for the request's seeds too, or for any that the service draws."""
    webhook: str = ""
    """This checked address is told of the job's end."""
    start_within: int | None = None
    """The door's own limit, for a wish that has none: a repeat need not come with it."""


NO_CALL = Call()


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Accepts the jobs that callers ask for."""

    settings: Settings
    queue: JobQueue
    jobs: JobReader
    uploads: UploadRecords
    catalog: CatalogReader
    images: ImageStore
    space: Space
    moderation: Moderation
    traces: tracing.Traces
    background: Background
    wishes: Wishes
    hint: Hint | None = None

    @to_its_end
    async def generate(self, caller: Caller, request: GenerationRequest, call: Call = NO_CALL) -> Acceptance:
        """Accept a generation. A client that disconnects does not stop it.

        Raises `Forbidden` alike for an adapter that does not exist and one that is not the account's; `QueueFull`,
        `IdempotencyConflict`, `StoreUnavailable`.
        """
        if not caller.may_use(request.lora_id):  # the answer is the same whether the LoRA exists or not
            raise Forbidden(f"This API key may only be used with {', '.join(sorted(caller.adapters or ()))}.")
        job_id = new_job_id(JobKind.GENERATION)
        await self._check_prompt(caller, request, job_id)
        try:
            return await self._accept(caller, request, call, job_id)
        except Forbidden as error:
            raise Forbidden(await self._id_of_name(caller, request.lora_id) or error.message) from None

    @to_its_end
    async def create(self, caller: Caller, wish: Wish, call: Call = NO_CALL) -> Acceptance:
        """Accept what `POST /v1/jobs` asks for. A client that disconnects does not stop it.

        Raises what `Wishes.resolve` and `generate` raise, and `NotFound` for an image that is not the account's.
        """
        whole = replace(wish, start_within=wish.start_within or call.start_within)
        image, mask = [await self._picture(caller, wish, name) for name in ("image_id", "mask_image_id")]
        seed = secrets.randbelow(MAX_RANDOM_SEED) if wish.seed is None else wish.seed
        try:
            request, cost = await self.wishes.resolve(caller, whole, seed=seed, image=image, mask=mask)
        except Forbidden as error:
            named = [await self._id_of_name(caller, use.id, f"loras[{i}].id") for i, use in enumerate(wish.loras)]
            raise Forbidden(next(filter(None, named), error.message)) from None
        job_id = new_job_id(JobKind.GENERATION, "job")
        await self._check_prompt(caller, request, job_id, "prompt")
        accepted = await self._accept(caller, request, call, job_id, cost=cost, body=Digests.of(wish, repr(whole)))
        return replace(accepted, base_model=request.base_model)

    async def _picture(self, caller: Caller, wish: Wish, field: str) -> StoredImage | None:
        image_id: str | None = getattr(wish, field)
        if image_id is None:
            return None
        try:
            return await self.stored_image(caller, image_id)
        except NotFound:
            raise NotFound(f"{field}: your account has no such image") from None

    async def stored_image(self, caller: Caller, image_id: str, variant: Variant | None = None) -> StoredImage:
        """Return an image of the account: of a job of one interface, or of any job or uploaded where `variant` is None.

        Raises `NotFound`.
        """
        uploaded = await self.uploads.get(image_id, account_id=caller.account_id) if variant is None else None
        image = uploaded.image if uploaded else None
        if image is None and (found := await self.jobs.image(image_id, account_id=caller.account_id, variant=variant)):
            _, image = found
        if image is None or not await self.images.exists(image.image_uri):
            raise NotFound("There is no such image.")
        return image

    @to_its_end
    async def upscale(
        self,
        caller: Caller,
        image_id: str,
        scale_factor: int = 2,
        call: Call = NO_CALL,
        *,
        of_any_job: bool = False,
        **asked: Any,
    ) -> Acceptance:
        """Accept an upscale of a stored image of the account, made on the caller's interface or by `of_any_job`.

        `asked` is what `POST /v1/jobs` may say besides. Raises `NotFound`, `InvalidParameter` over 16 megapixels, and
        what `generate` raises for the queue.
        """
        image = await self.stored_image(caller, image_id, None if of_any_job else caller.variant)
        request = UpscaleRequest(
            image_id=image_id,
            scale_factor=scale_factor,
            source_uri=image.image_uri,
            source_width=image.width,
            source_height=image.height,
            **asked,
        )
        if request.width * request.height > MAX_OUTPUT_PIXELS:
            raise InvalidParameter(
                f"scale_factor: {request.width}x{request.height} is over the limit of 16 megapixels for the output"
            )
        return await self._accept(caller, request, call, new_job_id(JobKind.UPSCALE))

    async def _check_prompt(
        self, caller: Caller, request: GenerationRequest, job_id: str, field: str | None = None
    ) -> None:
        """Raise `InvalidParameter` for a prompt that the operator's moderation refuses."""
        verdict = await self.moderation.prompt(
            account_id=caller.account_id,
            job_id=job_id,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
        )
        if not verdict.allowed:
            field = field or ("prompt" if caller.variant is Variant.A else "positive_prompt")
            refused = f"{field}: refused by this service's moderation"
            raise InvalidParameter(f"{refused}: {verdict.reason}" if verdict.reason else refused)

    async def _id_of_name(self, caller: Caller, lora_id: str, field: str | None = None) -> str:
        """Return a message with the ids of the adapters of a name; '' if the account may use no adapter of that name.

        The account's adapters are read for every name, so that the time does not tell whether a name exists.
        """
        if lora_id.startswith(ADAPTER_PREFIX):
            return ""
        usable = await self.catalog.adapters(caller.account_id)
        ids = [adapter.id for adapter in usable if adapter.name.casefold() == lora_id.strip().casefold()]
        field = field or ("lora_id" if caller.variant is Variant.A else "model_id")
        return f"{field}: must be an id, not a name; send {' or '.join(ids)}" if ids else ""

    async def _accept(self, caller: Caller, request: Request, call: Call, job_id: str, **of_the_job: Any) -> Acceptance:
        memory = await self.space.check()
        span = self._span(caller, job_id)
        new = replace(self._new_job(caller, request, call, span, memory, job_id), **of_the_job)
        if call.webhook:  # whoever repeats an idempotency key names the same address too
            new = replace(new, body=new.body.beside(call.webhook))
        acceptance = await self.queue.accept(new)
        span.end()
        self._announce(caller, acceptance.job, call.request_id, replayed=acceptance.replayed)
        return acceptance

    def _new_job(
        self,
        caller: Caller,
        request: Request,
        call: Call,
        span: tracing.Span,
        memory: RedisMemory | None,
        job_id: str,
    ) -> NewJob:
        sources = (request.image, request.mask) if isinstance(request, GenerationRequest) else (request,)
        return NewJob(
            job_id=job_id,
            variant=caller.variant,
            account_id=caller.account_id,
            request=request,
            idempotency_key=call.idempotency_key,
            body=fingerprint(request, seed_is_given=call.seed_is_given),
            queue_share=plan_queue_share(caller.plan, self.settings.plan_table.values()),
            rate_token=caller.rate_token,
            loras=request.loras if isinstance(request, GenerationRequest) else (),
            key_id=caller.key_id,
            plan=caller.plan.name,
            request_id=call.request_id,
            traceparent=span.traceparent,
            webhook=call.webhook,
            pictures=tuple(source.image_id for source in sources if source),
            max_stored=self._most_stored(caller.plan, memory),
        )

    def _most_stored(self, plan: Plan, memory: RedisMemory | None) -> int | None:
        """Return how many bytes an account's stored jobs may take on the plan's interface.

        That is its share of Redis, or, where that is less, what the plan admits until the first of them expire. None
        where Redis has no limit.
        """
        if memory is None or not memory.limit:
            return None
        admitted = plan.requests_in(self.settings.longest_record_life + ONE_DAY)
        return max(round(self.settings.account_share * memory.limit), admitted * USUAL_JOB_BYTES)

    def _span(self, caller: Caller, job_id: str) -> tracing.Span:
        attributes = {"job_id": job_id, "account_id": caller.account_id, "interface": str(caller.variant)}
        return self.traces.start("accept", tracing.caller(), kind="server", attributes=attributes)

    def _announce(self, caller: Caller, job: Job, request_id: str, *, replayed: bool = False) -> None:
        """Log the acceptance, and give an idle replica a hint of a new job."""
        with log_ids(request_id=request_id, account_id=caller.account_id, job_id=job.id):
            log.info("job %s: %s", job.id, "replayed" if replayed else "accepted")
        if self.hint is not None and not replayed:
            self.background.spawn(self.hint(job.pool, job.id))


def plan_queue_share(plan: Plan, plans: Iterable[Plan]) -> float:
    """Return a plan's share of a busy queue: 1 for the lowest of its variant."""
    rates = [_rate(each) for each in plans if each.variant == plan.variant]
    return min(MAX_QUEUE_SHARE, max(1.0, sqrt(_rate(plan) / min(rates))))


def _rate(plan: Plan) -> float:
    return plan.limit / plan.window.total_seconds()
