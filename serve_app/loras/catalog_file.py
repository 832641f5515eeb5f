"""The catalog file: base models and LoRA adapters in YAML.

    base_models:
      - id: pocket                      # the name by which adapters and replicas refer to it
        folder: ../models/pocket        # a diffusers folder
      - id: painting
        file: ../models/painting.safetensors   # or one safetensors file, which does not describe its architecture:
        config: ../models/sdxl-config   # a diffusers folder of the same architecture, whose weights are not read;
                                        # missing means the folder of the file's name beside it (../models/painting)
        vae: ../models/vae.safetensors  # optional, as are the next two: another VAE, a diffusers folder or a file
        sampler: euler-a-karras         # what it draws with; missing means its own scheduler
        steps: 8                        # what it was made for, 1 to 50, and the guidance, 1 (none) to 20: the LoRA list
        guidance: 1                     # tells it, and console and SDK begin with it; missing means nothing special
        guidance_start: 0.2             # the part of an image's steps that has guidance, in fractions of them; missing
        guidance_end: 0.8               # means 0 and 1
        clip_skip: 1                    # the text encoder's last layers left out; what other programs call 2
        group: sdxl                     # the generators that load it (docs/operate); missing means `default`
      - id: turbo
        file: ../models/z_image_turbo.safetensors   # what a file of a diffusion transformer does not hold, such as
        config: ../models/z-image                   # the VAE, is read from this folder, or from folders of their own:
        text_encoder: ../models/qwen3-4b            # optional, as is the next
        tokenizer: ../models/qwen3-4b
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
        sampler: lcm-trailing           # optional, as are steps, guidance and its part: before what the base model says

Relative paths are read from the file's own folder. A row with a mistake is set aside, with the row and the field that
hold it; the rest is read. A weight file is digested once, and again when it has changed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar, cast

import pydantic
import yaml
from pydantic_core import PydanticCustomError

from serve_app.domain.catalog import FP8, Adapter, BaseModel
from serve_app.domain.families import abilities_of
from serve_app.domain.guidance import GuidancePart
from serve_app.domain.jobs import DEFAULT_GROUP, GROUP_NAME
from serve_app.domain.samplers import parse_sampler, passes_of
from serve_app.loras.sources import file_digest, file_version, weight_files, weights_digest
from serve_app.model_folder import index_of, is_distilled, widths_of
from serve_app.store.storage import storage_errors


def _matching(pattern: str, meaning: str) -> pydantic.AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise PydanticCustomError("pattern", "must be {meaning}", {"meaning": meaning})
        return text

    return pydantic.AfterValidator(check)


def _read_time(value: object) -> datetime:
    """Read a time, which YAML may already have parsed; one without a zone is UTC."""
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


def _read_sampler(name: str) -> str:
    try:
        parse_sampler(name)
    except ValueError as error:
        raise PydanticCustomError("sampler", "{reason}", {"reason": str(error).removeprefix("sampler: ")}) from error
    return name


def _within(least: int, most: int) -> pydantic.AfterValidator:
    def check(number: float) -> float:
        if not least <= number <= most:
            raise PydanticCustomError("range", "must be {least} to {most}", {"least": least, "most": most})
        return number

    return pydantic.AfterValidator(check)


_Text = Annotated[str, pydantic.Field(min_length=1)]
_Identifier = Annotated[str, _matching(r"[A-Za-z0-9_\-]{1,128}", "1 to 128 of A-Z a-z 0-9 _ -")]
_Sha256 = Annotated[str, _matching(r"[0-9a-f]{64}", "64 lower-case hex digits")]
_Time = Annotated[datetime, pydantic.BeforeValidator(_read_time)]
_Sampler = Annotated[str, pydantic.AfterValidator(_read_sampler)]
_Group = Annotated[str, _matching(GROUP_NAME, "1 to 32 of a-z 0-9 -, not beginning with -")]
_Steps = Annotated[int, pydantic.Field(strict=True), _within(1, 50)]
_Guidance = Annotated[float, pydantic.Field(strict=True), _within(1, 20)]
_Fraction = Annotated[float, pydantic.Field(strict=True), _within(0, 1)]
_Side = Annotated[int, pydantic.Field(strict=True, multiple_of=8), _within(256, 2048)]
_ClipSkip = Annotated[int, pydantic.Field(strict=True, ge=0)]
_Precision = Annotated[str, _matching(f"{FP8}|", f"{FP8}, or is left out")]
_Accounts = Annotated[frozenset[str] | None, pydantic.BeforeValidator(_read_accounts)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class _Drawn(_Strict):
    """How images of a base model or of a LoRA are drawn where a request leaves it open."""

    sampler: _Sampler = ""
    steps: _Steps | None = None
    guidance: _Guidance | None = None
    guidance_start: _Fraction | None = None
    guidance_end: _Fraction | None = None

    @pydantic.model_validator(mode="after")
    def _check_part(self) -> Self:
        try:
            GuidancePart.said_by(self)
        except ValueError as error:
            raise PydanticCustomError("part", "{reason}", {"reason": str(error).replace(":", "", 1)}) from error
        return self


class BaseModelRow(_Drawn):
    id: _Identifier
    folder: _Text | None = None
    file: _Text | None = None
    config: _Text | None = None
    vae: _Text | None = None
    clip_skip: _ClipSkip = 0
    group: _Group = DEFAULT_GROUP
    text_encoder: _Text | None = None
    tokenizer: _Text | None = None
    max_side: _Side | None = None
    precision: _Precision = ""

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
        config = "" if self.file is None else self.config or self.file.removesuffix(".safetensors")
        described_by = Path(_resolve(catalog, config or self.folder or ""))
        pipeline = str(index_of(described_by).get("_class_name", ""))
        abilities = abilities_of(pipeline)
        usual = abilities.usual_distilled if is_distilled(described_by) else abilities.usual
        return BaseModel(
            id=self.id,
            source=_resolve(catalog, self.file or self.folder or ""),
            config=_resolve(catalog, config) if config else "",
            vae=_resolve(catalog, self.vae) if self.vae else "",
            sampler=self.sampler,
            passes=passes_of(self.sampler),
            steps=self.steps or usual.steps,
            guidance=self.guidance or usual.guidance,
            guidance_start=self.guidance_start,
            guidance_end=self.guidance_end,
            clip_skip=self.clip_skip,
            group=self.group,
            pipeline=pipeline,
            max_side=self.max_side,
            text_encoder=_resolve(catalog, self.text_encoder) if self.text_encoder else "",
            tokenizer=_resolve(catalog, self.tokenizer) if self.tokenizer else "",
            precision=self.precision,
            widths=widths_of(described_by),
        )


class AdapterRow(_Drawn):
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
        location = _resolve(catalog, self.file or self.folder or "")
        fields = self.model_dump(exclude={"file", "folder", "sha256"})
        return Adapter(**fields, file=location, is_folder=self.folder is not None, sha256=self.sha256 or "")


_MEANINGS = {
    "list_type": "must be a list",
    "missing": "is missing",
    "string_type": "must be text",
    "string_too_short": "must be text",
    "model_type": "must be a mapping of fields",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "greater_than_equal": "must not be negative",
}
"""Texts for pydantic's errors, by their types; our own errors have their text."""


