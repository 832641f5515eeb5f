"""What OpenAI's door and MCP's share: a job for which its caller waits, and LoRAs that it calls by their names."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from itertools import count

from fastapi import Request

from serve_app.api.dependencies import found, jobs_of, loras_of
from serve_app.api.errors import WAIT_ENDED
from serve_app.domain.accounts import Caller
from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import InvalidParameter, Overloaded, WaitEnded
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import Draft, GenerationDraft, LoraUse
from serve_app.jobs.submit import Call

LOOK_EVERY_S = 0.5
LONGEST_START_S = 540
"""A job that no worker has started by then expires; OpenAI's official client gives up after 600 seconds."""
SHOWN_NAMES = 20
"""An error names at most this many of the LoRAs that its caller may use."""


async def attend(request: Request, caller: Caller, draft: Draft, call: Call, *, seconds: float) -> AsyncGenerator[Job]:
    """Create a job, and yield what is known of it, twice a second and once it has ended. Its LoRAs may be named.

    Whoever closes this earlier cancels the job, unless others wait with the same idempotency key. A repeat of a key
    whose job was canceled in this way creates another. Raises what `Submission.submit` raises, `Overloaded` where no
    more callers may wait, and `WaitEnded` after `seconds` or when this process drains: then a job with an idempotency
    key goes on, since a repeat of it can wait on.
    """
    parts, account_id, ends_at = jobs_of(request), caller.account_id, time.monotonic() + seconds
    call, draft = replace(call, start_within=LONGEST_START_S), await _with_ids(request, caller, draft)
    own_key, waiter, job = call.idempotency_key, secrets.token_hex(8), None

    def wait_is_over() -> bool:
        return parts.waits.is_draining or time.monotonic() >= ends_at

    async def give_up(left: Job | None) -> None:
        is_last = own_key is None or await parts.shared_calls.end(caller, own_key, waiter)
        if is_last and left and not left.state.is_terminal and not (own_key and wait_is_over()):
            await parts.queue.cancel(left.id, account_id=account_id)

    try:
        if own_key is not None:
            await parts.shared_calls.begin(caller, own_key, waiter)
        for times in count():
            key = own_key and f"{own_key}#{times}"
            acceptance = await parts.submission.submit(caller, draft, replace(call, idempotency_key=key))
            job = acceptance.job
            while not job.state.is_terminal:
                yield job
                has_place = await parts.waits.until_ended(job.id, account_id=account_id, seconds=LOOK_EVERY_S)
                job = found(await parts.reader.get(job.id, account_id=account_id), "job")
                if job.state.is_terminal:
                    break
                if wait_is_over():
                    raise WaitEnded(WAIT_ENDED)
                if not has_place:
                    raise Overloaded("no more callers may wait")
            if not (acceptance.replayed and job.state is JobState.CANCELED):
                yield found(await parts.reader.get(job.id, account_id=account_id), "job")
                return
    finally:
        parts.submission.background.spawn(give_up(job))


async def usable_loras(request: Request, caller: Caller) -> list[Adapter]:
    """Return the LoRAs that the caller's key may use, in the catalog's order."""
    return [lora for lora in await loras_of(request).catalog.adapters(caller.account_id) if caller.may_use(lora.id)]


def meant_by(name: str, loras: Iterable[Adapter], field: str) -> str | None:
    """Return the id of the LoRA that has this id, or else this name. Raises `InvalidParameter` for several."""
    by_id = {lora.id: lora.name.strip().casefold() for lora in loras}
    ids = [name] if name in by_id else [lora_id for lora_id, each in by_id.items() if each == name.strip().casefold()]
    if len(ids) > 1:
        raise InvalidParameter(f"{field}: several LoRAs have this name; send {' or '.join(ids)}")
    return ids[0] if ids else None


async def _with_ids(request: Request, caller: Caller, draft: Draft) -> Draft:
    if not (isinstance(draft, GenerationDraft) and draft.loras):
        return draft
    usable = await usable_loras(request, caller)
    return replace(draft, loras=tuple(_with_id(place, use, usable) for place, use in enumerate(draft.loras)))


def _with_id(place: int, use: LoraUse, usable: list[Adapter]) -> LoraUse:
    field = f"loras[{place}].id"
    if lora_id := meant_by(use.id, usable, field):
        return replace(use, id=lora_id)
    names = ", ".join(sorted(lora.name for lora in usable)[:SHOWN_NAMES]) or "none"
    raise InvalidParameter(f"{field}: must be the id or name of a LoRA that you may use, as {names}")
