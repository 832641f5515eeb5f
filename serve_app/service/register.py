"""Registers a LoRA: checked in a process of its own, stored by digest, then on offer everywhere at once."""

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.domain.catalog import Adapter, BaseModel
from serve_app.domain.durations import epoch_ms, from_epoch_ms
from serve_app.domain.errors import InvalidParameter
from serve_app.service.resources import Resources
from serve_app.settings import ROOT
from serve_app.stores.api_key_format import base32
from serve_app.stores.catalog_digests import add_digests
from serve_app.stores.lora_files import LoraFiles
from serve_app.stores.weight_files import weight_files

_log = logging.getLogger(__name__)

INSPECTION_LIMIT_S = 120.0
"""For one file; a base model's first takes 8 s, and several times that on a busy machine; every other 2 s."""
MAX_RANK = 128
LAYER_TABLES = "layer_tables"
"""A folder of the data directory: what adapters are checked against, made from each base model's configuration."""
_INSPECTION = "serve_app.engine.inspection"


async def register(
    resources: Resources,
    path: Path,
    *,
    name: str,
    base_model: str,
    description: str = "",
    owner: str = "",
    accounts: frozenset[str] | None = frozenset(),
    max_rank: int = MAX_RANK,
) -> Adapter:
    """Register the file, or folder of PEFT, at `path`. Raises `InvalidParameter` with the reason, `StoreUnavailable`."""
    path = await asyncio.to_thread(path.resolve)
    base = next((base for base in await resources.catalog.base_models() if base.id == base_model), None)
    if base is None:
        raise InvalidParameter(f"base_model: there is no base model {base_model!r}")
    adapter = Adapter(
        id="model_" + base32(secrets.token_bytes(16)),
        name=name,
        description=description,
        created_at=from_epoch_ms(epoch_ms(datetime.now(UTC))),  # as its record keeps it
        file=str(path),
        is_folder=await asyncio.to_thread(path.is_dir),
        sha256="",
        base_model=base.id,
        accounts=accounts,
        owner=owner,
    )
    digested = await asyncio.to_thread(add_digests, [adapter], {}, {})
    if digested.set_aside:
        raise InvalidParameter(f"file: {digested.set_aside[0].reason}")
    found = await _inspect(base, path, max_rank, resources.settings.data_dir.resolve() / LAYER_TABLES)
    (adapter,) = digested.adapters
    parts = {part: Path(uri) for part, uri in weight_files(adapter).items()}
    stored = await LoraFiles(resources.settings).put(adapter.sha256, parts)
    adapter = replace(adapter, file=stored, found=found)
    await resources.catalog.register(adapter)
    return adapter


async def remove(resources: Resources, lora_id: str) -> str:
    """Remove a registered LoRA, and its stored weights unless another has the same: `removed`, `unknown` or `file`."""
    removal = await resources.catalog.remove(lora_id)
    if removal.weights:
        await LoraFiles(resources.settings).delete(removal.weights)
    return removal.status


async def _inspect(base: BaseModel, path: Path, max_rank: int, tables: Path) -> Mapping[str, Any]:
    """What the file holds. Raises `InvalidParameter` where it does not fit the base model or breaks a limit."""
    described = (base.config or base.source, base.id)
    command = (sys.executable, "-m", _INSPECTION, *described, str(path), str(max_rank), str(tables))
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(INSPECTION_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise InvalidParameter(f"file: reading it takes longer than {INSPECTION_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        _log.warning("the inspection of a file ended with %d: %s", process.returncode, "".join(last)[:200])
        raise InvalidParameter("file: it cannot be read as a LoRA")
    answer = json.loads(out.splitlines()[-1])
    if "refused" in answer:
        raise InvalidParameter(f"file: {answer['refused']}")
    return answer["found"]
