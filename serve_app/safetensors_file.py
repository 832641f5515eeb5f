"""Checks customers' safetensors files: a small header, complete data, sides in bounds, finite numbers.

The engine and the weight store both ask it, so that what one takes the other takes. safetensors 0.8 itself accepts 58
MB of metadata (12 s, 1.3 GB of memory), NaN weights, duplicate and path-like names.

`python -m serve_app.safetensors_file PATH` prints the reason why the file is not one that this service loads, or
nothing.
"""

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

MAX_FILE_BYTES = 2 << 30
MAX_HEADER_BYTES = 8 << 20
"""Training metadata of 20,000 tags takes 1 MiB (measured); sd-scripts writes every tag of the data set."""
MAX_TENSORS = 20_000
MAX_METADATA_ENTRIES = 1_000
"""A file's metadata have at most this many entries; sd-scripts writes about 100, its tag frequencies as one text."""
MAX_DIMENSION = 1 << 18
_NAME = re.compile(r"[A-Za-z0-9_.$\-]{1,256}")
_FOREIGN: tuple[tuple[str, str], ...] = (
    (r"bundle_emb\.", "bundles an embedding (bundle_emb, of OneTrainer), which this service does not load: "
     "save the LoRA without it"),
    (r"(unet|text_encoder):\d+:", "is a LoRA of cloneofsimo's lora for SD 1 or SD 2, whose names tell no layer: "
     "convert it to the names of kohya or diffusers"),
    (r"<[^>]+>$|string_to_param\b", "is a textual inversion or holds one, which this service does not load: "
     "save the LoRA without it"),
    (r"scaled_fp8$", "is quantized to float8 with scales beside the weights (scaled_fp8), which is not read as a LoRA: "
     "save it as float16 or bfloat16"),
)  # fmt: skip
"""Files of other kinds by how a tensor's name begins; their names would be forbidden, or their tensors empty."""
_FLOATS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""Element and mask: an element whose masked bits are all ones is infinite or not a number (E4M3 has no infinity)."""
_INTEGERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""sd-scripts writes an integer alpha as I64; LyCORIS writes flags."""
_BYTES = {dtype: int(element[-1]) for dtype, (element, _) in _FLOATS.items()} | _INTEGERS
_BLOCK = 1 << 20
_HEAD = 512
_UNPACK = "unpack it, and send the safetensors file in it"
_TEXT = rb"[^\x00-\x08\x0e-\x1a\x1c-\x1f]"
_NO_WEIGHTS = "not weights: check the download address, and whether it asks you to sign in"
_MARKS: Sequence[tuple[bytes, str]] = (
    (rb"PK\x03\x04.*/data\.pkl|\x80[\x02-\x05]|\([dl]p|[}\]]q\x00",
     "is a pickle (.bin, .pt, .ckpt), which may hold code: convert it to safetensors"),
    (rb"PK[\x03\x05\x07]", f"is a zip archive: {_UNPACK}"),
    (rb"Rar!", f"is a RAR archive: {_UNPACK}"),
    (rb"7z\xbc\xaf", f"is a 7z archive: {_UNPACK}"),
    (rb".{257}ustar", f"is a tar archive: {_UNPACK}"),
    (rb"\x1f\x8b", f"is compressed with gzip: {_UNPACK}"),
    (rb"BZh[1-9]|\xfd7zXZ|\x28\xb5\x2f\xfd", f"is compressed with bzip2, xz or zstd: {_UNPACK}"),
    (rb"GGUF|(lm|tj|al)gg", "is GGUF, quantized weights of llama.cpp and ComfyUI, which this service does not load: "
     "send the LoRA as safetensors"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|.{4}ftyp", "is a picture, a sound or a video, not weights: "
     "choose the safetensors file"),
    (rb"\x89HDF|\x93NUMPY|%PDF", "is of another format (HDF5, NumPy or PDF): choose the safetensors file"),
    (rb"\x00+\Z", "begins with zeros alone, as an unfinished download does: fetch it again"),
    (rb"version https?://|# xet |/annex/objects/", "is a Git LFS pointer, not weights: fetch the file itself"),
    (rb'\s*{.*"(alpha_pattern|base_model_name_or_path|peft_type)"', "is PEFT's adapter_config.json, not weights: "
     "choose the adapter_model.safetensors next to it"),
    (rb"[\xef\xbb\xbf\s]*<(?=%b*\Z)" % _TEXT, f"is a web page, {_NO_WEIGHTS}"),
    (rb"[\xef\xbb\xbf\s]*[{[](?=%b*\Z)" % _TEXT, f"is JSON, such as a server's error message, {_NO_WEIGHTS}"),
    (rb"%b+\Z" % _TEXT, f"is text, such as a server's error message, {_NO_WEIGHTS}"),
)  # fmt: skip
"""Files of other kinds by their first bytes. They are compared only where these are not a safetensors file's, whose
first eight are the length of its header and may be any of these."""


