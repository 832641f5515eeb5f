"""The upscaler deployment: enlarges stored images, beside the generator on the same card or on its own."""

import asyncio
from pathlib import Path

import torch

from deployments.args import UpscalerArgs
from deployments.device import prepare_device
from deployments.replica import WorkReplica
from deployments.upscale_bench import UpscaleBench
from serve_app.service.bench import Bench
from serve_app.service.resources import Resources
from serve_app.upscale.upscaler import Upscaler as Enlarger


class Upscaler(WorkReplica):
    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(resources: Resources) -> Bench:
            return UpscaleBench(await asyncio.to_thread(load_upscaler, args), resources)

        await self.open(args, set_up)


def load_upscaler(args: UpscalerArgs) -> Enlarger:
    prepare_device(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Enlarger.load(Path(args.weights) if args.weights else None, device=device)
