"""Loads diffusers' pipeline of a base model from a folder or a single file, and never from a network."""

import importlib
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.loaders.single_file_utils import SingleFileComponentError

_LIBRARIES = ("diffusers.utils.logging", "transformers.utils.logging")
_MISLEADING = {
    "diffusers.pipelines.pipeline_utils": "Expected types for vae",  # our VAE is a tiny one, which the UNet suits
    "transformers.utils.import_utils": "ImageProcessor` requires torchvision",  # nothing here processes images by it
}
"""Part of each warning's text, by the logger that emits it."""


@contextmanager
def quiet_loading() -> Generator[None]:
    """Hide progress bars and two misleading warnings of diffusers and transformers until the end of the block."""
    libraries: list[Any] = [importlib.import_module(name) for name in _LIBRARIES]
    with_bars = [library for library in libraries if library.is_progress_bar_enabled()]
    loggers = [logging.getLogger(name) for name in _MISLEADING]
    for library in with_bars:
        library.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_is_not_misleading)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_not_misleading)
        for library in with_bars:
            library.enable_progress_bar()


def _is_not_misleading(record: logging.LogRecord) -> bool:
    return _MISLEADING[record.name] not in record.getMessage()


diffusers: Any = importlib.import_module("diffusers")  # its lazy modules and config objects have no usable types

UNNEEDED = ("safety_checker", "feature_extractor", "image_encoder")


class Checkpoint(NamedTuple):
    """A safetensors file of the original Stable Diffusion code's layout, and a folder that describes it."""

    file: Path
    config: Path
    """A diffusers folder of the same architecture. Its configs, tokenizers and scheduler are read, never its weights.
    """


Source = Path | Checkpoint
"""Origin of a base model. A path is a diffusers folder, or a file whose config is the folder of its name beside it."""


def name_of(source: Source) -> str:
    """Name a base model that was given no name after its file or folder."""
    path = source if isinstance(source, Path) else source.file
    return path.stem if path.suffix == ".safetensors" else path.name


def pipeline_class(source: Source) -> str:
    """Name of diffusers' pipeline class for a base model. Raises OSError when its folder or file is missing."""
    file, folder = _file_and_folder(source)
    if file is not None:
        if file.suffix != ".safetensors" or not file.is_file():
            raise FileNotFoundError(f"{file}: no such safetensors file")
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"{file}: a single file does not describe its contents, and {folder} holds no model_index.json. "
                "Give as its config a diffusers folder of the same architecture, or put one there; its weights are not "
                "needed"
            )
    return str(_read_index(folder).get("_class_name"))


def load_pipeline(source: Source, dtype: torch.dtype) -> Any:
    """Load diffusers' pipeline.

    Raises OSError when a file is missing, ValueError when one is of another architecture.
    """
    file, folder = _file_and_folder(source)
    with quiet_loading():
        return _load_folder(folder, dtype) if file is None else _load_file(file, folder, pipeline_class(source), dtype)


def _file_and_folder(source: Source) -> tuple[Path | None, Path]:
    """Return the single file, or None, and the folder that describes it or holds the weights."""
    if isinstance(source, Checkpoint):
        return source
    return (source, source.with_suffix("")) if source.suffix == ".safetensors" else (None, source)


def _load_folder(folder: Path, dtype: torch.dtype) -> Any:
    index = _read_index(folder)
    unneeded = {name: None for name in UNNEEDED if name in index}
    return diffusers.DiffusionPipeline.from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, dtype=dtype, **unneeded
    )


def _load_file(file: Path, config: Path, class_name: str, dtype: torch.dtype) -> Any:
    pipeline = getattr(diffusers, class_name)
    unneeded = dict.fromkeys(UNNEEDED)
    incomplete = ValueError(f"{file}: lacks weights that the architecture at {config} has")
    try:
        loaded = pipeline.from_single_file(
            str(file), config=str(config), local_files_only=True, dtype=dtype, **unneeded
        )
    except NotImplementedError as error:  # raised where weights that were never filled in are moved
        raise incomplete from error
    except (ValueError, KeyError, AttributeError, SingleFileComponentError) as error:
        raise ValueError(f"{file}: is not of the architecture at {config}: {error}") from error
    if any(_lacks_numbers(component) for component in loaded.components.values()):
        raise incomplete
    return loaded


def _lacks_numbers(component: object) -> bool:
    return isinstance(component, torch.nn.Module) and any(weight.is_meta for weight in component.parameters())


def _read_index(folder: Path) -> dict[str, Any]:
    return diffusers.DiffusionPipeline.load_config(str(folder), local_files_only=True)
