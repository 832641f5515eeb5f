"""Reads what a diffusers folder says of a base model: classes of its pipeline and parts, and how wide layers are."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

NAMES = ("model_index.json", "modular_model_index.json")
"""The index of a pipeline, and that of a modular one, such as Anima's."""
_COMPONENTS = re.compile(r"unet|transformer|text_\w+")
"""LoRAs change the layers of these components."""
_WIDTHS = re.compile(
    r"d_(model|ff|kv)|(\w+_)?(dim|channels|layers|blocks|heads|per_block|(hidden|intermediate|patch)_size)"
)
"""What configurations of diffusers and transformers call a number of which a layer's sizes, or their count, are made."""
_OTHERS = {"time_cond_proj_dim", "projection_dim", "max_window_layers"}
"""Numbers that are called like sizes, and differ between base models that take the same LoRAs, such as an LCM and what it
was made from."""


def index_file(folder: Path) -> Path:
    """Return the folder's index; where it has none, where that of a pipeline would be."""
    return next((file for name in NAMES if (file := folder / name).is_file()), folder / NAMES[0])


def is_modular(folder: Path) -> bool:
    return index_file(folder).name != NAMES[0]


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index: `_class_name` is that of the pipeline, and a part is [library, class].

    Modular ones say of each part where it was loaded from too; here it is always the part's own folder in this one.
    Raises OSError, or ValueError where it is no index.
    """
    file = index_file(folder)
    try:
        index: dict[str, Any] = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: is no index: {error}") from error
    return {name: _part(entry) if isinstance(entry, list) else entry for name, entry in index.items()}


def index_of(folder: Path) -> Mapping[str, Any]:
    """Return what a diffusers folder says of its pipeline; nothing where it cannot be read."""
    with suppress(OSError, ValueError):
        return read_index(folder)
    return {}


def is_distilled(folder: Path) -> bool:
    """Return whether a base model draws in few steps without guidance.

    Its index says so, or it is FLUX.1 schnell, which is told no guidance.
    """
    index, transformer = index_of(folder), _read(folder / "transformer" / "config.json")
    is_schnell = index.get("_class_name") == "FluxPipeline" and transformer.get("guidance_embeds") is False
    return is_schnell or bool(index.get("is_distilled"))


def _part(entry: list[Any]) -> list[Any]:
    """Return the library and the class of a part; a list of numbers, such as Qwen-Image 2.1's noise levels, as it is."""
    if any(isinstance(each, int | float) for each in entry):
        return entry
    kind, said = entry[:2], entry[2] if len(entry) > 2 else {}
    return kind if any(kind) else list(said.get("type_hint") or kind)


def widths_of(folder: Path) -> Mapping[str, Any]:
    """Return the numbers that give the layers of a diffusers folder their sizes, by component and name.

    Those of another text encoder are the same, or it does not load. Empty where the folder cannot be read.
    """
    files = [file for file in sorted(folder.glob("*/config.json")) if _COMPONENTS.fullmatch(file.parent.name)]
    return {f"{file.parent.name}.{name}": width for file in files for name, width in _widths(_read(file))}


def _widths(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sizes that a configuration names; of a model that also sees pictures, those of its text part."""
    of_texts = config.get("text_config")
    for name, value in (cast(Mapping[str, Any], of_texts) if isinstance(of_texts, dict) else config).items():
        sizes = cast(list[object], value) if isinstance(value, list) else [value]
        if _WIDTHS.fullmatch(name) and name not in _OTHERS and all(type(size) is int for size in sizes):
            yield name, value


def _read(file: Path) -> Mapping[str, Any]:
    """Return a configuration; nothing where it cannot be read."""
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(Mapping[str, Any], document) if isinstance(document, dict) else {}
