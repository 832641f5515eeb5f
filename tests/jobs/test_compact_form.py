"""A record has one small form from the accept on, and keeps after its end only what is read."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.domain.errors import FailureCode, UnreadableRecord
from serve_app.domain.jobs import (
    Failure,
    Job,
    JobKind,
    JobState,
    StoredImage,
    Timings,
    new_image_id,
    new_job_id,
)
from serve_app.domain.requests import SEED_SPACE, GenerationRequest, LoraUse, UpscaleRequest
from serve_app.jobs.compact_form import Result, as_text, pack_request, pack_result, unpack_request, unpack_result
from serve_app.jobs.deletion import Deletions
from serve_app.jobs.queue import JobQueue
from serve_app.jobs.records import read_request
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from tests.audit import audit
from tests.composition import Resources
from tests.made_jobs import accept, claim, fail_all, job_of
from tests.support import existing

LORA = "model_" + "q7x3" * 6 + "ab"
ACCOUNT = "acct_" + "k2m5" * 6 + "cd"
PROMPT = "an old harbour town in the rain, low clouds, a tram in the main street, evening, film photograph"
LONGEST = "".join(chr(0x1F300 + n * 577 % 800) for n in range(4_000))
"""As many emoji as a prompt may have, of which no two neighbours come again soon."""


async def _accept(resources: Resources, *, images: int = 1, prompt: str = PROMPT) -> str:
    request = GenerationRequest(
        prompt=prompt,
        negative_prompt=prompt[::-1],
        loras=(LoraUse(LORA),),
        seeds=tuple(2**63 + n for n in range(images)),
    )
    return await accept(
        resources,
        ACCOUNT,
        request=request,
        weights="9" * 64,
        idempotency_key=new_job_id(JobKind.GENERATION),
        rate_token="token",
        key_id="key_" + "z4y6" * 6 + "ef",
        request_id="0d9a3c6e-5bb1-4b0e-9f3b-0d6a1c2b3a4f",
        plan="basic",
        traceparent=f"00-{'1' * 32}-{'2' * 16}-01",
    )


async def _complete(resources: Resources, *, images: int = 1, prompt: str = PROMPT) -> Job:
    job_id = await _accept(resources, images=images, prompt=prompt)
    (claimed,) = await claim(resources, limit=8)
    stored: list[StoredImage] = []
    for index in range(images):
        name = resources.images.object_name(ACCOUNT, job_id, 1, index, claimed.created_at)
        uri = await resources.images.put(name, b"png")
        sha256 = hashlib.sha256(uri.encode()).hexdigest()
        image = StoredImage(
            image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256=sha256, size_bytes=345_678
        )
        stored.append(image)
    timings = Timings(load=0.213, denoise=4.511, store=0.061)
    await resources.queue.finish(claimed.lease, stored, seconds=4.75, timings=timings)
    job = await job_of(resources, job_id)
    assert (job.images, job.timings, job.seconds, job.progress) == (tuple(stored), timings, 4.75, 100)
    assert job.finish_estimate is None
    return job


async def _fail(resources: Resources) -> Job:
    job_id = await _accept(resources)
    failure = Failure(code=FailureCode.TIMEOUT, message="It took too long.")
    await fail_all(resources, failure)
    return await job_of(resources, job_id)


async def _cancel(resources: Resources) -> Job:
    job_id = await _accept(resources)
    await resources.queue.cancel(job_id, account_id=ACCOUNT)
    return await job_of(resources, job_id)


async def _cancel_while_it_runs(resources: Resources) -> Job:
    job_id = await _accept(resources)
    (claimed,) = await claim(resources)
    await resources.queue.heartbeat(claimed.lease, progress=50)
    await resources.queue.cancel(job_id, account_id=ACCOUNT)
    await resources.queue.release(claimed.lease)
    return await job_of(resources, job_id)


async def _expire(resources: Resources) -> Job:
    job_id = await _accept(resources)
    impatient = resources.settings.model_copy(update={"queue_age_limit": timedelta()})
    await JobQueue(connect(resources.redis_url), impatient).reap()
    return await job_of(resources, job_id)


def _fields(redis_db: Any, job_id: str) -> Mapping[str, str]:
    return redis_db.hgetall(redis_key("job", job_id))


@pytest.mark.parametrize(
    ("end", "state", "kept"),
    [
        (_complete, JobState.COMPLETED, {"started"}),
        (_cancel, JobState.CANCELED, set[str]()),
        (_cancel_while_it_runs, JobState.CANCELED, {"started", "progress"}),
        (_expire, JobState.EXPIRED, set[str]()),
        (
            _fail,
            JobState.FAILED,
            {"started", "code", "message", "kind", "group", "work", "queue_share", "num_images", "sequence"}
            | {"plan", "version", "request_id", "traceparent"},
        ),
    ],
    ids=["completed", "canceled", "canceled while it ran", "expired", "failed"],
)
async def test_an_ended_job_keeps_its_request_and_only_what_somebody_reads(
    resources: Resources,
    redis_db: Any,
    end: Callable[[Resources], Awaitable[Job]],
    state: JobState,
    kept: set[str],
) -> None:
    job = await end(resources)
    fields = _fields(redis_db, job.id)
    named = {name for name in fields if not name.removeprefix("r").isdecimal()}
    assert named == {"state", "account", "variant", "key", "created", "finished", "idempotency"} | kept | (
        {"attempt"} if "started" in kept else set[str]()
    )
    assert job.state is state
    assert job.request is not None
    assert job.request == GenerationRequest(
        prompt=PROMPT, negative_prompt=PROMPT[::-1], loras=(LoraUse(LORA),), seeds=(2**63,)
    )
    assert job.finished_at is not None
    assert job.created_at <= (job.started_at or job.created_at) <= job.finished_at
    assert [each.id for each in (await resources.job_history.list(ACCOUNT))] == [job.id]
    assert audit(redis_db, max_attempts=5) == []


async def test_a_record_is_small_from_the_accept_on_and_smaller_after_its_end(
    resources: Resources, redis_db: Any
) -> None:
    """On a server without any setting of ours: its hashes hold values of 64 bytes in one list."""

    def size(job_id: str) -> int:
        return redis_db.memory_usage(redis_key("job", job_id), samples=0)

    waiting = size(await _accept(resources))
    await resources.queue.cancel((await resources.job_history.list(ACCOUNT))[0].id, account_id=ACCOUNT)
    sizes = [size((await end(resources)).id) for end in (_cancel, _fail, _complete)]
    assert waiting <= 1_000
    assert max(sizes) <= 900, "a failed one may wait again"
    assert size((await _complete(resources)).id) <= 750


async def test_the_longest_prompts_take_half_their_bytes_and_are_read_as_they_were(
    resources: Resources, redis_db: Any
) -> None:
    job = await _complete(resources, prompt=LONGEST)
    assert isinstance(job.request, GenerationRequest)
    assert (job.request.prompt, job.request.negative_prompt) == (LONGEST, LONGEST[::-1])
    assert redis_db.memory_usage(redis_key("job", job.id), samples=0) < len(LONGEST.encode())


async def test_a_deletion_finds_everything_of_a_record(resources: Resources, redis_db: Any) -> None:
    job = await _complete(resources, images=3)
    first, *rest = job.images
    assert await resources.deletions.delete_image(job.id, first.image_id, account_id=ACCOUNT) is not None
    assert await resources.deletions.delete_image(job.id, first.image_id, account_id=ACCOUNT) is None
    left = await job_of(resources, job.id)
    assert left == replace(job, images=tuple(rest), read_at=left.read_at)
    assert await resources.deletions.delete_job(job.id, account_id=ACCOUNT) is not None
    listed = existing(await resources.deletions.objects(job.id))
    assert listed.folder == resources.images.job_folder(ACCOUNT, job.id, job.created_at)
    assert listed.image_uris == [image.image_uri for image in rest]
    for image in job.images:
        assert not redis_db.exists(redis_key("image", image.image_id))
    assert audit(redis_db, max_attempts=5) == []


class DeletesMeanwhile(Deletions):
    """Between the reading of a record and its change, another deletion changes it."""

    meanwhile: Callable[[], Awaitable[Any]]

    async def _find(self, job_id: str) -> Any:
        found = await super()._find(job_id)
        await self.meanwhile()
        return found


@pytest.mark.parametrize("what", ["job", "image"])
async def test_a_deletion_beside_another_takes_what_the_other_left(
    resources: Resources, redis_db: Any, what: str
) -> None:
    job = await _complete(resources, images=3)
    slow = DeletesMeanwhile(cast(Any, resources.jobs)._redis, resources.images)
    first, second, third = job.images

    async def delete_once() -> None:
        await resources.deletions.delete_image(job.id, first.image_id, account_id=ACCOUNT)

    slow.meanwhile = delete_once
    if what == "job":
        assert await slow.delete_job(job.id, account_id=ACCOUNT) is not None
        assert await resources.jobs.find(job.id) is None
    else:
        assert await slow.delete_image(job.id, second.image_id, account_id=ACCOUNT) is not None
        assert (await job_of(resources, job.id)).images == (third,)
    assert not redis_db.exists(redis_key("image", first.image_id))
    assert audit(redis_db, max_attempts=5) == []


TEXT = st.text(max_size=400)
IMAGES = st.builds(
    StoredImage,
    image_id=st.builds(new_image_id) | TEXT,
    image_uri=st.from_regex(r"\A(s3://b/p/)?images/[0-9a-f]{32}/2026/11/23/gen_x/a[0-9]{1,3}-0?[0-3]\.(png|jpg|webp)\Z")
    | TEXT,
    width=st.integers(1, 4096),
    height=st.integers(1, 4096),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex) | TEXT,
    size_bytes=st.integers(0, 2**40),
)
REQUESTS = st.builds(
    GenerationRequest,
    prompt=TEXT,
    loras=st.lists(st.builds(LoraUse, TEXT, st.floats(-2, 2)), max_size=4).map(tuple),
    base_model=TEXT,
    metadata=st.dictionaries(TEXT, TEXT, max_size=2),
    negative_prompt=TEXT,
    seeds=st.lists(st.integers(0, SEED_SPACE - 1), min_size=1, max_size=4).map(tuple),
)
UPSCALE = UpscaleRequest(image_id="img_x", scale_factor=4, source_uri="s3://x/y", source_width=512, source_height=768)
RESULTS = st.builds(
    Result,
    images=st.lists(IMAGES, max_size=4).map(tuple),
    seconds=st.none() | st.integers(0, 10**6).map(lambda ms: ms / 1000),
    timings=st.none() | st.just(Timings(load=0.1, denoise=1.0, store=0.15)),
)


@settings(max_examples=60, deadline=None)
@given(request=REQUESTS | st.just(UPSCALE), result=RESULTS, named=st.booleans())
def test_any_request_and_result_come_back_whole(
    request: GenerationRequest | UpscaleRequest, result: Result, named: bool
) -> None:
    kind = JobKind.UPSCALE if isinstance(request, UpscaleRequest) else JobKind.GENERATION
    adapter = request.lora_id if isinstance(request, GenerationRequest) and named else ""
    fields = {"0": as_text(pack_request(request, adapter)), "r0": as_text(pack_result("gen_x", result))}
    fields |= {"adapter": adapter} if adapter else {}
    assert read_request(kind, fields) == request
    assert unpack_result("gen_x", fields) == result


@pytest.mark.parametrize("text", ["", "x", "{}", "\x01\x7f\x7f"])
def test_a_damaged_record_is_unreadable_by_name(text: str) -> None:
    whole = as_text(pack_request(UPSCALE, ""))
    for damaged in (text, whole[:-1], whole + "x"):
        with pytest.raises(UnreadableRecord, match="request"):
            unpack_request({"0": damaged})
    whole = as_text(pack_result("gen_x", Result()))
    for damaged in (text, whole[:-1], whole + "x"):
        with pytest.raises(UnreadableRecord, match="result"):
            unpack_result("gen_x", {"r0": damaged})
