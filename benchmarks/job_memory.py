"""What a job takes of Redis, with its indexes: while it waits, and after each way of ending.

    python -m benchmarks.job_memory

Of two sizes of prompt, on two servers: one that nobody has configured, and one with `hash-max-ziplist-value 4096`, as
ours are. The figures leave out `recent`, which holds the newest 10,000 jobs and no more. Of completed jobs, then, what
each family of keys takes, with its entries in Redis' own tables.
"""

import asyncio
import hashlib
import random
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import redis

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Failure, JobKind, NewJob, StoredImage, Timings, new_image_id, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.jobs.queue import JobQueue, new_nonce
from serve_app.settings import Settings
from serve_app.store.embedded_redis import COMPACT_HASHES, ensure_redis, stop_redis
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect

ACCOUNTS, LORAS = 10, 50
FAMILIES = ("job", "image", "jobs")
UNCONFIGURED = dict.fromkeys(COMPACT_HASHES, "64")
EMOJI = [chr(code) for code in (*range(0x1F300, 0x1F650), *range(0x1F680, 0x1F700))]


class Prompts(NamedTuple):
    """Prompts of one size, and of how many jobs."""

    name: str
    jobs: int
    draw: Callable[[], tuple[str, str]]


def _usual() -> tuple[str, str]:
    return "a lighthouse on a cliff at dusk, waves below, gulls in the wind, long exposure, film grain, ", ""


def _largest() -> tuple[str, str]:
    return "".join(random.choices(EMOJI, k=4_000)), "".join(random.choices(EMOJI, k=4_000))


SIZES = (Prompts("92 characters", 10_000, _usual), Prompts("two of 4,000 emoji", 1_000, _largest))


def main() -> None:
    random.seed(0)
    for prompts in SIZES:
        for options in (UNCONFIGURED, COMPACT_HASHES):
            for ending, end in ENDINGS.items():
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        asyncio.run(_measure(Path(folder), prompts, options, ending, end))
                    finally:
                        stop_redis(Path(folder))


async def _measure(folder: Path, prompts: Prompts, options: dict[str, str], ending: str, end: "End") -> None:
    url = ensure_redis(folder).url
    server = cast(Any, redis.Redis.from_url(url))
    server.config_set("appendonly", "no")
    for name, value in options.items():
        server.config_set(name, value)
    for number in range(LORAS):
        row = {"owner": "", "open": "1", "sha256": hashlib.sha256(_name(number).encode()).hexdigest()}
        server.hset(redis_key("lora", _lora(number)), mapping=row)
    client = connect(url)
    limits: Mapping[str, Any] = {"max_queued": prompts.jobs, "max_queued_per_account": prompts.jobs}
    queue = JobQueue(client, Settings(data_dir=folder, redis_url=url, **limits))
    empty = server.info("memory")["used_memory"]

    def a_job() -> float:
        recent: int = server.memory_usage(redis_key("recent"), samples=0)
        return (server.info("memory")["used_memory"] - empty - recent) / prompts.jobs

    job_ids = [await _accept(queue, prompts.draw(), number) for number in range(prompts.jobs)]
    waiting = a_job()
    await end(queue, job_ids)
    print(f"{prompts.name}, {options}, bytes a job: waiting {waiting:,.0f}, {ending} {a_job():,.0f}", end="")
    if ending == "completed":
        print(", of which", ", ".join(f"{each} {_free(server, each) / prompts.jobs:,.0f}" for each in FAMILIES), end="")
    print(flush=True)
    await client.aclose()
    server.close()


def _free(server: Any, family: str) -> int:
    """Delete a family of keys; return the bytes that this freed."""
    before: int = server.info("memory")["used_memory"]
    server.delete(*list(server.scan_iter(match=redis_key(family, "*"), count=1_000)))
    return before - server.info("memory")["used_memory"]


async def _accept(queue: JobQueue, prompts: tuple[str, str], number: int) -> str:
    job_id, lora = new_job_id(JobKind.GENERATION), _lora(number % LORAS)
    await queue.accept(
        NewJob(
            job_id=job_id,
            variant=Variant.A,
            account_id="acct_" + _name(number % ACCOUNTS),
            request=GenerationRequest(
                prompt=prompts[0], negative_prompt=prompts[1], loras=(LoraUse(lora),), seeds=(secrets.randbits(63),)
            ),
            loras=(LoraUse(lora),),
            key_id="key_" + _name(number % ACCOUNTS),
            request_id="req_" + secrets.token_hex(12),
            plan="basic",
        )
    )
    return job_id


End = Callable[[JobQueue, Sequence[str]], Awaitable[None]]


async def _complete(queue: JobQueue, job_ids: Sequence[str]) -> None:
    async def finish(claim: Claim) -> None:
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

    await _with_each(queue, finish)


async def _fail(queue: JobQueue, job_ids: Sequence[str]) -> None:
    failure = Failure(code=FailureCode.TIMEOUT, message="The job took longer than the limit.")

    async def fail(claim: Claim) -> None:
        await queue.fail(claim.lease, failure, retry=False)

    await _with_each(queue, fail)


async def _with_each(queue: JobQueue, end: Callable[[Claim], Awaitable[None]]) -> None:
    while claims := await queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce(), limit=100):
        for claim in claims:
            await end(claim)


async def _cancel(queue: JobQueue, job_ids: Sequence[str]) -> None:
    for job_id in job_ids:
        await queue.cancel(job_id, account_id=None)


async def _expire(queue: JobQueue, job_ids: Sequence[str]) -> None:
    of_queue = vars(queue)
    of_queue["_settings"] = of_queue["_settings"].model_copy(update={"queue_age_limit": timedelta()})
    while await queue.reap():
        pass


ENDINGS: Mapping[str, End] = {"completed": _complete, "failed": _fail, "canceled": _cancel, "expired": _expire}


def _lora(number: int) -> str:
    return "model_" + _name(number)


def _name(number: int) -> str:
    """Return text as long and as random as an id."""
    return hashlib.sha256(str(number).encode()).hexdigest()[:26]


if __name__ == "__main__":
    main()
