"""Base models and LoRA adapters on offer: a YAML file, and grants that operators make over it.

The file:

    base_models:
      - id: pocket                      # what adapters and replicas call it
        folder: ../models/pocket        # a diffusers folder
      - id: painting
        file: ../models/painting.safetensors   # or one safetensors file, which does not say how to read it:
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

Relative paths are read from the file's own folder. A mistake stops the process with the row that holds it.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, cast

import fsspec
import yaml
from redis.asyncio import Redis

from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.settings import Settings
from serve_app.stores.redis import key

ALLOW, DENY = "allow", "deny"
_ID = re.compile(r"[A-Za-z0-9_\-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 1 << 20


class CatalogError(ValueError):
    """The catalog file is missing or wrong; the message names the file and the row."""


class CatalogStore:
    """What is on offer and to whom. The file is read once; `reload()` reads it again."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis = cast(Any, redis)
        self._settings = settings
        self._base_models: dict[str, BaseModel] = {}
        self._adapters: dict[str, Adapter] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again, all or nothing. Raises `CatalogError`."""
        self._base_models, self._adapters = read_catalog(self._settings.catalog, self._settings.storage_options)

    def base_models(self) -> list[BaseModel]:
        return list(self._base_models.values())

    def all(self) -> list[Adapter]:
        """Every adapter, whoever may use it; for operators and replicas."""
        return list(self._adapters.values())

    def adapter(self, lora_id: str) -> Adapter | None:
        return self._adapters.get(lora_id)

    async def adapters(self, account_id: str) -> list[Adapter]:
        """The adapters this account may use, in the file's order."""
        names, grants = await self._standing(account_id)
        return [adapter for adapter in self._adapters.values() if _may_use(adapter, names, grants)]

    async def grant(self, lora_id: str, account_id: str) -> bool:
        """Let the account use the adapter, whatever the file says; False when there is no such adapter."""
        return await self._set(lora_id, account_id, ALLOW)

    async def revoke(self, lora_id: str, account_id: str) -> bool:
        """Stop the account from using the adapter, whatever the file says; False when there is no such adapter."""
        return await self._set(lora_id, account_id, DENY)

    async def _set(self, lora_id: str, account_id: str, word: str) -> bool:
        if lora_id not in self._adapters:
            return False
        await self._redis.hset(key("grants", account_id), lora_id, word)
        return True

    async def _standing(self, account_id: str) -> tuple[Sequence[str], Mapping[str, str]]:
        """What the account is called in the file, and the grants made for it since."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hget(key("account", account_id), "name")
        pipeline.hgetall(key("grants", account_id))
        name, grants = await pipeline.execute()
        return (account_id, name or ""), grants


def _may_use(adapter: Adapter, names: Sequence[str], grants: Mapping[str, str]) -> bool:
    """As `accept.lua` decides it for a job."""
    granted = grants.get(adapter.id)
    return adapter.is_open_to(*names) if granted is None else granted == ALLOW


def read_catalog(path: Path, storage: Mapping[str, Any]) -> tuple[dict[str, BaseModel], dict[str, Adapter]]:
    """Base models and adapters by id. Raises `CatalogError`."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise CatalogError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise CatalogError(f"{path}: must hold base_models and adapters")
    sections = cast(dict[str, Any], content)
    unknown = sections.keys() - {"base_models", "adapters"}
    if unknown:
        raise CatalogError(f"{path}: unknown section {min(map(str, unknown))!r}")
    base_models: dict[str, BaseModel] = {}
    for place, row in _rows(path, sections, "base_models"):
        base = _base_model(path, place, row)
        _must(base.id not in base_models, place, f"id {base.id!r} is used twice")
        base_models[base.id] = base
    adapters: dict[str, Adapter] = {}
    for place, row in _rows(path, sections, "adapters"):
        adapter = _adapter(path, place, row, storage)
        _must(adapter.id not in adapters, place, f"id {adapter.id!r} is used twice")
        _must(adapter.base_model in base_models, place, f"base_model {adapter.base_model!r} is not in base_models")
        adapters[adapter.id] = adapter
    return base_models, adapters


