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
        file: ../models/pocket/loras/outline.safetensors   # a path or an fsspec URL (s3://…)
        base_model: pocket
        sha256: 9f…                     # optional: computed at load when missing
        accounts: [acme, acct_…]        # optional: names or ids that may use it; missing means everyone

Relative paths are read from the file's own folder. A mistake stops the process with the row and the field that hold it.
"""

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, cast

import fsspec
import pydantic
import yaml
from pydantic_core import PydanticCustomError

from serve_app.domain.catalog import Adapter, BaseModel

_BLOCK = 1 << 20


class CatalogError(ValueError):
    """The catalog file is missing or wrong; the message names the file, the row and the field."""


class Catalog(NamedTuple):
    """Base models and adapters by id, in the file's order."""

    base_models: Mapping[str, BaseModel]
    adapters: Mapping[str, Adapter]


def read_catalog(path: Path, storage_options: Mapping[str, Any]) -> Catalog:
    """Raises `CatalogError`."""
    content = _load_yaml(path)
    try:
        rows = _CatalogRows.model_validate(content)
    except pydantic.ValidationError as error:
        raise CatalogError(_describe(path, content, error)) from error
    base_models: dict[str, BaseModel] = {}
    for number, row in enumerate(rows.base_models, start=1):
        place = f"{path}: base_models, row {number} ({row.id})"
        _require(row.id not in base_models, place, f"id {row.id!r} is used twice")
        base_models[row.id] = row.read(path)
    adapters: dict[str, Adapter] = {}
    for number, row in enumerate(rows.adapters, start=1):
        place = f"{path}: adapters, row {number} ({row.id})"
        _require(row.id not in adapters, place, f"id {row.id!r} is used twice")
        _require(row.base_model in base_models, place, f"base_model {row.base_model!r} is not in base_models")
        adapters[row.id] = row.read(path, place, storage_options)
    return Catalog(base_models, adapters)


def _matching(pattern: str, meaning: str) -> pydantic.AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("pattern", "must be {meaning}", {"meaning": meaning})
        return text

    return pydantic.AfterValidator(check)


def _read_time(value: object) -> datetime:
    """YAML parses an ISO time by itself; without a zone it is UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            value = None
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise PydanticCustomError("time", "must be an ISO 8601 time")


def _read_accounts(value: object) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str | int) for name in cast(list[object], value)):
        raise PydanticCustomError("accounts", "must be a list of account names or ids")
    return frozenset(str(name) for name in cast(list[object], value))


_Text = Annotated[str, pydantic.Field(min_length=1)]
_Identifier = Annotated[str, _matching(r"[A-Za-z0-9_\-]{1,128}", "1 to 128 of A-Z a-z 0-9 _ -")]
_Sha256 = Annotated[str, _matching(r"[0-9a-f]{64}", "64 lower-case hex digits")]
_Time = Annotated[datetime, pydantic.BeforeValidator(_read_time)]
_Accounts = Annotated[frozenset[str] | None, pydantic.BeforeValidator(_read_accounts)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class _BaseModelRow(_Strict):
    id: _Identifier
    folder: _Text | None = None
    file: _Text | None = None
    config: _Text | None = None

    @pydantic.model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.folder is None) == (self.file is None):
            raise PydanticCustomError("source", "must have either a folder or a file")
        if self.folder is not None and self.config is not None:
            raise PydanticCustomError("config", "config belongs to a file; a folder holds its own")
        if self.file is not None and not self.file.endswith(".safetensors"):
            raise PydanticCustomError("file", "file must be a .safetensors file")
        return self

    def read(self, catalog: Path) -> BaseModel:
        if self.file is None:
            return BaseModel(id=self.id, source=_resolve(catalog, self.folder or ""))
        config = self.config or self.file.removesuffix(".safetensors")
        return BaseModel(id=self.id, source=_resolve(catalog, self.file), config=_resolve(catalog, config))


class _AdapterRow(_Strict):
    id: _Identifier
    name: _Text
    description: str = ""
    created_at: _Time
    file: _Text
    sha256: _Sha256 | None = None
    base_model: _Text
    accounts: _Accounts = None

    def read(self, catalog: Path, place: str, storage_options: Mapping[str, Any]) -> Adapter:
        file = _resolve(catalog, self.file)
        return Adapter(
            id=self.id,
            name=self.name,
            description=self.description,
            created_at=self.created_at,
            file=file,
            sha256=self.sha256 or _digest(place, file, storage_options),
            base_model=self.base_model,
            accounts=self.accounts,
        )


class _CatalogRows(_Strict):
    base_models: list[_BaseModelRow] = []
    adapters: list[_AdapterRow] = []

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _allow_an_empty_section(cls, rows: object) -> object:
        return [] if rows is None else rows


_MEANINGS = {
    "missing": "is missing",
    "string_type": "must be text",
    "string_too_short": "must be text",
    "list_type": "must be a list",
    "model_type": "must be a mapping of fields",
}
"""What pydantic's errors are called here; our own bring their text."""


def _describe(path: Path, content: object, error: pydantic.ValidationError) -> str:
    """One line for the first mistake: file, section, row (its id), field, what it must be."""
    first = error.errors(include_url=False)[0]
    section, *rest = first["loc"] or ("",)
    place = f"{path}: {section}" if section else str(path)
    if rest:
        number = int(rest[0])
        row = cast(Any, content)[section][number]
        place += f", row {number + 1}" + (f" ({row.get('id', 'no id')})" if isinstance(row, dict) else "")
    if first["type"] == "extra_forbidden":
        return f"{path}: unknown section {section!r}" if not rest else f"{place}: unknown field {rest[1]!r}"
    meaning = _MEANINGS.get(first["type"], first["msg"])
    field = " ".join(str(part) for part in rest[1:2])
    return f"{place}: {field} {meaning}" if field else f"{place}: {meaning}"


def _load_yaml(path: Path) -> object:
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise CatalogError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CatalogError(f"{path}: must hold base_models and adapters")
    return cast(object, content)


def _resolve(catalog: Path, location: str) -> str:
    return location if "://" in location else str((catalog.parent / location).resolve())


def _digest(place: str, file: str, storage_options: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    options = storage_options if "://" in file and not file.startswith("file://") else {}
    try:
        with cast(Any, fsspec.open(file, "rb", **options)) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise CatalogError(f"{place}: file {file} cannot be read ({type(error).__name__})") from error
    return digest.hexdigest()


def _require(holds: bool, place: str, message: str) -> None:
    if not holds:
        raise CatalogError(f"{place}: {message}")
