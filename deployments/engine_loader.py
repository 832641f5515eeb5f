"""Loads and warms up the engine of a generator replica; a deployment is described without torch."""

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
from serve_app.engine.layer_outline import outlined_table
from serve_app.executors.generation import GenerationExecutor
from serve_app.service.register import LAYER_TABLES
from serve_app.service.resources import Resources

log = logging.getLogger(__name__)

SIZES = ((512, 512), (512, 768), (768, 512), (768, 768))
"""Width and height of the images that both interfaces offer."""


def load_executor(args: GeneratorArgs, resources: Resources, base_models: Sequence[BaseModel]) -> GenerationExecutor:
    executor = GenerationExecutor(load_engine(args, base_models), resources)
    keep_layer_tables(base_models, resources.settings.data_dir)
    return executor


def keep_layer_tables(base_models: Sequence[BaseModel], data_dir: Path) -> None:
    """Make what the first upload of a LoRA would make in a process of its own, which takes 8 s more.

    On another machine than the ingress's it helps nobody, and costs less than a second.
    """
    for model in base_models:
        try:
            outlined_table(Path(model.config or model.source), data_dir.resolve() / LAYER_TABLES)
        except (OSError, ValueError, KeyError) as error:
            log.warning("base model %s: no layer table was made, so uploads make it: %s", model.id, error)


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
