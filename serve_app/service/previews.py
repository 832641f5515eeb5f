"""Writes previews of a running job while somebody watches it, without delaying its steps."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from serve_app.domain.errors import StoreUnavailable
from serve_app.service.executor import Pixels
from serve_app.service.png import encode_png
from serve_app.stores.previews import Preview, PreviewStore

EVERY_S = 0.5
FIRST_STEP = 3
"""Before it a picture shows nothing but noise."""
LONGEST_SIDE = 64
"""In pixels; a page shows it larger."""

Unfinished = Callable[[str, int], tuple[int, Pixels] | None]
"""From a run's id and the longest side: its step and its picture so far; None for a run that has none."""


async def write_previews(
    job_id: str, run_ids: Sequence[str], unfinished: Unfinished, store: PreviewStore, pool: ThreadPoolExecutor
) -> None:
    """Store the newest picture of each run twice a second, until cancelled."""
    loop, shown = asyncio.get_running_loop(), dict[int, int]()
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            if not await store.is_watched(job_id):
                continue
            fresh = await loop.run_in_executor(pool, _fresh, run_ids, unfinished, dict(shown))
            if fresh:
                await store.put(job_id, fresh)
                shown |= {index: preview.step for index, preview in fresh.items()}
        except StoreUnavailable:
            continue


def _fresh(run_ids: Sequence[str], unfinished: Unfinished, shown: dict[int, int]) -> dict[int, Preview]:
    """Yield previews of runs that have moved on since they were shown."""
    found: dict[int, Preview] = {}
    for index, run_id in enumerate(run_ids):
        latest = unfinished(run_id, LONGEST_SIDE)
        if latest is not None and latest[0] >= FIRST_STEP and latest[0] != shown.get(index):
            found[index] = Preview(latest[0], encode_png(latest[1]))
    return found
