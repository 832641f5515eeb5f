"""Reads the index of a diffusers folder, which names the class of its pipeline and of each part."""

import json
from pathlib import Path
from typing import Any

NAMES = ("model_index.json", "modular_model_index.json")
"""The index of a pipeline, and that of a modular one, such as Anima's."""


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


def _part(entry: list[Any]) -> list[Any]:
    """Return the library and the class of a part; a list of numbers, such as Qwen-Image 2.1's noise levels, as it is."""
    if any(isinstance(each, int | float) for each in entry):
        return entry
    kind, said = entry[:2], entry[2] if len(entry) > 2 else {}
    return kind if any(kind) else list(said.get("type_hint") or kind)
