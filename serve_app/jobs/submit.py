"""Submits a request: one durable accept, which checks permission, then a hint to a replica."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import sqrt
from typing import TYPE_CHECKING

from serve_app import tracing
from serve_app.domain.accounts import Caller, Plan
from serve_app.domain.errors import Forbidden, InvalidParameter, NotFound
from serve_app.domain.jobs import Job, JobKind, new_job_id
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant, fingerprint
from serve_app.jobs.acceptance import Acceptance
from serve_app.jobs.records import JOB_BYTES
from serve_app.log import log_ids
from serve_app.store.measures import RedisMemory

if TYPE_CHECKING:
    from serve_app.resources import Resources


log = logging.getLogger(__name__)

ADAPTER_PREFIX = "model_"
"""Of the ids in a catalog, by convention."""
MAX_OUTPUT_PIXELS = 16_000_000
USUAL_JOB_BYTES = JOB_BYTES + 512
"""Of Redis, for a job whose prompts have a thousand characters together."""
ONE_DAY = timedelta(days=1)
"""The bytes of stored jobs are counted by days: the last of one go a day after its first could."""
MAX_QUEUE_SHARE = 8.0
"""A plan's share of a busy queue is the root of its rate against the lowest plan's, at most this: ahead, never alone."""


@dataclass(frozen=True, slots=True)
class Call:
    """What an HTTP request says besides what it asks for; in the console there is no idempotency key."""

    request_id: str = ""
    idempotency_key: str | None = None
    seed_is_given: bool = False
    """Whether the idempotency key stands for the request's seeds too, or for any that the service draws."""


NO_CALL = Call()


async def generate(
    resources: "Resources", caller: Caller, request: GenerationRequest, call: Call = NO_CALL
) -> Acceptance:
    """Accept a generation. A client that disconnects does not stop it.

    Raises `Forbidden` alike for an adapter that does not exist and one that is not the account's; `QueueFull`,
    `IdempotencyConflict`, `StoreUnavailable`.
    """
    return await resources.run_to_end(_generate(resources, caller, request, call))


async def upscale(
    resources: "Resources", caller: Caller, image_id: str, scale_factor: int = 2, call: Call = NO_CALL
) -> Acceptance:
    """Accept an upscale of a stored image of the account.

    Raises `NotFound`, `InvalidParameter` over 16 megapixels, and what `generate` raises for the queue.
    """
    return await resources.run_to_end(_upscale(resources, caller, image_id, scale_factor, call))


async def generate_all(
    resources: "Resources", caller: Caller, requests: Sequence[GenerationRequest], call: Call = NO_CALL
) -> list[Job]:
    """Accept generations of one prompt for an account's owner, all or none.

    Each counts in the plan, here and not before. Raises `RateLimitExceeded` where the plan leaves fewer, and what
    `generate` raises.
    """
    return await resources.run_to_end(_generate_all(resources, caller, requests, call.request_id))


async def _generate(resources: "Resources", caller: Caller, request: GenerationRequest, call: Call) -> Acceptance:
    """Accept a generation; the accept itself checks the adapter.

    An adapter that does not exist is answered like one that is not the account's.
    """
    if not caller.may_use(request.lora_id):  # alike for those that exist and those that do not
        raise Forbidden(f"This API key may only be used with {', '.join(sorted(caller.adapters or ()))}.")
    job_id = new_job_id(JobKind.GENERATION)
    await _check_prompt(resources, caller, request, job_id)
    try:
        return await _accept(resources, caller, request, call, job_id=job_id, adapter_id=request.lora_id)
    except Forbidden as error:
        raise Forbidden(await _id_of_name(resources, caller, request.lora_id) or error.message) from None


async def _generate_all(
    resources: "Resources", caller: Caller, requests: Sequence[GenerationRequest], request_id: str
) -> list[Job]:
    named = {new_job_id(JobKind.GENERATION): request for request in requests}
    first_id = next(iter(named))
    await _check_prompt(resources, caller, named[first_id], first_id)
    memory = await resources.check_space()
    spans = {job_id: _span(resources, caller, job_id) for job_id in named}
    jobs = await resources.queue.accept_all(
        named,
        account_id=caller.account_id,
        plan=caller.plan,
        queue_share=plan_queue_share(caller.plan, resources.settings.plan_table.values()),
        request_id=request_id,
        traceparents={job_id: span.traceparent for job_id, span in spans.items()},
        max_stored=_most_stored(resources, caller.plan, memory),
    )
    for job in jobs:
        spans[job.id].end()
        _announce(resources, caller, job, request_id)
    return jobs


