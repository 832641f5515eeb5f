"""Makes jobs for tests: they are accepted, claimed, finished with small images, or failed."""

from datetime import datetime
from typing import Any

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Failure, JobKind, NewJob, StoredImage, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.queue import new_nonce
from tests.composition import Resources

BROKEN = Failure(code=FailureCode.GENERATION_FAILED, message="the brush broke")
OF_THE_JOB = ("adapter_id", "key_id", "plan", "group")


async def accept(resources: Resources, account_id: str = "acct_a", *, variant: Variant = Variant.A, **more: Any) -> str:
    """Accept a generation with `more` fields of its request or of the job; return its id."""
    job_id = new_job_id(JobKind.GENERATION)
    facts = {name: more.pop(name) for name in OF_THE_JOB if name in more}
    fields: dict[str, Any] = {"prompt": "a boat", "lora_id": "model_x", "seeds": (1,), **more}
    request = GenerationRequest(**fields)
    job = NewJob(job_id=job_id, variant=variant, account_id=account_id, request=request, **facts)
    await resources.queue.accept(job)
    return job_id


async def claim(resources: Resources, *, worker: str = "w", limit: int = 1) -> list[Claim]:
    return await resources.queue.claim(worker, kind=JobKind.GENERATION, nonce=new_nonce(), limit=limit)


async def put(
    resources: Resources, job_id: str, *, account_id: str = "acct_a", attempt: int = 1, index: int = 0, when: datetime
) -> str:
    """Write an image's object as a worker does; return its address."""
    return await resources.images.put(resources.images.object_name(account_id, job_id, attempt, index, when), b"png")


def stored_image(uri: str) -> StoredImage:
    return StoredImage(image_id=new_image_id(), image_uri=uri, width=8, height=8, sha256="0" * 64, size_bytes=3)


async def finish(resources: Resources, claimed: Claim, *, seconds: float = 1) -> list[StoredImage]:
    """End a claimed generation with a stored image for each of its seeds."""
    assert isinstance(claimed.request, GenerationRequest)
    lease = claimed.lease
    place: dict[str, Any] = {"account_id": claimed.account_id, "attempt": lease.attempt, "when": claimed.created_at}
    addresses = [await put(resources, lease.job_id, index=each, **place) for each in range(claimed.request.num_images)]
    images = [stored_image(uri) for uri in addresses]
    await resources.queue.finish(lease, images, seconds=seconds)
    return images


async def complete(resources: Resources, account_id: str = "acct_a", **more: Any) -> tuple[str, list[StoredImage]]:
    """Accept a generation and finish it; return its id and its images."""
    job_id = await accept(resources, account_id, **more)
    (claimed,) = await claim(resources)
    return job_id, await finish(resources, claimed)


async def fail_all(resources: Resources, failure: Failure = BROKEN) -> None:
    """Claim every generation that waits, and fail it for good."""
    for claimed in await claim(resources, limit=99):
        await resources.queue.fail(claimed.lease, failure, retry=False)
