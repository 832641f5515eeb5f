"""Loads and warms up the engine of a generator replica. Apart from the deployment, so that describing one loads no torch."""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from deployments.args import GeneratorArgs
from deployments.device import prepare_device
from serve_app.domain.catalog import BaseModel
from serve_app.engine import Checkpoint, Engine
from serve_app.executors.generation import GenerationExecutor
from serve_app.service.resources import Resources

log = logging.getLogger(__name__)

SIZES = ((512, 512), (512, 768), (768, 512), (768, 768))
"""Width and height of the images that both interfaces offer."""


def load_executor(args: GeneratorArgs, resources: Resources, base_models: Sequence[BaseModel]) -> GenerationExecutor:
    return GenerationExecutor(load_engine(args, base_models), resources)


def load_engine(args: GeneratorArgs, base_models: Sequence[BaseModel]) -> Engine:
    prepare_device(args)
    sources = {model.id: _source(model) for model in base_models}
    engine = Engine.load(sources, args.engine)
    warm_up(engine, args.warm_up_s)
    return engine


def warm_up(engine: Engine, seconds: float | None) -> None:
    """Do now what the first image of each size would wait for; see `GeneratorArgs.warm_up_s`."""
    sizes = SIZES
    if seconds is None:
        seconds = math.inf
        sizes = SIZES[:1] if engine.device.type == "cpu" else SIZES
    began = time.monotonic()
    for width, height in sizes:
        if time.monotonic() - began >= seconds:
            return
        try:
            engine.warm_up(width, height)
        except (torch.OutOfMemoryError, MemoryError):
            log.warning("images of %dx%d do not fit this device: jobs for them will fail by name", width, height)
        else:
            log.info("ready for %dx%d after %.1f s", width, height, time.monotonic() - began)


def _source(model: BaseModel) -> Path | Checkpoint:
    source = Path(model.source)
    return Checkpoint(source, Path(model.config)) if model.config else source
