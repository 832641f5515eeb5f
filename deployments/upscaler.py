"""The upscaler deployment: upscales stored images, beside the generator on the same card or on its own."""

import asyncio

import torch

from deployments.args import UpscalerArgs
from deployments.device import prepare_device
from deployments.replica import WorkReplica
from serve_app.executors.upscale import UpscaleExecutor
from serve_app.service.executor import Executor
from serve_app.service.resources import Resources
from serve_app.settings import ROOT
from serve_app.upscale.upscaler import Upscaler as ImageUpscaler


class Upscaler(WorkReplica):
    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(resources: Resources) -> Executor:
            return UpscaleExecutor(await asyncio.to_thread(load_upscaler, args), resources)

        await self.open(args, set_up)


def load_upscaler(args: UpscalerArgs) -> ImageUpscaler:
    prepare_device(args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ImageUpscaler.load(ROOT / args.weights if args.weights else None, device=device)