class UnusableFile(ValueError):
    """The file is not a safetensors file that this service loads; the message says why."""


class Header(NamedTuple):
    tensors: dict[str, dict[str, Any]]
    """name → `dtype`, `shape`, `data_offsets`."""
    metadata: dict[str, str]
    start: int = 0
    """The byte of the file where the data begin, from which offsets count."""


def check_safetensors(path: Path) -> Header:
    """Return the header of a file that passes every check.

    Raises UnusableFile with the reason, OSError when unreadable.
    """
    header = read_header(path)
    with path.open("rb") as file:
        for name, tensor in header.tensors.items():
            if tensor["dtype"] in _FLOATS and not is_unused(name, header.tensors):
                _check_finite(file, name, tensor, start=header.start)
    return header


def is_unused(name: str, tensors: Collection[str]) -> bool:
    """Return whether it is the alpha of a LoKr whose factors are both whole.

    LyCORIS scales it by one, and writes an alpha of 9999999999, which is infinite in F16.
    """
    stem = name.removesuffix(".alpha")
    return stem != name and f"{stem}.lokr_w1" in tensors and f"{stem}.lokr_w2" in tensors


def read_header(path: Path) -> Header:
    """Return a header that fits its file, whose numbers are not read yet. Raises like `check_safetensors`."""
    size = path.stat().st_size
    _must(size <= MAX_FILE_BYTES, "is larger than 2 GiB, as whole models are: choose the LoRA's own file")
    with path.open("rb") as file:
        head = file.read(_HEAD)
        _must_be_safetensors(head)
        length = int.from_bytes(head[:8], "little")
        _must(length <= MAX_HEADER_BYTES, f"has a header over {MAX_HEADER_BYTES >> 20} MiB, or is no safetensors file")
        _must(8 + length <= size, "ends inside its header: it was not copied whole")
        file.seek(8)
        header = _parse(file.read(length))._replace(start=8 + length)
    _check_layout(header.tensors, size - header.start)
    return header


def read_numbers(file: BufferedReader, header: Header, name: str) -> bytearray:
    """Read the bytes of one tensor of the open `file`. Raises UnusableFile when they are cut short or not finite."""
    tensor = header.tensors[name]
    begin, stop = tensor["data_offsets"]
    file.seek(header.start + begin)
    numbers = bytearray(stop - begin)
    _must(file.readinto(numbers) == len(numbers), "ends early")
    if tensor["dtype"] in _FLOATS:
        _require_finite(name, tensor["dtype"], numbers)
    return numbers


def _must_be_safetensors(head: bytes) -> None:
    _must(head, "is empty")
    if head[4:9] not in (bytes(4), bytes(4) + b"{"):  # a length below 4 GiB, then the header's first letter
        for mark, complaint in _MARKS:
            _must(not re.match(mark, head, re.DOTALL), complaint)
    _must(len(head) >= 8 and int.from_bytes(head[:8], "little") >= 2, "is too short for a safetensors file")


def _parse(text: bytes) -> Header:
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except UnusableFile:
        raise
    except (ValueError, RecursionError) as error:
        raise UnusableFile("the file's header is not JSON in UTF-8: it is no safetensors file, or damaged") from error
    _must(isinstance(parsed, dict), "has a header that is no object")
    tensors = cast(dict[str, Any], parsed)
    metadata: Any = tensors.pop("__metadata__", {})
    _must(isinstance(metadata, dict), "has metadata that is not text")
    _must(len(metadata) <= MAX_METADATA_ENTRIES, f"has over {MAX_METADATA_ENTRIES} metadata entries")
    _must(all(isinstance(value, str) for value in metadata.values()), "has metadata that is not text")
    _must(1 <= len(tensors) <= MAX_TENSORS, f"must hold 1 to {MAX_TENSORS} tensors")
    _must(all(isinstance(tensor, dict) for tensor in tensors.values()), "has a malformed tensor entry")
    return Header(tensors, metadata)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _must(len(found) == len(pairs), "names a tensor twice")
    return found


