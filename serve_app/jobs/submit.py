"""Submits what a caller asks for: resolved, accepted by one durable script, then a hint to a replica."""

import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import sqrt
from typing import Any

from serve_app import tracing
from serve_app.domain.accounts import Caller, Plan
from serve_app.domain.digests import NO_DIGESTS, Digests
from serve_app.domain.errors import Forbidden, InvalidParameter, NotFound
from serve_app.domain.jobs import Job, JobKind, NewJob, new_job_id
from serve_app.domain.requests import Draft, Request, UpscaleDraft, Variant, digests_of, loras_of
from serve_app.jobs.acceptance import Acceptance
from serve_app.jobs.moderation import Moderation
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.records import JOB_BYTES
from serve_app.jobs.resolution import Resolution, Resolved
from serve_app.log import log_ids
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import Settings
from serve_app.store.measures import RedisMemory
from serve_app.store.process import Background, to_its_end
from serve_app.store.storage import Space

log = logging.getLogger(__name__)

ADAPTER_PREFIX = "model_"
"""Ids in a catalog begin with this, by convention."""
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
    webhook: str = ""
    """This checked address is told of the job's end."""
    base_url: str = ""
    """The caller's address of this service: those of images begin with it in what the webhook is told."""
    start_within: int | None = None
    """The door's own limit, for a draft that has none: a repeat need not come with it."""


NO_CALL = Call()
_OWN_NAMES = {Variant.A: ("prompt", "lora_id"), Variant.B: ("positive_prompt", "model_id")}
"""What interfaces A and B call a prompt and a LoRA, for which all other doors have the names of `POST /v1/jobs`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Accepts the jobs that callers ask for."""

    settings: Settings
    queue: JobQueue
    catalog: CatalogReader
    space: Space
    moderation: Moderation
    traces: tracing.Traces
    background: Background
    resolution: Resolution
    hint: Hint | None = None

    @to_its_end
    async def submit(self, caller: Caller, draft: Draft, call: Call = NO_CALL) -> Acceptance:
        """Accept what a caller asks for, of either kind, by whichever door. A client that disconnects does not stop it.

        The repeat of an accepted call gives its job, also where the same draft would be refused by now. Raises what
        `Resolution.resolve` raises; `QueueFull`, `IdempotencyConflict`, `StoreUnavailable`.
        """
        kind = JobKind.UPSCALE if isinstance(draft, UpscaleDraft) else JobKind.GENERATION
        job_id = new_job_id(kind, "gen" if draft.interface else "job")
        try:
            whole = replace(draft, start_within=draft.start_within or call.start_within)
            resolved = await self.resolution.resolve(caller, whole)
            await self._check_prompt(caller, draft, job_id)
            return await self._accept(caller, draft, resolved, call, job_id)
        except Forbidden as error:
            raise Forbidden(await self._ids_of_names(caller, draft) or error.message) from None
        except (InvalidParameter, NotFound):
            if call.idempotency_key is None:
                raise
            earlier = await self.queue.find_accepted(
                caller, call.idempotency_key, _digests(draft, call), loras_of(draft)
            )
            if earlier is None:
                raise
            self._announce(caller, earlier.job, call.request_id, replayed=True)
            return earlier

    async def _check_prompt(self, caller: Caller, draft: Draft, job_id: str) -> None:
        """Raise `InvalidParameter` for a prompt that the operator's moderation refuses."""
        if isinstance(draft, UpscaleDraft):
            return
        verdict = await self.moderation.prompt(
            account_id=caller.account_id, job_id=job_id, prompt=draft.prompt, negative_prompt=draft.negative_prompt
        )
        if not verdict.allowed:
            field = _OWN_NAMES[draft.interface][0] if draft.interface else "prompt"
            refused = f"{field}: refused by this service's moderation"
            raise InvalidParameter(f"{refused}: {verdict.reason}" if verdict.reason else refused)

    async def _ids_of_names(self, caller: Caller, draft: Draft) -> str:
        """Return a message with the ids of the LoRAs of the first name among a draft's LoRAs; '' where it has none.

        The account's LoRAs are read for every name, so that the time does not tell whether a name exists.
        """
        for place, lora in enumerate(loras_of(draft)):
            if lora.id.startswith(ADAPTER_PREFIX) or (draft.interface and not caller.may_use(lora.id)):
                continue
            usable = await self.catalog.adapters(caller.account_id)
            ids = [adapter.id for adapter in usable if adapter.name.casefold() == lora.id.strip().casefold()]
            field = _OWN_NAMES[draft.interface][1] if draft.interface else f"loras[{place}].id"
            if ids:
                return f"{field}: must be an id, not a name; send {' or '.join(ids)}"
        return ""

    async def _accept(self, caller: Caller, draft: Draft, resolved: Resolved, call: Call, job_id: str) -> Acceptance:
        memory = await self.space.check()
        span = self._span(caller, job_id)
        new = NewJob(
            job_id=job_id,
            variant=caller.variant,
            account_id=caller.account_id,
            request=resolved.request,
            cost=resolved.cost,
            idempotency_key=call.idempotency_key,
            body=_digests(draft, call, resolved.request),
            queue_share=plan_queue_share(caller.plan, self.settings.plan_table.values()),
            rate_token=caller.rate_token,
            loras=loras_of(resolved.request),
            key_id=caller.key_id,
            plan=caller.plan.name,
            request_id=call.request_id,
            traceparent=span.traceparent,
            webhook=f"{call.webhook} {call.base_url}".rstrip() if call.webhook else "",
            pictures=resolved.request.picture_ids,
            max_stored=self._most_stored(caller.plan, memory),
        )
        acceptance = await self.queue.accept(new)
        span.end()
        self._announce(caller, acceptance.job, call.request_id, replayed=acceptance.replayed)
        return acceptance

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


def _digests(draft: Draft, call: Call, request: Request | None = None) -> Digests:
    """Return what a repeat of the call must come with again, which includes the address that it has named."""
    if call.idempotency_key is None:
        return NO_DIGESTS
    digests = digests_of(draft, request, start_within=call.start_within)
    return digests.beside(call.webhook) if call.webhook else digests


def plan_queue_share(plan: Plan, plans: Iterable[Plan]) -> float:
    """Return a plan's share of a busy queue: 1 for the lowest of its variant."""
    rates = [_rate(each) for each in plans if each.variant == plan.variant]
    return min(MAX_QUEUE_SHARE, max(1.0, sqrt(_rate(plan) / min(rates))))


def _rate(plan: Plan) -> float:
    return plan.limit / plan.window.total_seconds()
