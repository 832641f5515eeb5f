"""Compacted records read the same in a sixth of the memory; compaction may run twice.

It may also run beside a deletion.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.domain.errors import UnreadableRecord
from serve_app.domain.jobs import Job, JobKind, JobState, StoredImage, Timings, new_image_id, new_job_id
from serve_app.domain.requests import SEED_SPACE, GenerationRequest, UpscaleRequest, Variant
from serve_app.service.resources import Resources
from serve_app.stores import compaction
from serve_app.stores.claiming import new_nonce
from serve_app.stores.compact_form import is_packed, pack, unpack
from serve_app.stores.compaction import Compaction
from serve_app.stores.records import read_job, write_images, write_request, write_timings
from serve_app.stores.redis_keys import redis_key
from tests.audit import audit

NOW = timedelta()
LORA = "model_" + "q7x3" * 6 + "ab"
PROMPT = "an old harbour town in the rain, low clouds, a tram in the main street, evening, film photograph"


async def _complete(resources: Resources, *, images: int = 1) -> Job:
    request = GenerationRequest(prompt=PROMPT, lora_id=LORA, seeds=tuple(2**63 + n for n in range(images)))
    job_id, account = new_job_id(JobKind.GENERATION), "acct_" + "k2m5" * 6 + "cd"
    await resources.queue.accept(
        job_id=job_id,
        variant=Variant.A,
        account_id=account,
        request=request,
        group="9" * 64,
        key_id="key_" + "z4y6" * 6 + "ef",
        request_id="0d9a3c6e-5bb1-4b0e-9f3b-0d6a1c2b3a4f",
        plan="basic",
    )
    (claim,) = await resources.queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), limit=8)
    stored: list[StoredImage] = []
    for index in range(images):
        name = resources.images.object_name(account, job_id, 1, index, claim.created_at)
        uri = await resources.images.put(name, b"png")
        sha256 = hashlib.sha256(uri.encode()).hexdigest()
        image = StoredImage(
            image_id=new_image_id(), image_uri=uri, width=512, height=512, sha256=sha256, size_bytes=345_678
        )
        stored.append(image)
    timings = Timings(load=0.213, denoise=4.511, store=0.061)
    await resources.queue.finish(claim.lease, stored, seconds=4.75, timings=timings)
    return await _read(resources, job_id)


async def _read(resources: Resources, job_id: str) -> Job:
    job = await resources.jobs.find(job_id)
    assert job is not None
    return job


def _fields(redis_db: redis.Redis, job_id: str) -> Mapping[str, str]:
    return cast(Any, redis_db).hgetall(redis_key("job", job_id))


async def test_a_completed_record_is_compact_after_its_time_and_reads_the_same(
    resources: Resources, redis_db: redis.Redis
) -> None:
    job = await _complete(resources, images=2)
    assert await resources.compaction.compact(timedelta(days=1)) == 0
    assert not is_packed(_fields(redis_db, job.id))
    life = cast(Any, redis_db).pttl(redis_key("job", job.id))
    assert await resources.compaction.compact(NOW) == 1
    assert await resources.compaction.compact(NOW) == 0
    assert is_packed(_fields(redis_db, job.id))
    assert PROMPT not in str(_fields(redis_db, job.id))
    after = await _read(resources, job.id)
    assert after == replace(job, read_at=after.read_at)
    assert life - 60_000 < cast(Any, redis_db).pttl(redis_key("job", job.id)) <= life
    for image in job.images:
        assert await resources.jobs.image(image.image_id, account_id=job.account_id) == image
    assert audit(redis_db, max_attempts=5) == []


async def test_a_record_that_an_operator_keeps_for_good_stays_so(resources: Resources, redis_db: redis.Redis) -> None:
    job = await _complete(resources)
    redis_db.persist(redis_key("job", job.id))
    assert await resources.compaction.compact(NOW) == 1
    assert cast(Any, redis_db).pttl(redis_key("job", job.id)) == -1


async def test_a_compact_record_takes_at_most_600_bytes(resources: Resources, redis_db: redis.Redis) -> None:
    """On a server without any setting of ours: its hashes hold values of 64 bytes in one list."""
    name = redis_key("job", (await _complete(resources)).id)
    whole = cast(Any, redis_db).memory_usage(name)
    await resources.compaction.compact(NOW)
    assert cast(Any, redis_db).memory_usage(name) <= 600 < whole


async def test_a_deletion_finds_everything_of_a_compact_record(resources: Resources, redis_db: redis.Redis) -> None:
    job = await _complete(resources, images=3)
    await resources.compaction.compact(NOW)
    first, *rest = job.images
    assert await resources.deletions.delete_image(job.id, first.image_id, account_id=job.account_id) is not None
    assert (await _read(resources, job.id)).images == tuple(rest)
    await resources.compaction.compact(NOW)
    assert (await _read(resources, job.id)).images == tuple(rest)
    assert await resources.deletions.delete_job(job.id, account_id=job.account_id) is not None
    listed = await resources.deletions.objects(job.id)
    assert listed is not None
    assert listed.folder == resources.images.job_folder(job.account_id, job.id, job.created_at)
    for image in job.images:
        assert not cast(Any, redis_db).exists(redis_key("image", image.image_id))
    assert not cast(Any, redis_db).zcard(redis_key("uncompacted"))
    assert audit(redis_db, max_attempts=5) == []


class DeletesMeanwhile(Compaction):
    """Between the reading of a record and its compaction, something else happens to the job."""

    meanwhile: Any

    async def _compact_one(self, job_id: str, fields: Mapping[str, str]) -> int:
        await self.meanwhile()
        return await super()._compact_one(job_id, fields)


@pytest.mark.parametrize("what", ["job", "image"])
async def test_a_record_that_changes_while_it_is_packed_keeps_the_change(
    resources: Resources, redis_db: redis.Redis, what: str
) -> None:
    job = await _complete(resources, images=2)
    compaction = DeletesMeanwhile(cast(Any, resources.jobs)._redis)

    async def delete_once() -> None:
        if what == "job":
            await resources.deletions.delete_job(job.id, account_id=job.account_id)
        else:
            await resources.deletions.delete_image(job.id, job.images[0].image_id, account_id=job.account_id)

    compaction.meanwhile = delete_once
    await compaction.compact(NOW)
    found = await resources.jobs.find(job.id)
    assert (found.images if found else None) == (None if what == "job" else job.images[1:])
    assert bool(_fields(redis_db, job.id)) is (what == "image")
    assert audit(redis_db, max_attempts=5) == []


async def test_an_expansion_that_runs_twice_leaves_the_later_record(
    resources: Resources, redis_db: redis.Redis
) -> None:
    job = await _complete(resources, images=2)
    await resources.compaction.compact(NOW)
    packed = _fields(redis_db, job.id)
    await resources.compaction.expand(job.id, packed)
    await resources.deletions.delete_image(job.id, job.images[0].image_id, account_id=job.account_id)
    await resources.compaction.expand(job.id, packed)
    assert (await _read(resources, job.id)).images == job.images[1:]


async def test_a_record_that_is_not_whole_stays_as_it_is(
    resources: Resources, redis_db: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = await _complete(resources)
    cast(Any, redis_db).hset(redis_key("job", job.id), "finished", "soon")
    before = _fields(redis_db, job.id)
    assert await resources.compaction.compact(NOW) == 0
    assert _fields(redis_db, job.id) == before
    assert f"job {job.id}: its record stays as it is" in caplog.text
    assert not cast(Any, redis_db).zcard(redis_key("uncompacted")), "looked at once"


async def test_a_record_that_is_compact_already_leaves_the_list(resources: Resources, redis_db: redis.Redis) -> None:
    job = await _complete(resources)
    await resources.compaction.compact(NOW)
    before = _fields(redis_db, job.id)
    cast(Any, redis_db).zadd(redis_key("uncompacted"), {job.id: 0})
    await resources.compaction.compact(NOW)
    assert _fields(redis_db, job.id) == before
    assert not cast(Any, redis_db).zcard(redis_key("uncompacted"))


@pytest.mark.parametrize("at_once", [1, 100])
async def test_jobs_that_an_earlier_version_completed_are_listed_by_the_migration(
    resources: Resources, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(compaction, "SCANNED_AT_ONCE", at_once)
    monkeypatch.setattr(compaction, "BATCH", at_once)
    job = await _complete(resources)
    cast(Any, redis_db).delete(redis_key("uncompacted"))
    assert await resources.compaction.compact(NOW) == 0
    assert [each.applied_at for each in await resources.compaction.migrations()] == [None]
    assert await resources.compaction.apply_migrations() == ["list-uncompacted"]
    assert await resources.compaction.apply_migrations() == []
    assert await resources.compaction.compact(NOW) == 1
    assert (await _read(resources, job.id)).state is JobState.COMPLETED
    assert await resources.compaction.apply_migrations(again=True) == ["list-uncompacted"]
    assert not cast(Any, redis_db).zcard(redis_key("uncompacted"))


TEXT = st.text(max_size=400)
IMAGES = st.builds(
    StoredImage,
    image_id=st.builds(new_image_id) | TEXT,
    image_uri=st.from_regex(r"\A(s3://b/p/)?images/[0-9a-f]{32}/2026/11/23/gen_x/a[0-9]{1,3}-0?[0-3]\.png\Z") | TEXT,
    width=st.integers(1, 4096),
    height=st.integers(1, 4096),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex) | TEXT,
    size_bytes=st.integers(0, 2**40),
)
REQUESTS = st.builds(
    GenerationRequest,
    prompt=TEXT,
    lora_id=TEXT,
    negative_prompt=TEXT,
    seeds=st.lists(st.integers(0, SEED_SPACE - 1), min_size=1, max_size=4).map(tuple),
)
UPSCALE = UpscaleRequest(image_id="img_x", scale_factor=4, source_uri="s3://x/y", source_width=512, source_height=768)


@settings(max_examples=60, deadline=None)
@given(
    request=REQUESTS | st.just(UPSCALE),
    images=st.lists(IMAGES, max_size=4),
    key=st.sampled_from(["", "key_a"]),
    missing=st.sets(st.sampled_from(["started", "seconds", "timings"])),
)
def test_any_record_comes_back_whole(
    request: GenerationRequest | UpscaleRequest, images: list[StoredImage], key: str, missing: set[str]
) -> None:
    is_upscale = isinstance(request, UpscaleRequest)
    job_id = "up_x" if is_upscale else "gen_x"
    fields = {
        "state": "completed",
        "kind": "upscale" if is_upscale else "generation",
        "variant": "b",
        "account": "acct_a",
        "attempt": "3",
        "request": write_request(request),
        "images": write_images(images),
        "created": "1795000000123",
        "started": "1795000000456",
        "finished": "1795000009999",
        "progress": "100",
        "seconds": "1.25",
        "timings": write_timings(Timings(load=0.1, denoise=1.0, store=0.15)),
    } | ({"key": key} if key else {})
    fields = {name: text for name, text in fields.items() if name not in missing}
    parts = pack(job_id, fields)
    assert all(len(part.encode()) <= 64 for part in parts)
    packed = {name: fields[name] for name in ("state", "variant", "account", "attempt")}
    packed |= {str(number): part for number, part in enumerate(parts)}
    assert read_job(job_id, packed) == read_job(job_id, fields)


@pytest.mark.parametrize(
    "parts", [{"0": "x"}, {"0": "\x01\x7f\x7f"}, {"0": ""}], ids=["noise", "another format", "nothing"]
)
def test_a_damaged_compact_record_is_unreadable_by_name(parts: Mapping[str, str]) -> None:
    with pytest.raises(UnreadableRecord):
        unpack("gen_x", {"state": "completed", "account": "a", "variant": "a", "attempt": "1", **parts})
