"""The upscaler deployment: upscales stored images, beside the generator or on a card of its own."""

import asyncio

from deployments.args import UpscalerArgs
from deployments.replica import WorkReplica
from serve_app.domain.jobs import JobKind
from serve_app.executors.upscale import UpscaleExecutor
from serve_app.service.executor import Executor
from serve_app.service.resources import Resources


class Upscaler(WorkReplica):
    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(resources: Resources) -> Executor:
            from deployments.upscaler_loader import load_upscaler  # torch: for the replica alone

            return UpscaleExecutor(await asyncio.to_thread(load_upscaler, args), resources)

        await self.open(args, JobKind.UPSCALE, set_up)