def describe(error: pydantic.ValidationError) -> str:
    """Describe a row's first error: the field, and what it must be."""
    first = error.errors(include_url=False)[0]
    field = " ".join(str(part) for part in first["loc"][:1])
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}"
    return f"{field} {_MEANINGS.get(first['type'], first['msg'])}".strip()


def _resolve(catalog: Path, location: str) -> str:
    return location if "://" in location else str((catalog.parent / location).resolve())


class Sections(_Strict):
    base_models: list[object] | None = None
    adapters: list[object] | None = None


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Row = TypeVar("_Row", BaseModelRow, AdapterRow)


class CatalogError(ValueError):
    """The catalog file as a whole cannot be read; the message names it, and the section."""


class SetAside(NamedTuple):
    """A row that is not served, and why."""

    id: str
    """It is empty where the row has none."""
    reason: str


class Catalog(NamedTuple):
    """The file's valid rows by id, in its order, and the others. An adapter whose row names no digest has none yet."""

    base_models: Mapping[str, BaseModel]
    adapters: Mapping[str, Adapter]
    set_aside: Sequence[SetAside]


def read_catalog(path: Path) -> Catalog:
    """Read the catalog file. Raises `CatalogError`."""
    sections = _load_sections(path)
    set_aside: list[SetAside] = []
    base_rows = _good_rows(BaseModelRow, path, "base_models", sections.base_models or (), set_aside)
    base_models = {row.id: row.read(path) for _, row in base_rows}
    if sections.base_models and not base_models:
        raise CatalogError(set_aside[0].reason)
    adapters: dict[str, Adapter] = {}
    for place, row in _good_rows(AdapterRow, path, "adapters", sections.adapters or (), set_aside):
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


def _load_sections(path: Path) -> Sections:
    try:
        return Sections.model_validate(yaml.load(path.read_text(encoding="utf-8"), _Loader))
    except OSError as error:
        raise CatalogError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise CatalogError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except pydantic.ValidationError as error:
        raise CatalogError(f"{path}: {describe(error)}") from error


class Digested(NamedTuple):
    """Adapters with their digests, those whose files cannot be read, and what to store for the next start.

    `known`: URI → version and digest.
    """

    adapters: Sequence[Adapter]
    set_aside: Sequence[SetAside]
    known: Mapping[str, str]


def add_digests(adapters: Sequence[Adapter], known: Mapping[str, str], options: Mapping[str, Any]) -> Digested:
    """Give each adapter its digest: the row's, the `known` one of an unchanged file, or the file's."""
    found: list[Adapter] = []
    set_aside: list[SetAside] = []
    remembered: dict[str, str] = {}
    for adapter in adapters:
        if adapter.sha256:
            found.append(adapter)
            continue
        try:
            files = {name: _digest(uri, known, remembered, options) for name, uri in weight_files(adapter).items()}
        except (*storage_errors(), ValueError, ImportError) as error:
            kind = "folder" if adapter.is_folder else "file"
            reason = f"adapter {adapter.id}: {kind} {adapter.file} cannot be read ({type(error).__name__})"
            set_aside.append(SetAside(adapter.id, reason))
        else:
            found.append(replace(adapter, sha256=weights_digest(files)))
    return Digested(found, set_aside, remembered)


def _digest(uri: str, known: Mapping[str, str], remembered: dict[str, str], options: Mapping[str, Any]) -> str:
    """Return the file's digest, and remember it where the storage knows the file's version.

    The version is read first, so that a change between the two reads is seen next time.
    """
    version = file_version(uri, options)
    before, _, digest = known.get(uri, "").rpartition(" ")
    if version is None or before != version:
        digest = file_digest(uri, options)
    if version is not None:
        remembered[uri] = f"{version} {digest}"
    return digest
