"""Receives the form of a LoRA, writing its files to a new folder under the data directory."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import Request

from serve_app.api.dependencies import resources_of
from serve_app.api.lora_form import LoraForm
from serve_app.api.multipart import read_multipart
from serve_app.api.routing import validate
from serve_app.atomic_files import make_folder
from serve_app.domain.errors import InvalidParameter, StoreUnavailable
from serve_app.settings import Settings
from serve_app.stores.lora_sources import LoraSources
from serve_app.stores.weight_files import MAX_CONFIG_BYTES, PEFT_FILES

UPLOADS = "uploads"
FORGOTTEN_AFTER_S = 86_400.0
"""What a process left behind when it was killed."""
_FILE, _CONFIG = "file", "adapter_config"


class Upload(NamedTuple):
    """An upload: its fields, and its file or PEFT folder in `folder`, which the holder removes."""

    form: LoraForm
    path: Path
    folder: Path
    extra: Mapping[str, str]


async def read_upload(request: Request, *, extra: Sequence[str] = ()) -> Upload:
    """Receive the form, and the `extra` text fields of a page's form.

    Raises `PayloadTooLarge`, `UnsupportedMediaType`, `InvalidParameter`, `StoreUnavailable`.
    """
    await resources_of(request).disk.check()
    try:
        return await _receive(request, extra)
    except OSError as error:  # such as a full disk: nothing was accepted
        raise StoreUnavailable(f"an upload cannot be kept ({type(error).__name__})") from error


async def fetch_source(request: Request, source: str) -> tuple[Path, Path]:
    """Fetch the file or folder at an address that the operator allows; return it and the folder to remove.

    Raises `InvalidParameter`, `PayloadTooLarge`, `StoreUnavailable`.
    """
    resources = resources_of(request)
    sources = LoraSources(resources.settings)
    sources.check(source)
    await resources.disk.check()
    folder = await asyncio.to_thread(new_upload_folder, resources.settings)
    try:
        return await sources.fetch(source, folder, before_block=resources.disk.check), folder
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


async def _receive(request: Request, extra: Sequence[str]) -> Upload:
    resources = resources_of(request)
    folder = await asyncio.to_thread(new_upload_folder, resources.settings)
    try:
        files = {_FILE: int(resources.settings.max_lora_size), _CONFIG: MAX_CONFIG_BYTES}
        names = [*LoraForm.model_fields, *extra]
        texts = await read_multipart(request, folder, texts=names, files=files, before_block=resources.disk.check)
        others = {name: texts.pop(name, "") for name in extra}
        return Upload(validate(LoraForm, texts), await asyncio.to_thread(_arrange, folder), folder, others)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        raise


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


def new_upload_folder(settings: Settings) -> Path:
    uploads = settings.data_dir.resolve() / UPLOADS
    make_folder(uploads)
    for left in uploads.iterdir():
        try:
            if time.time() - left.stat().st_mtime > FORGOTTEN_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # another process was first
            continue
    return Path(tempfile.mkdtemp(dir=uploads))


def _arrange(folder: Path) -> Path:
    """Return the file, or the folder with the two files under PEFT's names."""
    file, config = folder / _FILE, folder / _CONFIG
    for each in (file, config):
        if each.exists() and not each.stat().st_size:  # a browser sends an empty file where none was chosen
            each.unlink()
    if not file.exists():
        raise InvalidParameter("file: is required and must be a safetensors file")
    if not config.exists():
        return file.rename(folder / "upload.safetensors")
    peft_config, peft_weights = PEFT_FILES
    config.rename(folder / peft_config)
    file.rename(folder / peft_weights)
    return folder
