"""What an adapter is made of on disk: a safetensors file, or a folder as PEFT and diffusers save one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.engine.adapters.layer_table import UnusableAdapter
from serve_app.safetensors_file import Header, UnusableFile, read_header

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
PEFT_BASE = "base_model_name_or_path"
"""The field of `adapter_config.json` that names the base model."""
MAX_CONFIG_BYTES = 1 << 20

_FOLDERS: Sequence[tuple[str, str]] = (
    (r"model_index\.json", "is of a whole model: an operator may add it as a base model"),
    (r"[^/]+-\d+-of-\d+\.safetensors|.*\.index\.json", "is of several shards: save the adapter as one file"),
    (r"[^/]+\.(bin|pt|pth|ckpt)", "is a pickle, which may hold code: save it as safetensors"),
    (r"[^/]+\.safetensors", "is a file by itself: send it without the folder"),
    (
        rf"[^/]+/({re.escape(PEFT_WEIGHTS)}|{re.escape(DIFFUSERS_WEIGHTS)})",
        "is in a subfolder: send each one by itself",
    ),
)
"""Folders of other kinds by a name in them."""


class Source(NamedTuple):
    """An adapter's file, whose header was read, and PEFT's configuration where it has one."""

    file: Path
    header: Header
    peft_config: dict[str, Any] | None
    is_folder: bool

    @property
    def metadata(self) -> dict[str, str]:
        return self.header.metadata

    @property
    def declared(self) -> dict[str, str]:
        """Return the metadata, and the base model by PEFT's configuration."""
        base = (self.peft_config or {}).get(PEFT_BASE)
        return self.metadata | ({PEFT_BASE: base} if isinstance(base, str) else {})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor["shape"]) for name, tensor in self.header.tensors.items()}


def open_source(path: Path) -> Source:
    """Return the adapter at `path`, by its header.

    Raises UnusableAdapter with the reason, OSError when it cannot be read.
    """
    file, config = _parts(path)
    try:
        header = read_header(file)
    except UnusableFile as error:
        raise UnusableAdapter(str(error)) from error
    named = {name.replace("$$", "."): tensor for name, tensor in header.tensors.items()}  # ai-toolkit's own names
    if len(named) < len(header.tensors):
        raise UnusableAdapter("the file names a tensor twice, with dots and with $$ in their place")
    header = header._replace(tensors=named)
    return Source(file, header, None if config is None else _read_config(config), path.is_dir())


def _parts(path: Path) -> tuple[Path, Path | None]:
    """Return the weights' file and PEFT's configuration."""
    if not path.is_dir():
        config = path.with_name(PEFT_CONFIG)
        return path, config if path.name == PEFT_WEIGHTS and config.is_file() else None
    if (path / PEFT_WEIGHTS).is_file() and (path / DIFFUSERS_WEIGHTS).is_file():
        raise UnusableAdapter(f"the folder holds two adapters, {PEFT_WEIGHTS} and {DIFFUSERS_WEIGHTS}: remove one")
    if (path / PEFT_WEIGHTS).is_file():
        config = path / PEFT_CONFIG
        if not config.is_file():
            raise UnusableAdapter(
                f"the folder has {PEFT_WEIGHTS} without {PEFT_CONFIG}, which says how strongly it acts"
            )
        return path / PEFT_WEIGHTS, config
    if (path / DIFFUSERS_WEIGHTS).is_file():
        return path / DIFFUSERS_WEIGHTS, None
    held = {str(each.relative_to(path)) for depth in ("*", "*/*") for each in path.glob(depth)}
    for pattern, complaint in _FOLDERS:
        if found := sorted(name for name in held if re.fullmatch(pattern, name)):
            raise UnusableAdapter(f"the folder's {found[0]} {complaint}")
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