def _check_layout(tensors: dict[str, dict[str, Any]], data_bytes: int) -> None:
    """Check names, types and shapes, and that offsets cover the file without hole or overlap."""
    spans: list[tuple[int, int]] = []
    for pattern, complaint in _FOREIGN:
        _must(not any(re.match(pattern, name) for name in tensors), complaint)
    for name, tensor in tensors.items():
        _must(
            _NAME.fullmatch(name),
            f"has a tensor with a forbidden name, {ascii(name)[:60]}: rename it with letters, digits, _, . and -",
        )
        _must(tensor.keys() == {"dtype", "shape", "data_offsets"}, f"has a malformed entry for {name}")
        dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        _must(
            isinstance(dtype, str) and dtype in _BYTES,
            f"has {name} in a type, {ascii(dtype)[:20]}, that is not one of {', '.join(_BYTES)}: convert it",
        )
        _must(_are_integers(shape) and len(shape) <= 5, f"has a malformed shape for {name}")
        _must(
            0 not in shape,
            f"has an empty tensor, {name}, as DeepSpeed's ZeRO-3 leaves them: save it with its weights gathered",
        )
        _must(all(1 <= side <= MAX_DIMENSION for side in shape), f"has a side out of bounds in {name}")
        _must(_are_integers(offsets) and len(offsets) == 2, f"has malformed offsets for {name}")
        _must(offsets[1] - offsets[0] == math.prod(shape) * _BYTES[dtype], f"has offsets that do not fit {name}")
        spans.append((offsets[0], offsets[1]))
    end = 0
    for start, stop in sorted(spans):
        _must(start == end, "has a hole or an overlap in its data")
        end = stop
    _must(end == data_bytes, "has data that no tensor names, or ends early: it was not copied whole")


def _are_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in cast(list[object], value))


def _check_finite(file: BinaryIO, name: str, tensor: dict[str, Any], *, start: int) -> None:
    """Check a tensor in blocks, since it may be as large as the file."""
    begin, stop = tensor["data_offsets"]
    file.seek(start + begin)
    left = stop - begin
    while left:
        block = file.read(min(_BLOCK, left))
        _must(block, "ends early")
        left -= len(block)
        _require_finite(name, tensor["dtype"], block)


def _require_finite(name: str, dtype: str, numbers: bytes | bytearray) -> None:
    import numpy as np  # takes 0.1 s, for which commands that read no weights need not wait

    element, mask = _FLOATS[dtype]
    bits = np.frombuffer(numbers, element)
    _must(not bool(np.any((bits & mask) == mask)), f"holds numbers that are not finite in {name}")


def _must(holds: object, complaint: str) -> None:
    if not holds:
        raise UnusableFile(f"the file {complaint}")


def limit_memory(more: int) -> None:
    """Allow this many bytes of address space beyond what the process takes now, and no core dumps."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def limited(memory: int, seconds: float) -> Generator[None]:
    """Limit what a block takes: bytes as `limit_memory` does, and processor time, after which SIGPROF ends the process.

    Both limits end with the block, so that libraries can be loaded between two of them.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(memory)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


MEMORY = 384 << 20
"""Checking a file may take this many bytes beyond what Python and numpy take, and under 512 MB with them. The worst
header of 8 MiB takes 280 MB of it (measured)."""
PROCESSOR_LIMIT_S = 5
"""A file of 2 GiB takes up to two seconds, the worst header one."""
LIMIT_S = 120.0
_ROOT = Path(__file__).resolve().parent.parent


def check_in_subprocess(path: Path) -> None:
    """Run `check_safetensors` in another process. Raises UnusableFile with the reason, OSError when none starts."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "serve_app.safetensors_file", str(path))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UnusableFile(f"the file takes longer than {LIMIT_S:g} s to read") from None
    if done.returncode:
        raise UnusableFile(f"the file cannot be read in {MEMORY >> 20} MiB of memory and {PROCESSOR_LIMIT_S} s")
    if done.stdout:
        raise UnusableFile(done.stdout)


def main(path: str) -> None:
    with limited(MEMORY, PROCESSOR_LIMIT_S):
        try:
            check_safetensors(Path(path))
        except UnusableFile as error:
            sys.stdout.write(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
