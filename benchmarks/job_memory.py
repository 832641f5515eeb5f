"""What a job takes of Redis, with its indexes: waiting, completed, and compact.

    python -m benchmarks.job_memory

On two servers: one that nobody has configured, and one with `hash-max-ziplist-value 4096`, as ours are. Then what each family
of keys takes of a compact job, with its entries in Redis' own tables: `recent` holds the newest 10,000 jobs and no more.
"""

import asyncio
import hashlib
import secrets
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import redis

from serve_app.domain.jobs import JobKind, StoredImage, Timings, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.settings import Settings
from serve_app.stores.claiming import new_nonce
from serve_app.stores.compaction import Compaction
from serve_app.stores.embedded import COMPACT_HASHES, ensure_redis, stop_redis
from serve_app.stores.job_queue import JobQueue
from serve_app.stores.redis import connect
from serve_app.stores.redis_keys import redis_key

JOBS, ACCOUNTS = 10_000, 10
FAMILIES = ("job", "image", "jobs", "recent")
PROMPT = "a lighthouse on a cliff at dusk, waves below, gulls in the wind, long exposure, film grain, "
UNCONFIGURED = dict.fromkeys(COMPACT_HASHES, "64")


def main() -> None:
    for length in (1, 4):
        for options in (UNCONFIGURED, COMPACT_HASHES):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    asyncio.run(_measure(Path(folder), PROMPT * length, options))
                finally:
                    stop_redis(Path(folder))


async def _measure(folder: Path, prompt: str, options: dict[str, str]) -> None:
    url = ensure_redis(folder).url
    server = cast(Any, redis.Redis.from_url(url, decode_responses=True))
    server.config_set("appendonly", "no")
    for name, value in options.items():
        server.config_set(name, value)
    client = connect(url)
    queue = JobQueue(client, Settings(data_dir=folder, redis_url=url, max_queued=JOBS, max_queued_per_account=JOBS))
    empty = server.info("memory")["used_memory"]

    def a_job() -> float:
        return (server.info("memory")["used_memory"] - empty) / JOBS

    job_ids = [await _accept(queue, prompt, number) for number in range(JOBS)]
    waiting = a_job()
    done = 0
    while done < JOBS:
        done += await _finish_some(queue)
    completed, whole = a_job(), server.memory_usage(redis_key("job", job_ids[0]))
    await Compaction(client).compact(timedelta())
    compact, record = a_job(), server.memory_usage(redis_key("job", job_ids[0]))
    shares = ", ".join(f"{family} {_free(server, family) / JOBS:.0f}" for family in FAMILIES)
    await client.aclose()
    print(f"{options}, prompts of {len(prompt)} characters, bytes a job: waiting {waiting:.0f}, ", end="")
    print(f"completed {completed:.0f} (record {whole}), compact {compact:.0f} (record {record}): {shares}", flush=True)


def _free(server: Any, family: str) -> int:
    """Delete a family of keys; return the bytes that this freed."""
    before: int = server.info("memory")["used_memory"]
    names: list[str] = list(server.scan_iter(match=redis_key(family, "*"), count=1_000)) or [redis_key(family)]
    server.delete(*names)
    return before - server.info("memory")["used_memory"]


async def _accept(queue: JobQueue, prompt: str, number: int) -> str:
    job_id = new_job_id(JobKind.GENERATION)
    await queue.accept(
        job_id=job_id,
        variant=Variant.A,
        account_id="acct_" + _name(number % ACCOUNTS),
        request=GenerationRequest(prompt=prompt, lora_id="model_" + _name(number % 50), seeds=(secrets.randbits(63),)),
        group=hashlib.sha256(_name(number % 50).encode()).hexdigest(),
        key_id="key_" + _name(number % ACCOUNTS),
        request_id="req_" + secrets.token_hex(12),
        plan="basic",
    )
    return job_id


async def _finish_some(queue: JobQueue) -> int:
    claims: Sequence[Any] = await queue.claim("w", kind=JobKind.GENERATION, nonce=new_nonce(), limit=100)
    for claim in claims:
        folder = f"s3://pictures/atelier/images/{hashlib.md5(claim.account_id.encode()).hexdigest()}"
        image = StoredImage(
            image_id=new_image_id(),
            image_uri=f"{folder}/{claim.created_at:%Y/%m/%d}/{claim.lease.job_id}/a1-0.png",
            width=512,
            height=512,
            sha256=secrets.token_hex(32),
            size_bytes=345_678,
        )
        timings = Timings(load=0.104, denoise=1.235, store=0.053)
        await queue.finish(claim.lease, [image], seconds=1.392_817_3, timings=timings)
    return len(claims)


def _name(number: int) -> str:
    """As long and as random as an id."""
    return hashlib.sha256(str(number).encode()).hexdigest()[:26]


if __name__ == "__main__":
    main()
