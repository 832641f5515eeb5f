"""What an adapter is made of on disk: a safetensors file, or a folder as PEFT and diffusers save one."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from serve_app.engine.adapters.errors import UnusableAdapter
from serve_app.safetensors_file import UnusableFile, check_safetensors

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_BASE = "base_model_name_or_path"
"""A field of `adapter_config.json`."""
MAX_CONFIG_BYTES = 1 << 20


class Source(NamedTuple):
    """An adapter's tensors by key, the metadata of its file, and PEFT's configuration where a folder has one."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    peft_config: dict[str, Any] | None
    is_folder: bool = False


def open_source(path: Path) -> Source:
    """The adapter at `path`. Raises UnusableAdapter with the reason, OSError when it cannot be read."""
    file, config = _parts(path)
    try:
        header = check_safetensors(file)
        # read whole by Python, which lets other threads run meanwhile; `safe_open` would hold them all up on a slow disk
        tensors = load(file.read_bytes())
    except (UnusableFile, SafetensorError) as error:
        raise UnusableAdapter(str(error)) from error
    return Source(tensors, header.metadata, None if config is None else _read_config(config), path.is_dir())


def _parts(path: Path) -> tuple[Path, Path | None]:
    """The weights' file and PEFT's configuration."""
    if not path.is_dir():
        config = path.with_name(PEFT_CONFIG)
        return path, config if path.name == PEFT_WEIGHTS and config.is_file() else None
    if (path / PEFT_WEIGHTS).is_file():
        config = path / PEFT_CONFIG
        if not config.is_file():
            raise UnusableAdapter(
                f"the folder has {PEFT_WEIGHTS} without {PEFT_CONFIG}, which says how strongly it acts"
            )
        return path / PEFT_WEIGHTS, config
    if (path / DIFFUSERS_WEIGHTS).is_file():
        return path / DIFFUSERS_WEIGHTS, None
    if (path / "adapter_model.bin").is_file():
        raise UnusableAdapter("the folder's adapter_model.bin is a pickle, which may hold code: save it as safetensors")
    raise UnusableAdapter(f"the folder holds neither {PEFT_WEIGHTS} nor {DIFFUSERS_WEIGHTS}")


def _read_config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise UnusableAdapter(f"{PEFT_CONFIG} is over 1 MiB")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnusableAdapter(f"{PEFT_CONFIG} is not JSON") from error
    if not isinstance(config, dict):
        raise UnusableAdapter(f"{PEFT_CONFIG} is no object")
    return config  # pyright: ignore[reportUnknownVariableType]
