"""The catalog file: base models and LoRA adapters in YAML.

    base_models:
      - id: pocket                      # the name by which adapters and replicas refer to it
        folder: ../models/pocket        # a diffusers folder
      - id: painting
        file: ../models/painting.safetensors   # or one safetensors file, which does not describe its architecture:
        config: ../models/sdxl-config   # a diffusers folder of the same architecture, whose weights are not read;
                                        # missing means the folder of the file's name beside it (../models/painting)
    adapters:
      - id: model_outlineaaaaaaaaaaaaaaaaaaa   # 1..128 of A-Z a-z 0-9 _ -; `lora_id` and `model_id` outside
        name: Outline
        description: Thin black lines on white.
        created_at: 2026-11-21T12:00:00Z
        file: ../models/pocket/loras/outline.safetensors   # a path or an fsspec URL (s3://…); or
                                                           # folder: …, with PEFT's adapter_config.json and weights
        base_model: pocket
        sha256: 9f…                     # optional: computed when missing; of a folder, see `weights_digest`
        accounts: [acme, acct_…]        # optional: names or ids that may use it; missing means everyone

Relative paths are read from the file's own folder. A row with a mistake is set aside, with the row and the field that hold it;
the rest is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pydantic
import yaml

from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.stores.catalog_rows import AdapterRow, BaseModelRow, describe

_SECTIONS = ("base_models", "adapters")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Row = TypeVar("_Row", BaseModelRow, AdapterRow)


class CatalogError(ValueError):
    """The catalog file as a whole cannot be read; the message names it, and the section."""


class SetAside(NamedTuple):
    """A row that is not served, and why."""

    id: str
    """Empty where the row has none."""
    reason: str


class Catalog(NamedTuple):
    """The file's valid rows by id, in its order, and the others.

    An adapter whose row names no digest has none yet.
    """

    base_models: Mapping[str, BaseModel]
    adapters: Mapping[str, Adapter]
    set_aside: Sequence[SetAside]


def read_catalog(path: Path) -> Catalog:
    """Read the catalog file. Raises `CatalogError`."""
    sections = _load_sections(path)
    set_aside: list[SetAside] = []
    base_rows = list(_good_rows(BaseModelRow, path, "base_models", sections["base_models"], set_aside))
    base_models = {row.id: row.read(path) for _, row in base_rows}
    if sections["base_models"] and not base_models:
        raise CatalogError(set_aside[0].reason)
    adapters: dict[str, Adapter] = {}
    for place, row in _good_rows(AdapterRow, path, "adapters", sections["adapters"], set_aside):
        if row.base_model in base_models:
            adapters[row.id] = row.read(path)
        else:
            set_aside.append(SetAside(row.id, f"{place}: base_model {row.base_model!r} is not in base_models"))
    return Catalog(base_models, adapters, set_aside)


def _good_rows(
    model: type[_Row], path: Path, section: str, rows: Sequence[object], set_aside: list[SetAside]
) -> Iterator[tuple[str, _Row]]:
    """Yield each valid row with its place, and set the others aside."""
    ids: set[str] = set()
    for number, content in enumerate(rows, start=1):
        given = cast(Any, content).get("id") if isinstance(content, dict) else None
        name = str(given) if given is not None else ""
        place = f"{path}: {section}, row {number}" + (f" ({name or 'no id'})" if isinstance(content, dict) else "")
        try:
            row = model.model_validate(content)
        except pydantic.ValidationError as error:
            set_aside.append(SetAside(name, f"{place}: {describe(error)}"))
            continue
        if row.id in ids:
            set_aside.append(SetAside(name, f"{place}: id {row.id!r} is used twice"))
            continue
        ids.add(row.id)
        yield place, row


def _load_sections(path: Path) -> Mapping[str, Sequence[object]]:
    content = _load_yaml(path)
    for name in content:
        if name not in _SECTIONS:
            raise CatalogError(f"{path}: unknown section {name!r}")
    sections = {name: [] if content.get(name) is None else content[name] for name in _SECTIONS}
    for name, rows in sections.items():
        if not isinstance(rows, list):
            raise CatalogError(f"{path}: {name}: must be a list")
    return cast(Mapping[str, Sequence[object]], sections)


def _load_yaml(path: Path) -> Mapping[object, object]:
    try:
        content: object = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CatalogError(f"{path}: must hold base_models and adapters")
    return cast(Mapping[object, object], content)
