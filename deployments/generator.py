"""The generator deployment: one engine, one worker, as much of a card as its args ask for."""

import asyncio
from pathlib import Path

from deployments.args import GeneratorArgs
from deployments.benches import GenerationBench
from deployments.device import prepare_device
from deployments.replica import WorkReplica
from serve_app.domain.catalog import BaseModel
from serve_app.engine import Checkpoint, Engine, EngineOptions
from serve_app.service.bench import Bench
from serve_app.service.resources import Resources


class Generator(WorkReplica):
    async def __init__(self, args: GeneratorArgs) -> None:
        async def set_up(resources: Resources) -> Bench:
            return GenerationBench(await asyncio.to_thread(load_engine, args, resources), resources)

        await self.open(args, set_up)


def load_engine(args: GeneratorArgs, resources: Resources) -> Engine:
    prepare_device(args)
    sources = {model.id: _source(model) for model in resources.catalog.base_models()}
    return Engine.load(sources, EngineOptions(**args.engine))


def _source(model: BaseModel) -> Path | Checkpoint:
    source = Path(model.source)
    return Checkpoint(source, Path(model.config)) if model.config else source
