"""Reads what the configurations of a base model say: its pipeline, and how wide its layers are."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from serve_app.model_index import read_index

_COMPONENTS = re.compile(r"unet|transformer|text_\w+")
"""LoRAs change the layers of these components."""
_WIDTHS = re.compile(
    r"d_(model|ff|kv)|(\w+_)?(dim|channels|layers|blocks|heads|per_block|(hidden|intermediate|patch)_size)"
)
"""What configurations of diffusers and transformers call a number of which a layer's sizes, or their count, are made."""
_OTHERS = {"time_cond_proj_dim", "projection_dim", "max_window_layers"}
"""Numbers that are called like sizes, and differ between base models that take the same LoRAs, such as an LCM and what it
was made from."""


def index_of(folder: Path) -> Mapping[str, Any]:
    """Return what a diffusers folder says of its pipeline; nothing where it cannot be read."""
    with suppress(OSError, ValueError):
        return read_index(folder)
    return {}


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
