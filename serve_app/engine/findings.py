"""Keeps on disk what was measured about a base model's arithmetic, so that the next process need not measure it.

It holds only while nothing changes that bits may depend on: the processor or card, the libraries, this engine's code,
the model's structure and the options. These together name the file.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from serve_app.atomic_files import write_atomically
from serve_app.engine_options import EngineOptions

PROCESSOR_LINES = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags", "Features")
"""Libraries choose their kernels by what these lines of `/proc/cpuinfo` say."""
LIBRARY_SETTINGS = ("MKL_", "DNNL_", "ONEDNN_", "ATEN_", "CUBLAS_", "NVIDIA_", "TORCH_")
"""Environment variables that begin with these may choose other kernels."""

_Kind = TypeVar("_Kind", int, bool)
log = logging.getLogger(__name__)


class Findings:
    """Findings by name: in memory alone, or in a folder too."""

    def __init__(self, folder: Path | None, circumstances: Mapping[str, object]) -> None:
        self._circumstances = dict(circumstances)
        digest = hashlib.sha256(json.dumps(self._circumstances, sort_keys=True).encode()).hexdigest()
        self._path = None if folder is None else folder / f"{digest[:32]}.json"
        self._found = self._read()

    def found(self, name: str, kind: type[_Kind]) -> _Kind | None:
        """Return what was kept under a name; None where nothing was, or nothing of this kind."""
        value = self._found.get(name)
        return value if type(value) is kind else None

    def keep(self, name: str, value: int | bool) -> None:
        """Keep a finding. Where the folder cannot be written the next process measures again."""
        self._found[name] = value
        if self._path is None:
            return
        self._found = self._read() | self._found  # another process may have measured other shapes meanwhile
        try:
            content = {"circumstances": self._circumstances, "found": self._found}
            write_atomically(self._path, json.dumps(content, indent=1))
        except OSError as error:
            log.warning("what was measured could not be kept in %s: %s", self._path, error)

    def _read(self) -> dict[str, Any]:
        """Return the file's findings; none where it is missing, damaged or of other circumstances."""
        try:
            content = json.loads(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        fits = isinstance(content, dict) and content.get("circumstances") == self._circumstances
        return content["found"] if fits and isinstance(content.get("found"), dict) else {}


def circumstances(
    denoiser: nn.Module, device: torch.device, options: EngineOptions, *, lanes: int, by_kernel: bool
) -> dict[str, object]:
    """Return, as JSON has it, all that the bits of a forward pass may depend on besides its numbers.

    `by_kernel` tells whether a kernel of the engine's own adds the adapters.
    """
    weights = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in denoiser.state_dict().items()]
    return {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _digest(_processor()),
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(LIBRARY_SETTINGS)},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers")},
        "build": _digest(torch.__config__.show()),
        "engine": _digest(*(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))),
        "model": _digest(repr(denoiser), str(getattr(denoiser, "config", "")), repr(weights)),
        "options": [str(device), options.dtype, options.max_rows, torch.get_num_threads(), lanes, by_kernel],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].rstrip() in PROCESSOR_LINES}))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
