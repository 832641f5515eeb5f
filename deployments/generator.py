"""The generator deployment: one engine and one worker, on as much of a card as its args ask for.

Each replica loads the base models of one group, and takes only their jobs.
"""

import asyncio
from datetime import timedelta

from deployments.args import GeneratorArgs
from deployments.replica import WorkReplica
from serve_app.domain.jobs import DEFAULT_GROUP, pool_of
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.store.process import Process
from serve_app.worker.attempt import WorkerParts
from serve_app.worker.executor import Executor

FINDINGS = "findings"
"""The folder of the data directory where replicas keep what they measured about exactness."""


class Generator(WorkReplica):
    async def __init__(self, args: GeneratorArgs, group: str = DEFAULT_GROUP) -> None:
        async def set_up(process: Process, parts: WorkerParts) -> Executor:
            # This imports torch, which only the replica may load.
            from serve_app.worker.generation import GenerationExecutor, keep_layer_tables, load_engine, warm_up

            catalog = await AppliedCatalog(process.redis, process.settings).base_models()
            base_models = [model for model in catalog if model.group == group]
            if not base_models:
                raise RuntimeError(f"the catalog has no base model of the group {group}")
            warm_up_time = None if args.warm_up_s is None else timedelta(seconds=args.warm_up_s)
            engine = await asyncio.to_thread(
                load_engine,
                base_models,
                args.engine,
                threads=args.threads,
                memory_share=args.memory_share,
                warm_up_time=warm_up_time,
                findings=process.settings.data_dir.resolve() / FINDINGS,
                tell=self._progress,
            )
            await asyncio.to_thread(keep_layer_tables, base_models, process.settings.data_dir)
            warming = warm_up(engine, warm_up_time)
            return GenerationExecutor(
                engine, CatalogReader(process.redis), parts.weights, parts.images, warming, group=group
            )

        await self.open(args, pool_of(group), set_up)
