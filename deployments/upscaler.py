"""The upscaler deployment: upscales stored images, beside the generator or on a card of its own."""

import asyncio

from deployments.args import UpscalerArgs
from deployments.replica import WorkReplica
from serve_app.domain.jobs import JobKind
from serve_app.settings import ROOT
from serve_app.store.process import Process
from serve_app.worker.attempt import WorkerParts
from serve_app.worker.executor import Executor


class Upscaler(WorkReplica):
    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(_process: Process, parts: WorkerParts) -> Executor:
            # This imports torch, which only the replica may load.
            from serve_app.worker.upscale import UpscaleExecutor, load_upscaler

            weights = ROOT / args.weights if args.weights else None
            upscaler = await asyncio.to_thread(
                load_upscaler, weights, threads=args.threads, memory_share=args.memory_share
            )
            return UpscaleExecutor(upscaler, parts.images)

        await self.open(args, JobKind.UPSCALE, set_up)
