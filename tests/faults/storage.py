"""An fsspec storage that fails on command: `faulty:///folder`, a folder whose `.fault` file says how."""

from pathlib import Path
from typing import Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

ERROR, FULL, SLOW, TRUNCATE, FLIP = "error", "full", "slow", "truncate", "flip"
FAULT_FILE = ".fault"


class FaultyFileSystem(LocalFileSystem):
    """Local files behind another name, so that the service treats it as object storage.

    All processes read one fault file.
    """

    protocol = "faulty"
    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        place = Path(self._strip_protocol(path))
        fault = _fault(place)
        if fault == ERROR:
            raise OSError(5, "input/output error")
        if fault == FULL:
            raise OSError(28, "no space left on device")
        if fault == TRUNCATE:
            value = value[: len(value) // 2]
        if fault == FLIP:
            value = value[:-1] + bytes([value[-1] ^ 1])
        while fault == SLOW and _fault(place) == SLOW:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(value)

    def rm_file(self, path: str) -> None:
        self._raise_error(path)
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._raise_error(path)
        super().rm(path, recursive=recursive, maxdepth=maxdepth)

    def _raise_error(self, path: str) -> None:
        if _fault(Path(str(self._strip_protocol(path)))) == ERROR:
            raise OSError(5, "input/output error")


def register_faulty() -> None:
    """Make `faulty://` known to this process."""
    fsspec.register_implementation("faulty", cast(Any, FaultyFileSystem), clobber=True)


def set_fault(root: Path, fault: str | None) -> None:
    """From now on, for every process that stores below `root`."""
    file = root / FAULT_FILE
    if fault is None:
        file.unlink(missing_ok=True)
        return
    root.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(".fault-draft")
    draft.write_text(fault)
    draft.replace(file)


def _fault(place: Path) -> str | None:
    for folder in place.parents:
        try:
            return (folder / FAULT_FILE).read_text()
        except FileNotFoundError:
            if (folder / "images").is_dir():
                return None
    return None
