"""Our own reading of a safetensors file, before any library sees it.

safetensors 0.8 itself accepts 58 MB of metadata (12 s, 1.3 GB of memory), NaN weights, duplicate and path-like names;
see "LoRA files" in the reliability notes. What passes here is small in header, complete, in bounds and finite.
"""

import json
import re
from pathlib import Path
from typing import Any, cast

import numpy as np

from serve_app.domain.errors import AdapterUnavailable

MAX_FILE_BYTES = 2 << 30
MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 20_000
MAX_DIMENSION = 1 << 18
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,256}")
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_EXPONENT: dict[str, tuple[str, int]] = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""An element whose exponent bits are all ones is infinite or not a number."""
_BLOCK = 1 << 20


def check_safetensors(path: Path) -> None:
    """Raises `AdapterUnavailable` with the reason when the file is not one we load."""
    size = path.stat().st_size
    _must(size <= MAX_FILE_BYTES, "is larger than 2 GiB")
    with path.open("rb") as file:
        prefix = file.read(8)
        _must(len(prefix) == 8, "is too short")
        length = int.from_bytes(prefix, "little")
        _must(2 <= length <= MAX_HEADER_BYTES, "has a header over 1 MiB")
        _must(8 + length <= size, "ends inside its header")
        tensors = _header(file.read(length))
    _check_layout(tensors, size - 8 - length)
    for name, tensor in tensors.items():
        _check_finite(path, name, tensor, start=8 + length)


def _header(text: bytes) -> dict[str, dict[str, Any]]:
    try:
        parsed = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise AdapterUnavailable("the adapter file's header is not JSON") from error
    _must(isinstance(parsed, dict), "has a header that is no object")
    header = cast(dict[str, Any], parsed)
    metadata = header.pop("__metadata__", {})
    _must(isinstance(metadata, dict) and _is_text_map(cast(dict[str, Any], metadata)), "has metadata that is not text")
    _must(1 <= len(header) <= MAX_TENSORS, f"must hold 1 to {MAX_TENSORS} tensors")
    _must(all(isinstance(tensor, dict) for tensor in header.values()), "has a malformed tensor entry")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _must(len(found) == len(pairs), "names a tensor twice")
    return found


def _is_text_map(metadata: dict[str, Any]) -> bool:
    return all(isinstance(value, str) for value in metadata.values())


def _check_layout(tensors: dict[str, dict[str, Any]], data_bytes: int) -> None:
    """Names, types, shapes; and offsets that follow each other without hole or overlap to the file's end."""
    spans: list[tuple[int, int]] = []
    for name, tensor in tensors.items():
        _must(_NAME.fullmatch(name), "has a tensor with a forbidden name")
        _must(tensor.keys() == {"dtype", "shape", "data_offsets"}, f"has a malformed entry for {name}")
        _must(
            isinstance(tensor["dtype"], str) and tensor["dtype"] in _BYTES,
            f"has {name} in a type other than F32, F16, BF16",
        )
        shape, offsets = tensor["shape"], tensor["data_offsets"]
        _must(_are_integers(shape) and len(shape) <= 5, f"has a malformed shape for {name}")
        _must(all(1 <= side <= MAX_DIMENSION for side in shape), f"has a side out of bounds in {name}")
        _must(_are_integers(offsets) and len(offsets) == 2, f"has malformed offsets for {name}")
        elements = 1
        for side in shape:
            elements *= side
        _must(offsets[1] - offsets[0] == elements * _BYTES[tensor["dtype"]], f"has offsets that do not fit {name}")
        spans.append((offsets[0], offsets[1]))
    end = 0
    for start, stop in sorted(spans):
        _must(start == end, "has a hole or an overlap in its data")
        end = stop
    _must(end == data_bytes, "has data that no tensor names, or ends early")


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in cast(list[object], value))


def _check_finite(path: Path, name: str, tensor: dict[str, Any], *, start: int) -> None:
    dtype, exponent = _EXPONENT[tensor["dtype"]]
    begin, stop = tensor["data_offsets"]
    with path.open("rb") as file:
        file.seek(start + begin)
        left = stop - begin
        while left:
            block = file.read(min(_BLOCK, left))
            _must(block, "ends early")
            left -= len(block)
            bits = np.frombuffer(block, dtype)
            _must(not bool(np.any((bits & exponent) == exponent)), f"holds a value that is not finite in {name}")


def _must(holds: object, complaint: str) -> None:
    if not holds:
        raise AdapterUnavailable(f"the adapter file {complaint}")
