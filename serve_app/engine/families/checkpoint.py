"""Where a base model's weights lie, and how diffusers' pipeline is made of them; nothing is ever fetched from a network."""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.loaders.single_file_utils import SingleFileComponentError

diffusers: Any = importlib.import_module("diffusers")  # its lazy modules and config objects have no usable types

UNNEEDED = ("safety_checker", "feature_extractor", "image_encoder")


class Checkpoint(NamedTuple):
    """A safetensors file in the layout of the original SD code, and a folder that says what is in it."""

    file: Path
    config: Path
    """A diffusers folder of the same architecture. Its configs, tokenizers and scheduler are read, never its weights."""


Source = Path | Checkpoint
"""Where a base model comes from. A path is a diffusers folder, or a file whose config is the folder of its name beside it."""


def name_of(source: Source) -> str:
    """What a base model is called that was given no name."""
    path = source if isinstance(source, Path) else source.file
    return path.stem if path.suffix == ".safetensors" else path.name


def load_pipeline(source: Source, dtype: torch.dtype) -> Any:
    """diffusers' pipeline. Raises OSError when something is not there, ValueError when it is not what it should be."""
    if isinstance(source, Checkpoint):
        return _load_file(source, dtype)
    if source.suffix == ".safetensors":
        return _load_file(Checkpoint(source, source.with_suffix("")), dtype)
    return _load_folder(source, dtype)


def _load_folder(folder: Path, dtype: torch.dtype) -> Any:
    index = _read_index(folder)
    unneeded = {name: None for name in UNNEEDED if name in index}
    return diffusers.DiffusionPipeline.from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, dtype=dtype, **unneeded
    )


def _load_file(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    file, config = checkpoint
    if file.suffix != ".safetensors" or not file.is_file():
        raise FileNotFoundError(f"{file}: no such safetensors file")
    if not (config / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{file}: a single file does not say how to read it, and {config} holds no model_index.json. Give as its "
            f"config a diffusers folder of the same architecture, or put one there; its weights are not needed"
        )
    family = getattr(diffusers, _read_index(config)["_class_name"])
    unneeded = dict.fromkeys(UNNEEDED)
    incomplete = ValueError(f"{file}: lacks weights that the architecture at {config} has")
    try:
        pipeline = family.from_single_file(
            str(file), config=str(config), local_files_only=True, dtype=dtype, **unneeded
        )
    except NotImplementedError as error:  # raised where weights that were never filled in are moved
        raise incomplete from error
    except (ValueError, KeyError, AttributeError, SingleFileComponentError) as error:
        raise ValueError(f"{file}: is not of the architecture at {config}: {error}") from error
    if any(_lacks_numbers(component) for component in pipeline.components.values()):
        raise incomplete
    return pipeline


def _lacks_numbers(component: object) -> bool:
    return isinstance(component, torch.nn.Module) and any(weight.is_meta for weight in component.parameters())


def _read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = diffusers.DiffusionPipeline.load_config(str(folder), local_files_only=True)
    if "unet" not in index:
        raise ValueError(
            f"{folder}: {index.get('_class_name')} has no UNet; Stable Diffusion 1.x, 2.x and XL are supported"
        )
    return index
