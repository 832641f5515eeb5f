"""Checks that what a service keeps is together again after its parts were put back from copies.

A service has three parts: Redis, the secrets, and the storage of images and LoRA files. Each is copied and put back by
its own means, so each may be of another day or another service than the rest.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from serve_app.domain.jobs import Job
from serve_app.jobs.history import JobHistory
from serve_app.jobs.images import ImageStore
from serve_app.loras.stored_weights import LoraFiles, where_it_is
from serve_app.operations.reports import OperatorReader
from serve_app.store.process import Process
from serve_app.store.redis_inspection import inspect_redis, keys_by_pepper

JOBS, LORAS = 1_000, 1_000
"""How many of the newest jobs and LoRAs are looked at: they show first that the storage was copied before Redis."""


@dataclass(frozen=True, kw_only=True)
class RestoreFacts:
    """Holds what the check of a restored service found, and what is wrong with it."""

    redis: str
    accounts: int
    keys: int
    jobs: int
    newest_job_at: datetime | None
    images: int
    loras: int
    missing: Sequence[str]
    """URIs of images and LoRA files that records name and the storage does not have; a LoRA file's is the one where the
    service looks for it now."""
    problems: Sequence[str]


async def check_restored(
    process: Process, reader: OperatorReader, history: JobHistory, store: ImageStore
) -> RestoreFacts:
    """Compare Redis, the secrets and the storage that the settings name. Raises `StoreUnavailable`."""
    server = await asyncio.to_thread(inspect_redis, process.redis_url)
    keys = await asyncio.to_thread(keys_by_pepper, process.redis_url)
    _, accounts = await reader.accounts(0, 1)
    records = await history.newest_records(JOBS)
    loras, _ = await reader.loras(0, LORAS)
    images = [image.image_uri for job in records.jobs for image in job.images]
    weights = [where_it_is(lora.adapter, process.settings.storage).file for lora in loras if lora.is_registered]
    problems: list[str] = []
    if not accounts:
        problems.append("this Redis holds no account: its copy was not put back, or this is another server")
    unlisted = sum(number for version, number in keys.items() if version not in process.settings.key_peppers)
    if unlisted:
        problems.append(f"{unlisted} API keys use a version of the pepper that ATELIER_PEPPERS does not list")
    if not _pepper_fits(store, records.jobs):
        problems.append("the pepper is another one: no API key works; set the ATELIER_PEPPER of the copy's time")
    if records.unreadable:
        problems.append(f"{len(records.unreadable)} job records cannot be read, such as {records.unreadable[0]}")
    if records.newer:
        problems.append(f"{records.newer} job records were written by a newer version of Atelier: run that version")
    return RestoreFacts(
        redis=server.release,
        accounts=accounts,
        keys=sum(keys.values()),
        jobs=len(records.jobs),
        newest_job_at=records.jobs[0].created_at if records.jobs else None,
        images=len(images),
        loras=len(weights),
        missing=await _missing(store, LoraFiles(process.settings), images, weights),
        problems=problems,
    )


def _pepper_fits(store: ImageStore, newest_first: Sequence[Job]) -> bool:
    """Return whether the newest image is in the folder that this pepper gives its account.

    The pepper itself is in no record, and Redis holds no text that only one pepper could have made but the digests of
    keys, whose secrets nobody has, and these names. Without any image there is nothing to compare with.
    """
    for job in newest_first:
        for image in job.images:
            return f"{store.account_folder(job.account_id)}/" in image.image_uri
    return True


async def _missing(store: ImageStore, files: LoraFiles, images: Sequence[str], weights: Sequence[str]) -> list[str]:
    """Return what the storage lacks, wherever it was when the records were written."""
    there = await asyncio.gather(*(store.exists(uri) for uri in images), *(files.exists(uri) for uri in weights))
    return [uri for uri, is_there in zip([*images, *weights], there, strict=True) if not is_there]
