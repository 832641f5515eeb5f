"""Makes jobs for tests: they are accepted, claimed, finished with small images, or failed."""

from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from serve_app.domain.accounts import Caller
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Failure, Job, JobKind, NewJob, StoredImage, kind_of, new_image_id, new_job_id
from serve_app.domain.requests import GenerationDraft, GenerationRequest, LoraUse, Request, Variant
from serve_app.jobs.queue import new_nonce
from tests.composition import Resources
from tests.support import existing

ACCOUNT = "acct_a"
BROKEN = Failure(code=FailureCode.GENERATION_FAILED, message="the brush broke")
_OF_THE_JOB = {field.name for field in fields(NewJob)}


def new_job(
    account_id: str = ACCOUNT, *, request: Request | None = None, images: int = 1, lora_id: str = "", **more: Any
) -> NewJob:
    """Return a job to be accepted, by default a generation; `more` are fields of its request or of the job.

    The account must be allowed to use `lora_id`; without one it names a LoRA that nobody looks for.
    """
    loras = (LoraUse(lora_id),) if lora_id else ()
    of_the_job = {name: more.pop(name) for name in _OF_THE_JOB & more.keys()}
    asked: dict[str, Any] = {
        "prompt": "a boat",
        "loras": loras or (LoraUse("model_x"),),
        "seeds": tuple(range(1, images + 1)),
        **more,
    }
    request = request or GenerationRequest(**asked)
    facts: dict[str, Any] = {"job_id": new_job_id(kind_of(request)), "variant": Variant.A, "loras": loras, **of_the_job}
    return NewJob(account_id=account_id, request=request, **facts)


def draft_of(request: GenerationRequest, interface: Variant | None = Variant.A) -> GenerationDraft:
    """Return how a caller asks for the request, by default on interface A."""
    return replace(GenerationDraft.like(request), interface=interface)


async def accept(resources: Resources, account_id: str = ACCOUNT, **more: Any) -> str:
    """Accept a job that `new_job` makes; return its id."""
    return (await resources.queue.accept(new_job(account_id, **more))).job.id


async def claim(
    resources: Resources, *, worker: str = "w", limit: int = 1, pool: str = JobKind.GENERATION
) -> list[Claim]:
    return await resources.queue.claim(worker, pool=pool, nonce=new_nonce(), limit=limit)


async def job_of(resources: Resources, job_id: str) -> Job:
    job = await resources.jobs.find(job_id)
    assert job is not None, job_id
    return job


async def generation_of(resources: Resources, job_id: str) -> GenerationRequest:
    request = (await job_of(resources, job_id)).request
    assert isinstance(request, GenerationRequest), job_id
    return request


async def failure_of(resources: Resources, job_id: str) -> Failure:
    failure = (await job_of(resources, job_id)).failure
    assert failure is not None, job_id
    return failure


async def caller_of(resources: Resources, name: str = "acme") -> Caller:
    """Return who calls with a key of a new account."""
    account = await resources.accounts.create(name)
    _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    return existing((await resources.auth.authenticate(secret, Variant.A, counted=True)).caller)


async def put(
    resources: Resources, job_id: str, *, account_id: str = ACCOUNT, attempt: int = 1, index: int = 0, when: datetime
) -> str:
    """Write an image's object as a worker does; return its address."""
    return await resources.images.put(resources.images.object_name(account_id, job_id, attempt, index, when), b"png")


def stored_image(uri: str, *, width: int = 8, height: int = 8) -> StoredImage:
    return StoredImage(
        image_id=new_image_id(), image_uri=uri, width=width, height=height, sha256="0" * 64, size_bytes=3
    )


async def finish(resources: Resources, claimed: Claim, *, seconds: float = 1) -> list[StoredImage]:
    """End a claimed generation with a stored image for each of its seeds."""
    assert isinstance(claimed.request, GenerationRequest)
    lease = claimed.lease
    place: dict[str, Any] = {"account_id": claimed.account_id, "attempt": lease.attempt, "when": claimed.created_at}
    addresses = [await put(resources, lease.job_id, index=each, **place) for each in range(claimed.request.num_images)]
    images = [stored_image(uri) for uri in addresses]
    await resources.queue.finish(lease, images, seconds=seconds)
    return images


async def complete(resources: Resources, account_id: str = ACCOUNT, **more: Any) -> tuple[str, list[StoredImage]]:
    """Accept a generation and finish it; return its id and its images."""
    job_id = await accept(resources, account_id, **more)
    (claimed,) = await claim(resources)
    return job_id, await finish(resources, claimed)


async def fail_all(resources: Resources, failure: Failure = BROKEN) -> None:
    """Claim every generation that waits, and fail it for good."""
    for claimed in await claim(resources, limit=99):
        await resources.queue.fail(claimed.lease, failure, retry=False)
