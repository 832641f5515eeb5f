"""Registry of model families by the pipeline class in a checkpoint's model_index.json."""

from collections.abc import Callable

from serve_app.engine.families.checkpoint import Source, pipeline_class
from serve_app.engine.families.family import Family
from serve_app.engine.families.unet import UNetFamily
from serve_app.engine_options import EngineOptions

FAMILIES: dict[str, Callable[[Source, EngineOptions], Family]] = {
    "StableDiffusionPipeline": UNetFamily.load,
    "StableDiffusionXLPipeline": UNetFamily.load,
    "LatentConsistencyModelPipeline": UNetFamily.load,
}


def load_family(source: Source, options: EngineOptions) -> Family:
    """Load a base model with the family of its pipeline class.

    Raises OSError, or ValueError where there is no family.
    """
    name = pipeline_class(source)
    if name not in FAMILIES:
        raise ValueError(f"{source}: {name} is not supported; supported pipelines: {', '.join(FAMILIES)}")
    return FAMILIES[name](source, options)
