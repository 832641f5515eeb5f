"""Receives the form of a LoRA, or fetches the files that a JSON body refers to, into a folder of the upload's place."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Request

from serve_app.api.body import read_json
from serve_app.api.dependencies import jobs_of, loras_of, settings_of
from serve_app.api.loras.schemas import LoraForm, LoraReference
from serve_app.api.multipart import disk_errors, read_multipart
from serve_app.api.routing import validate
from serve_app.domain.errors import InvalidParameter
from serve_app.loras.account_loras import AccountActor
from serve_app.loras.registration import Registered
from serve_app.loras.sources import MAX_CONFIG_BYTES, PEFT_FILES, LoraSources

_FILE, _CONFIG = "file", "adapter_config"


class Upload(NamedTuple):
    """An upload: its fields, and its file or PEFT folder."""

    form: LoraForm
    path: Path
    extra: Mapping[str, str]


async def read_upload(request: Request, place: AsyncExitStack, *, extra: Sequence[str] = ()) -> Upload:
    """Receive the form, and the `extra` text fields of a page's form.

    Its files are there until `place` ends. Raises `PayloadTooLarge`, `UnsupportedMediaType`, `InvalidParameter`,
    `StoreUnavailable`.
    """
    most = {_FILE: int(settings_of(request).max_lora_size), _CONFIG: MAX_CONFIG_BYTES}
    texts, files = await read_multipart(request, place, texts=[*LoraForm.model_fields, *extra], files=most)
    others = {name: texts.pop(name, "") for name in extra}
    form = validate(LoraForm, texts)
    if _FILE not in files:
        raise InvalidParameter(f"{_FILE}: is required and must be a safetensors file")
    with disk_errors():
        return Upload(form, await asyncio.to_thread(_arrange, files), others)


async def fetch_source(request: Request, source: str, place: AsyncExitStack) -> Path:
    """Fetch the file or folder at an address that the operator allows; it is there until `place` ends.

    Raises `InvalidParameter`, `PayloadTooLarge`, `StoreUnavailable`.
    """
    space, sources = jobs_of(request).space, LoraSources(settings_of(request))
    sources.check(source)
    await space.check()
    with disk_errors():
        folder = await place.enter_async_context(loras_of(request).uploads.folder())
        return await sources.fetch(source, folder, before_block=space.disk.check)


def form_schema() -> dict[str, Any]:
    """Return the form's schema for the document: its text fields and its files."""
    schema = LoraForm.model_json_schema()
    for name, text in (
        (_FILE, "A safetensors file."),
        (_CONFIG, "PEFT's `adapter_config.json`, beside its `adapter_model.safetensors` as `file`."),
    ):
        schema["properties"][name] = {"type": "string", "format": "binary", "description": text}
    schema["required"] = [*schema["required"], _FILE]
    return schema


def _arrange(files: Mapping[str, Path]) -> Path:
    """Return the file, or the folder with the two files under PEFT's names."""
    if _CONFIG not in files:
        return files[_FILE].rename(files[_FILE].with_name("upload.safetensors"))
    for field, name in zip((_CONFIG, _FILE), PEFT_FILES, strict=True):
        files[field].rename(files[field].with_name(name))
    return files[_FILE].parent


async def add_reference(
    request: Request, by: AccountActor, *, place: AsyncExitStack, idempotency_key: str | None
) -> Registered:
    """Register weights that the account has sent before, or at an address that the operator allows.

    Raises `PayloadTooLarge`, `UnsupportedMediaType`, `InvalidJson`, `InvalidParameter`.
    """
    reference = validate(LoraReference, await (await read_json(request)).json())
    if (reference.sha256 is None) == (reference.source is None):
        raise InvalidParameter("body: send either sha256 or source, or the file as a multipart form")
    owned, offer = loras_of(request).owned, reference.to_offer()
    if reference.sha256 is not None:
        return await owned.add_known(by, reference.sha256, offer, place=place, idempotency_key=idempotency_key)
    path = await fetch_source(request, reference.source or "", place)
    return await owned.add(by, path, offer, place=place, idempotency_key=idempotency_key)
