"""Keeps what was measured about a base model's arithmetic: the next process, on any machine, need not measure it.

It holds only while nothing changes that bits may depend on: the processor, or the card and its driver, the libraries,
this engine's code, the model's structure and the options. These together name a folder, which has a file for each
finding: processes that write at once cannot undo each other's.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from serve_app.atomic_files import write_atomically
from serve_app.engine.kernels import kernel_outcomes
from serve_app.engine_options import EngineOptions

PROCESSOR_LINES = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags", "Features")
"""Libraries choose their kernels by what these lines of `/proc/cpuinfo` say."""
LIBRARY_SETTINGS = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "CUBLAS_", "NVIDIA_", "TORCH_")
"""Environment variables that begin with these may choose other kernels."""

_Kind = TypeVar("_Kind", int, bool)
log = logging.getLogger(__name__)


class Shelf(Protocol):
    """Keeps small files for every process that may want them. Its calls raise OSError where it cannot."""

    def read(self, folder: str) -> Mapping[str, bytes]:
        """Return the files of a folder by their names; none where there is no such folder."""
        ...

    def write(self, folder: str, name: str, content: bytes) -> None:
        """Write a whole file, now or soon. It is called between steps, so it may not wait for a network."""
        ...


class Folder:
    """A shelf on this machine's disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, folder: str) -> Mapping[str, bytes]:
        return {file.name: file.read_bytes() for file in (self._path / folder).glob("*.json")}

    def write(self, folder: str, name: str, content: bytes) -> None:
        write_atomically(self._path / folder / name, content)


def shelf_of(place: Shelf | Path | None) -> Shelf | None:
    return Folder(place) if isinstance(place, Path) else place


class Findings:
    """Findings by name: in memory alone, or on a shelf too, which is read once."""

    def __init__(self, shelf: Shelf | Path | None, circumstances: Mapping[str, object]) -> None:
        self._circumstances = dict(circumstances)
        self._shelf = shelf_of(shelf)
        self._folder = _digest(json.dumps(self._circumstances, sort_keys=True))[:32]
        self._found = {} if self._shelf is None else self._read(self._shelf)

    def found(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """Return what was kept under a name; None where nothing was, or nothing of this kind."""
        value = self._found.get(name)
        return value if type(value) is kind else None

    def keep(self, name: str, value: int | bool) -> None:
        """Keep a finding. Where the shelf cannot be written the next process measures again."""
        self._found[name] = value
        if self._shelf is None:
            return
        content = json.dumps({"circumstances": self._circumstances, "name": name, "value": value}, indent=1)
        try:
            self._shelf.write(self._folder, f"{_digest(name)[:32]}.json", content.encode())
        except OSError as error:
            log.warning("what was measured about exactness could not be kept: %s", error)

    def _read(self, shelf: Shelf) -> dict[str, Any]:
        """Return the findings of the folder, but for files that are damaged or of other circumstances."""
        found: dict[str, Any] = {}
        try:
            files = shelf.read(self._folder)
        except OSError as error:
            log.warning("what was measured about exactness cannot be read, so it is measured again: %s", error)
            return found
        for content in files.values():
            with suppress(ValueError, TypeError, KeyError):
                finding = json.loads(content)
                if finding["circumstances"] == self._circumstances:
                    found[finding["name"]] = finding["value"]
        return found


def circumstances(
    denoiser: nn.Module, device: torch.device, options: EngineOptions, *, lanes: int, by_kernel: bool, attention: str
) -> dict[str, object]:
    """Return, as JSON has it, all that the bits of a forward pass may depend on besides its numbers.

    `by_kernel` tells whether a kernel of the engine's own adds the adapters, `attention` by which operator it attends.
    """
    weights = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in denoiser.state_dict().items()]
    return {
        "hardware": _card(device) if device.type == "cuda" else _digest(_processor()),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(LIBRARY_SETTINGS)},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        "attention": attention,
        "kernels": sorted(name for name, why in kernel_outcomes().items() if not why),
        "build": _digest(torch.__config__.show()),
        "engine": _digest(*(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))),
        "model": _digest(repr(denoiser), str(getattr(denoiser, "config", "")), repr(weights)),
        "options": [str(device), options.dtype, options.max_rows, torch.get_num_threads(), lanes, by_kernel],
    }


DRIVER = Path("/proc/driver/nvidia/version")
"""The first line of this file names the version of the card's driver, also in a container."""


def _card(device: torch.device) -> list[str]:
    card = torch.cuda.get_device_properties(device)
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else ""
    sizes = f"{card.major}.{card.minor}, {card.multi_processor_count} multiprocessors"
    return [card.name, sizes, driver, f"cuDNN {torch.backends.cudnn.version()}"]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].rstrip() in PROCESSOR_LINES}))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
