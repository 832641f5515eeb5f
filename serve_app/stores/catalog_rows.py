"""Schemas of the catalog file's rows, and the message for an invalid one."""

import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Self, cast

import pydantic
from pydantic_core import PydanticCustomError

from serve_app.domain.catalog import Adapter, BaseModel


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


class BaseModelRow(_Strict):
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


class AdapterRow(_Strict):
    id: _Identifier
    name: _Text
    description: str = ""
    created_at: _Time
    file: _Text | None = None
    folder: _Text | None = None
    sha256: _Sha256 | None = None
    base_model: _Text
    accounts: _Accounts = None

    @pydantic.model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.folder is None) == (self.file is None):
            raise PydanticCustomError("source", "must have either a file or a folder")
        return self

    def read(self, catalog: Path) -> Adapter:
        """Return the adapter; without a digest where the row names none."""
        return Adapter(
            id=self.id,
            name=self.name,
            description=self.description,
            created_at=self.created_at,
            file=_resolve(catalog, self.file or self.folder or ""),
            is_folder=self.folder is not None,
            sha256=self.sha256 or "",
            base_model=self.base_model,
            accounts=self.accounts,
        )


_MEANINGS = {
    "missing": "is missing",
    "string_type": "must be text",
    "string_too_short": "must be text",
    "model_type": "must be a mapping of fields",
}
"""What pydantic's errors are called here; our own bring their text."""


def describe(error: pydantic.ValidationError) -> str:
    """Describe a row's first error: the field, and what it must be."""
    first = error.errors(include_url=False)[0]
    field = " ".join(str(part) for part in first["loc"][:1])
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}"
    return f"{field} {_MEANINGS.get(first['type'], first['msg'])}".strip()


def _resolve(catalog: Path, location: str) -> str:
    return location if "://" in location else str((catalog.parent / location).resolve())