def _rows(path: Path, sections: Mapping[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    rows = sections.get(section) or []
    _must(isinstance(rows, list), f"{path}: {section}", "must be a list")
    found: list[tuple[str, dict[str, Any]]] = []
    for number, row in enumerate(cast(list[Any], rows), start=1):
        place = f"{path}: {section}, row {number}"
        _must(isinstance(row, dict), place, "must be a mapping of fields")
        fields = cast(dict[str, Any], row)
        found.append((f"{place} ({fields.get('id', 'no id')})", fields))
    return found


def _base_model(path: Path, place: str, row: dict[str, Any]) -> BaseModel:
    _only(place, row, {"id", "folder", "file", "config"})
    _must(("folder" in row) != ("file" in row), place, "must have either a folder or a file")
    if "folder" in row:
        _must("config" not in row, place, "config belongs to a file; a folder holds its own")
        return BaseModel(id=_identifier(place, row), source=_resolve(path, _text(place, row, "folder")))
    file = _text(place, row, "file")
    _must(file.endswith(".safetensors"), place, "file must be a .safetensors file")
    config = _text(place, row, "config", default=file.removesuffix(".safetensors"))
    return BaseModel(id=_identifier(place, row), source=_resolve(path, file), config=_resolve(path, config))


def _adapter(path: Path, place: str, row: dict[str, Any], storage: Mapping[str, Any]) -> Adapter:
    _only(place, row, {"id", "name", "description", "created_at", "file", "sha256", "base_model", "accounts"})
    file = _resolve(path, _text(place, row, "file"))
    digest = row.get("sha256") or _digest(place, file, storage)
    _must(isinstance(digest, str) and _SHA256.fullmatch(digest), place, "sha256 must be 64 lower-case hex digits")
    accounts = row.get("accounts")
    _must(accounts is None or isinstance(accounts, list), place, "accounts must be a list of account names or ids")
    return Adapter(
        id=_identifier(place, row),
        name=_text(place, row, "name"),
        description=_text(place, row, "description", default=""),
        created_at=_time(place, row.get("created_at")),
        file=file,
        sha256=digest,
        base_model=_text(place, row, "base_model"),
        accounts=None if accounts is None else frozenset(str(account) for account in accounts),
    )


def _identifier(place: str, row: dict[str, Any]) -> str:
    name = _text(place, row, "id")
    _must(_ID.fullmatch(name), place, "id must be 1 to 128 of A-Z a-z 0-9 _ -")
    return name


def _text(place: str, row: dict[str, Any], field: str, *, default: str | None = None) -> str:
    value = row.get(field, default)
    if not isinstance(value, str) or (not value and default is None):
        raise CatalogError(f"{place}: {field} must be text")
    return value


def _time(place: str, value: object) -> datetime:
    """YAML reads an ISO time by itself; without a zone it is UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise CatalogError(f"{place}: created_at must be an ISO 8601 time") from error
    if isinstance(value, datetime):
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise CatalogError(f"{place}: created_at must be an ISO 8601 time")


def _resolve(catalog: Path, place: str) -> str:
    return place if "://" in place else str((catalog.parent / place).resolve())


def _digest(place: str, file: str, storage: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    options = storage if "://" in file and not file.startswith("file://") else {}
    try:
        with cast(Any, fsspec.open(file, "rb", **options)) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise CatalogError(f"{place}: file {file} cannot be read ({type(error).__name__})") from error
    return digest.hexdigest()


def _only(place: str, row: dict[str, Any], known: set[str]) -> None:
    unknown = row.keys() - known
    _must(not unknown, place, f"unknown field {min(map(str, unknown), default='')!r}")


def _must(holds: object, place: str, message: str) -> None:
    if not holds:
        raise CatalogError(f"{place}: {message}")
