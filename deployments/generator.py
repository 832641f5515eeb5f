"""The generator deployment: one engine and one worker, on as much of a card as its args ask for."""

import asyncio

from deployments.args import GeneratorArgs
from deployments.replica import WorkReplica
from serve_app.domain.jobs import JobKind
from serve_app.resources import Resources
from serve_app.worker.executor import Executor


class Generator(WorkReplica):
    async def __init__(self, args: GeneratorArgs) -> None:
        async def set_up(resources: Resources) -> Executor:
            from serve_app.worker.generation import load_executor  # torch: for the replica alone

            base_models = await resources.applied_catalog.base_models()
            return await asyncio.to_thread(load_executor, args, resources, base_models)

        await self.open(args, JobKind.GENERATION, set_up)
