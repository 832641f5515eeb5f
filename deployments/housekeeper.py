"""The housekeeper deployment: requeues jobs of dead workers, sweeps storage, delivers webhooks, keeps Redis running."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

from deployments.args import HousekeeperArgs
from deployments.ray_internals import prepare_replica, until_generators_have_run
from serve_app.api.jobs.records import job_record
from serve_app.operations.housekeeping import Housekeeping, reap_forever
from serve_app.store.process import open_process, watch_loop


class Housekeeper:
    """Runs the reaper until it is stopped; unhealthy once the reaper has ended.

    Serve counts it as started, and so the application as running, once a generator of each group has run in this Ray
    cluster. Without that, where the least number of generators is zero, Serve would call an application running
    although none of its generators can start.
    """

    async def __init__(self, args: HousekeeperArgs) -> None:
        settings = prepare_replica()
        self._stack = AsyncExitStack()
        process = await self._stack.enter_async_context(open_process(settings))
        parts = Housekeeping(process, job_record)
        await parts.catalog.apply_file_once()
        sweeping = asyncio.create_task(parts.uploads.sweep_forever())
        self._stack.callback(sweeping.cancel)
        self._reaping = asyncio.create_task(reap_forever(parts, every=timedelta(seconds=args.every_s)))
        self._stack.callback(watch_loop(process.measures))
        await until_generators_have_run()

    async def check_health(self) -> None:
        if self._reaping.done():
            raise RuntimeError("the reaper has ended")

    async def __del__(self) -> None:
        self._reaping.cancel()
        await asyncio.wait({self._reaping})
        await self._stack.aclose()
