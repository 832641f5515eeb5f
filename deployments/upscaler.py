"""The upscaler deployment: upscales stored images, beside the generator or on a card of its own."""

import asyncio

from deployments.args import UpscalerArgs
from deployments.replica import WorkReplica
from serve_app.domain.jobs import JobKind
from serve_app.resources import Resources
from serve_app.worker.executor import Executor
from serve_app.worker.upscale import UpscaleExecutor


class Upscaler(WorkReplica):
    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(resources: Resources) -> Executor:
            from serve_app.worker.upscale import load_upscaler  # torch: for the replica alone

            return UpscaleExecutor(await asyncio.to_thread(load_upscaler, args), resources)

        await self.open(args, JobKind.UPSCALE, set_up)
