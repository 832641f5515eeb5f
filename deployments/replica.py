"""The replicas that work on jobs, the generator and the upscaler: take hints, report health, drain when stopped."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta

from ray import serve

from deployments.args import GeneratorArgs, UpscalerArgs, WorkerArgs
from deployments.ray_internals import note_run, prepare_replica
from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import DEFAULT_GROUP, JobKind, pool_of
from serve_app.engine import loading
from serve_app.jobs.workers import WorkerStatus
from serve_app.loras.applied_catalog import AppliedCatalog
from serve_app.loras.catalog import CatalogReader
from serve_app.settings import ROOT
from serve_app.store.process import Process, open_process, watch_loop
from serve_app.store.storage import FINDINGS, StoredFiles
from serve_app.worker.attempt import WorkerParts
from serve_app.worker.executor import Executor
from serve_app.worker.worker import Worker

log = logging.getLogger(__name__)

TELL_S = 1.0
"""A replica that starts reports its progress to Redis this often."""
LOG_S = 10.0
"""It logs its progress this often, while that changes."""


class Progress:
    """The progress of a replica that starts, in words, which any thread may replace by calling it with newer ones."""

    words = ""

    def __call__(self, words: str) -> None:
        self.words = words


SetUp = Callable[[Process, WorkerParts], Awaitable[Executor]]
"""Loads a worker's executor, given its process and the parts that workers have."""


class WorkReplica:
    """A worker in its own process that pulls jobs from Redis. Serve starts, checks and stops it."""

    _worker: Worker | None = None
    _progress: Progress

    async def open(self, args: WorkerArgs, pool: str, set_up: SetUp) -> None:
        """Load the executor and start the worker. Called once, by the constructor."""
        self._progress = Progress()
        settings = prepare_replica(secrets=("pepper",))
        self._drain = timedelta(seconds=args.drain_s)
        self._stack = AsyncExitStack()
        process = await self._stack.enter_async_context(open_process(settings))
        await AppliedCatalog(process.redis, settings).apply_file_once()
        parts = WorkerParts(process)
        status = WorkerStatus(process.redis)
        executor = await noting_start(pool, status, set_up(process, parts), self._progress)
        worker = Worker(parts, executor, name=_replica_name(), timing=args.timing)
        worker.start()
        self._stack.callback(watch_loop(process.measures))
        self._worker = worker
        await asyncio.to_thread(note_run, pool)

    async def hint(self) -> None:
        """Look for a newly accepted job now. Optional: the worker also polls."""
        if self._worker is not None:
            self._worker.hint()

    async def check_health(self) -> None:
        if self._worker is not None:
            self._worker.check()

    async def __del__(self) -> None:
        """Drain. Serve awaits this after the last hint and kills the process at the end of the graceful time."""
        if self._worker is None:
            return
        await self._worker.drain(self._drain)
        await self._stack.aclose()


class Generator(WorkReplica):
    """One engine and one worker, on as much of a card as its args ask for, for the base models of one group."""

    async def __init__(self, args: GeneratorArgs, group: str = DEFAULT_GROUP) -> None:
        async def set_up(process: Process, parts: WorkerParts) -> Executor:
            with loading():  # this imports torch, which only the replica may load
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
                findings=StoredFiles(process.settings, FINDINGS),
                tell=self._progress,
            )
            await asyncio.to_thread(keep_layer_tables, base_models, process.settings.data_dir)
            warming = warm_up(engine, warm_up_time)
            catalog_reader = CatalogReader(process.redis)
            return GenerationExecutor(
                engine, catalog_reader, parts.weights, parts.images, warming, base_models=base_models, group=group
            )

        await self.open(args, pool_of(group), set_up)


class Upscaler(WorkReplica):
    """Upscales stored images, on the generator's card or on one of its own."""

    async def __init__(self, args: UpscalerArgs) -> None:
        async def set_up(_process: Process, parts: WorkerParts) -> Executor:
            with loading():  # this imports torch, which only the replica may load
                from serve_app.worker.upscale import UpscaleExecutor, load_upscaler

            weights = ROOT / args.weights if args.weights else None
            upscaler = await asyncio.to_thread(
                load_upscaler, weights, threads=args.threads, memory_share=args.memory_share
            )
            return UpscaleExecutor(upscaler, parts.images)

        await self.open(args, JobKind.UPSCALE, set_up)


async def noting_start(
    pool: str, workers: WorkerStatus, setting_up: Awaitable[Executor], progress: Progress
) -> Executor:
    """Await the executor; record for `/readyz` how far it is, that it failed to load, or how long it took."""
    began = time.monotonic()
    telling = asyncio.create_task(_tell_forever(pool, workers, progress))
    try:
        executor = await setting_up
    except Exception as error:
        if not _is_of_a_stop(error):
            with suppress(StoreUnavailable):
                await workers.note_failure(pool, f"{type(error).__name__}: {error}")
        raise
    finally:
        telling.cancel()
    with suppress(StoreUnavailable):
        await workers.note_progress(pool, progress.words)
        await workers.note_start(pool, timedelta(seconds=time.monotonic() - began))
    log.info("%s", progress.words or f"the {pool} worker is ready")
    return executor


async def _tell_forever(pool: str, workers: WorkerStatus, progress: Progress) -> None:
    logged_at, logged = -LOG_S, ""
    while True:
        words = progress.words
        if words != logged and time.monotonic() - logged_at >= LOG_S:
            logged_at, logged = time.monotonic(), words
            log.info("%s", words)
        with suppress(StoreUnavailable):
            await workers.note_progress(pool, words)
        await asyncio.sleep(TELL_S)


def _is_of_a_stop(error: Exception) -> bool:
    """Return whether Serve stops the replica while it loads: then Python's thread pools take no more work."""
    return isinstance(error, RuntimeError) and str(error).startswith("cannot schedule new futures after")


def _replica_name() -> str:
    """A name unique per process: a replacement must not be taken for its predecessor."""
    return f"{serve.get_replica_context().replica_tag}-{secrets.token_hex(4)}"