async def _check_prompt(resources: "Resources", caller: Caller, request: GenerationRequest, job_id: str) -> None:
    """Raise `InvalidParameter` for a prompt that the operator's moderation refuses."""
    verdict = await resources.moderation.prompt(
        account_id=caller.account_id,
        job_id=job_id,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
    )
    if not verdict.allowed:
        field = "prompt" if caller.variant is Variant.A else "positive_prompt"
        raise InvalidParameter(f"{field}: refused by this service's moderation" + _after_colon(verdict.reason))


def _after_colon(reason: str) -> str:
    return f": {reason}" if reason else ""


async def _id_of_name(resources: "Resources", caller: Caller, lora_id: str) -> str:
    """Return a message with the ids of the adapters of a name; '' if the account may use none of it.

    The account's adapters are read whenever a name may have been sent, so that no time is longer for a name that
    exists.
    """
    if lora_id.startswith(ADAPTER_PREFIX):
        return ""
    usable = await resources.catalog.adapters(caller.account_id)
    ids = [adapter.id for adapter in usable if adapter.name.casefold() == lora_id.strip().casefold()]
    field = "lora_id" if caller.variant is Variant.A else "model_id"
    return f"{field}: must be an id, not a name; send {' or '.join(ids)}" if ids else ""


async def _upscale(resources: "Resources", caller: Caller, image_id: str, scale_factor: int, call: Call) -> Acceptance:
    image = await resources.jobs.image(image_id, account_id=caller.account_id, variant=caller.variant)
    if image is None or not await resources.images.exists(image.image_uri):
        raise NotFound("There is no such image.")
    request = UpscaleRequest(
        image_id=image_id,
        scale_factor=scale_factor,
        source_uri=image.image_uri,
        source_width=image.width,
        source_height=image.height,
    )
    if request.width * request.height > MAX_OUTPUT_PIXELS:
        raise InvalidParameter(
            f"scale_factor: {request.width}x{request.height} is over the limit of 16 megapixels for the output"
        )
    return await _accept(resources, caller, request, call, job_id=new_job_id(JobKind.UPSCALE))


async def _accept(
    resources: "Resources", caller: Caller, request: Request, call: Call, *, job_id: str, adapter_id: str = ""
) -> Acceptance:
    memory = await resources.check_space()
    span = _span(resources, caller, job_id)
    acceptance = await resources.queue.accept(
        job_id=job_id,
        variant=caller.variant,
        account_id=caller.account_id,
        request=request,
        idempotency_key=call.idempotency_key,
        body_sha256=fingerprint(request, seed_is_given=call.seed_is_given),
        queue_share=plan_queue_share(caller.plan, resources.settings.plan_table.values()),
        rate_token=caller.rate_token,
        adapter_id=adapter_id,
        key_id=caller.key_id,
        plan=caller.plan.name,
        request_id=call.request_id,
        traceparent=span.traceparent,
        max_stored=_most_stored(resources, caller.plan, memory),
    )
    span.end()
    _announce(resources, caller, acceptance.job, call.request_id, replayed=acceptance.replayed)
    return acceptance


def _most_stored(resources: "Resources", plan: Plan, memory: RedisMemory | None) -> int | None:
    """Return how many bytes an account's stored jobs may take on the plan's interface.

    That is its share of Redis, or, where that is less, what the plan admits until the first of them expire. None where
    Redis has no limit.
    """
    if memory is None or not memory.limit:
        return None
    admitted = plan.requests_in(resources.settings.longest_record_life + ONE_DAY)
    return max(round(resources.settings.account_share * memory.limit), admitted * USUAL_JOB_BYTES)


def _span(resources: "Resources", caller: Caller, job_id: str) -> tracing.Span:
    attributes = {"job_id": job_id, "account_id": caller.account_id, "interface": str(caller.variant)}
    return resources.traces.start("accept", tracing.caller(), kind="server", attributes=attributes)


def _announce(resources: "Resources", caller: Caller, job: Job, request_id: str, *, replayed: bool = False) -> None:
    """Log the acceptance, and give an idle replica a hint of a new job."""
    with log_ids(request_id=request_id, account_id=caller.account_id, job_id=job.id):
        log.info("job %s: %s", job.id, "replayed" if replayed else "accepted")
    if resources.hint is not None and not replayed:
        resources.spawn(_hint(resources, job.kind, job.id))


async def _hint(resources: "Resources", kind: JobKind, job_id: str) -> None:
    assert resources.hint is not None, "checked by the caller"
    await resources.hint(kind, job_id)


def plan_queue_share(plan: Plan, plans: Iterable[Plan]) -> float:
    """Return a plan's share of a busy queue: 1 for the lowest of its variant."""
    rates = [_rate(each) for each in plans if each.variant == plan.variant]
    return min(MAX_QUEUE_SHARE, max(1.0, sqrt(_rate(plan) / min(rates))))


def _rate(plan: Plan) -> float:
    return plan.limit / plan.window.total_seconds()
