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

    Serve takes it for started, and so the application for running, once a generator of each group has run in this Ray
    cluster. By itself Serve calls a cluster running while none of its generators can start, where the least number of
    them is zero.
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
            raise RuntimeError("reaping has ended")

    async def __del__(self) -> None:
        self._reaping.cancel()
        await asyncio.wait({self._reaping})
        await self._stack.aclose()
