"""Writes hostile LoRA files: bombs, wrong sizes, forbidden names, values that are no numbers.

`python -m tests.faults.lora_corpus FOLDER` writes them, offers each to the weight store, and prints what came of it.
"""

import asyncio
import bz2
import gzip
import hashlib
import io
import json
import lzma
import math
import pickle
import re
import resource
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_app.domain.catalog import Adapter
from serve_app.domain.errors import AdapterUnavailable
from serve_app.loras.weights import WeightStore
from serve_app.safetensors_file import MAX_FILE_BYTES
from serve_app.settings import Settings
from tests.support import POCKET

GOOD = POCKET / "loras" / "outline.safetensors"
PAIR = {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}
BODY = b"\0" * 128
LAYER, WIDTH, RANK = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_k", 96, 8
Write = Callable[[Path], None]


def _file(header: Any, body: bytes = BODY, *, length: int | None = None, padding: int = 0) -> Write:
    def write(path: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        text += b" " * padding
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)

    return write


def _raw(content: bytes) -> Write:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def _tensor(**changes: Any) -> dict[str, Any]:
    return {"unet.x.lora_A.weight": {**PAIR, **changes}}


def _named(name: str) -> Write:
    return _file({name: PAIR})


def _floats(kind: str, bits: int) -> Write:
    """A well-formed LoRA of one layer of the pocket model, of zeros but for one number."""
    size = {"F32": 4, "F16": 2, "BF16": 2}[kind]
    end = size * RANK * WIDTH
    header = {
        f"{LAYER}.lora_A.weight": {"dtype": kind, "shape": [RANK, WIDTH], "data_offsets": [0, end]},
        f"{LAYER}.lora_B.weight": {"dtype": kind, "shape": [WIDTH, RANK], "data_offsets": [end, 2 * end]},
    }
    return _file(header, b"\0" * (end - size) + bits.to_bytes(size, "little") + b"\0" * end)


def _infinite_alpha(path: Path) -> None:
    """A LoKr of one layer with an infinite alpha, which counts where one of its factors is not whole."""
    parts = {"lokr_w1": ([4, 4], 0), "lokr_w2_a": ([24, 1], 64), "lokr_w2_b": ([1, 24], 160)}
    header: dict[str, Any] = {
        f"{LAYER}.{name}": {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * shape[0] * shape[1]]}
        for name, (shape, at) in parts.items()
    }
    header[f"{LAYER}.alpha"] = {"dtype": "F16", "shape": [], "data_offsets": [256, 258]}
    _file(header, BODY * 2 + b"\0\x7c")(path)


def _deep(open_: bytes, close: bytes, depth: int) -> bytes:
    return b'{"a":' + open_ * depth + close * depth + b"}"


def _large(header: Callable[[], Any], body: bytes = BODY) -> Write:
    """A file whose header is made when it is written: every worker of pytest imports this module."""
    return lambda path: _file(header(), body)(path)


def _bomb(unit: bytes, last: bytes = b"{}") -> Write:
    """A header as large as one may be, of values that take many times their bytes of memory."""
    return _large(lambda: b'{"a":[' + unit * (((8 << 20) - 64) // len(unit)) + last + b"]}")


def _sparse(path: Path) -> None:
    """Three gigabytes by name, nothing on disk."""
    _file(_tensor())(path)
    with path.open("r+b") as file:
        file.truncate(3 << 30)


def _large_and_not_finite(path: Path) -> None:
    """128 MB to look through, the last value of which is NaN."""
    count = 32 << 20
    text = json.dumps(_tensor(shape=[256, count // 256], data_offsets=[0, 4 * count])).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * count)
        file.seek(-4, 2)
        file.write(struct.pack("<f", float("nan")))


def _zipped(name: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr(name, BODY)
    return content.getvalue()


def _tarred() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        file.addfile(tarfile.TarInfo("ink.safetensors"))
    return content.getvalue()


TWICE = json.dumps(_tensor()).encode()[:-1] + b"," + json.dumps(_tensor()).encode()[1:]


def _small_tensors(count: int, prefix: str) -> dict[str, Any]:
    return {f"{prefix}{n}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]} for n in range(count)}


CORPUS: dict[str, Write] = {
    "empty": _raw(b""),
    "seven bytes": _raw(b"\1\0\0\0\0\0\0"),
    "only a length": _raw(struct.pack("<Q", 100)),
    "length zero": _file(b"", length=0),
    "length of everything": _file({}, length=2**64 - 1),
    "length past the end": _file(_tensor(), length=1 << 19),
    "length over the limit": _file(_tensor(), length=(8 << 20) + 1, padding=8 << 20),
    "header that is not UTF-8": _file(b'{"\xff\xfe":1}'),
    "header that is not JSON": _file(b"{'a': 1}"),
    "header in UTF-16": _file(json.dumps(_tensor()).encode("utf-16"), b"\0" * 128),
    "header in UTF-32 without a mark": _file(json.dumps(_tensor()).encode("utf-32-be"), b"\0" * 128),
    "header that is a list": _file([1, 2]),
    "header that is a number": _file(b"17"),
    "header cut short": _file(b'{"a":{"dtype":"F32"'),
    "header with NaN": _file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,128]}}'),
    "header nested in lists": _file(_deep(b"[", b"]", 100_000)),
    "header nested in objects": _file(_deep(b'{"a":', b"}", 20_000)),
    "8 MiB of empty objects": _bomb(b"{},"),
    "8 MiB of objects": _bomb(b'{"a":1},'),
    "8 MiB of lists": _bomb(b"[],"),
    "8 MiB of numbers": _bomb(b"0.5,"),
    "8 MiB of names": _large(lambda: b"{" + b",".join(b'"%d":{}' % n for n in range(700_000)) + b"}"),
    "header with a vast number": _file(b'{"a":{"dtype":"F32","shape":[' + b"9" * 900_000 + b'],"data_offsets":[0,4]}}'),
    "no tensors": _file({}),
    "only metadata": _file({"__metadata__": {"a": "b"}}),
    "metadata that is a list": _file({"__metadata__": ["x"], **_tensor()}),
    "metadata with numbers": _file({"__metadata__": {"a": 1}, **_tensor()}),
    "metadata bomb": _large(lambda: {"__metadata__": {"a": "b" * (58 << 20)}, **_tensor()}),
    "metadata of many keys": _large(lambda: {"__metadata__": {str(n): "" for n in range(100_000)}, **_tensor()}),
    "too many tensors": _large(lambda: _small_tensors(25_000, "t"), b"\0" * 100_000),
    "too many long names": _large(lambda: _small_tensors(30_000, "x" * 250), b"\0" * 120_000),
    "a name twice": _file(TWICE),
    "a name that is a path": _named("../../../etc/passwd"),
    "a name with a NUL": _named("a\0b"),
    "a name with a newline": _named("a\nb"),
    "an empty name": _named(""),
    "a name of another script": _named("аdapter"),
    "a name of 10,000 letters": _named("a" * 10_000),
    "an entry that is a number": _file({"a": 1}),
    "an entry without a shape": _file({"a": {"dtype": "F32", "data_offsets": [0, 128]}}),
    "an entry with one word more": _file(_tensor(code="import os")),
    "an unknown dtype": _file(_tensor(dtype="C64")),
    "a dtype that is a list": _file(_tensor(dtype=["F32"])),
    "a dtype that is an object": _file(_tensor(dtype={})),
    "a shape that is text": _file(_tensor(shape="4x8")),
    "a shape with a negative side": _file(_tensor(shape=[-4, -8])),
    "a shape with a zero": _file(_tensor(shape=[0, 8], data_offsets=[0, 0])),
    "a shape with true": _file(_tensor(shape=[True, 32])),
    "a shape with a fraction": _file(_tensor(shape=[4.0, 8.0])),
    "a shape of many sides": _file(_tensor(shape=[1] * 64 + [32])),
    "a shape that overflows": _file(_tensor(shape=[2**32, 2**32])),
    "a side out of bounds": _file(_tensor(shape=[1 << 19, 1], data_offsets=[0, 4 << 19]), b"\0" * (4 << 19)),
    "offsets the wrong way round": _file(_tensor(data_offsets=[128, 0])),
    "offsets below zero": _file(_tensor(data_offsets=[-128, 0])),
    "offsets past the end": _file(_tensor(data_offsets=[1 << 40, (1 << 40) + 128])),
    "offsets that are text": _file(_tensor(data_offsets=["0", "128"])),
    "three offsets": _file(_tensor(data_offsets=[0, 128, 256])),
    "tensors that overlap": _file({"a": PAIR, "b": PAIR}),
    "a hole in the data": _file({"a": PAIR, "b": {**PAIR, "data_offsets": [256, 384]}}, b"\0" * 384),
    "data nobody names": _file(_tensor(), BODY + b"#!/bin/sh"),
    "data that ends early": _file(_tensor(), BODY[:-1]),
    "NaN in F32": _floats("F32", 0x7FC00000),
    "infinity in F32": _floats("F32", 0xFF800000),
    "NaN in F16": _floats("F16", 0x7E00),
    "infinity in F16": _floats("F16", 0x7C00),
    "NaN in BF16": _floats("BF16", 0x7FC0),
    "infinity in BF16": _floats("BF16", 0xFF80),
    "a pickle": _raw(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    **{f"a pickle of protocol {n}": _raw(pickle.dumps({"a": [1.5] * 99}, protocol=n)) for n in range(6)},
    "a pickle as torch saves it": _raw(_zipped("archive/data.pkl")),
    "a zip": _raw(_zipped("ink.safetensors")),
    "a tar": _raw(_tarred()),
    "a gzip": _raw(gzip.compress(BODY, mtime=0)),
    "a bzip2": _raw(bz2.compress(BODY)),
    "an xz": _raw(lzma.compress(BODY)),
    "a RAR": _raw(b"Rar!\x1a\7\1\0{" + BODY),
    "a 7z": _raw(b"7z\xbc\xaf\x27\x1c\0\4{" + BODY),
    "GGUF of 123 tensors": _raw(b"GGUF\3\0\0\0{\0\0\0\0\0\0\0" + BODY),
    "a PNG": _raw(b"\x89PNG\r\n\x1a\n" + b"\0" * 200),
    "HTML": _raw(b"<html><body>404 not found</body></html>"),
    "HTML after a mark and lines": _raw(b"\xef\xbb\xbf\n\n <!DOCTYPE html>" + "й".encode() * 400),
    "XML": _raw(b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'),
    "JSON": _raw(b'{"error":"Repository not found"}'),
    "PEFT's configuration": _raw(b'{\n  "alora_invocation_tokens": null,\n  "alpha_pattern": {},\n  "r": 8\n}'),
    "JSON whose ninth letter opens an object": _raw(b'{"err": {"code": 401}}'),
    "text": _raw(b"Entry not found"),
    "a text of three letters": _raw(b"404"),
    "a pointer of Git LFS": _raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
    "a download of zeros": _raw(b"\0" * 4096),
    "the mark of float8 with scales": _file(
        {"scaled_fp8": {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [0, 0]}}, b""
    ),
    "three gigabytes of nothing": _sparse,
    "128 MB, the last value NaN": _large_and_not_finite,
    "a bundled embedding": _named("bundle_emb.<ink>.string_to_param.*"),
    "a LoRA of cloneofsimo": _file({"<s1>": PAIR, "unet:0:up": {**PAIR, "data_offsets": [128, 256]}}, BODY * 2),
    "a textual inversion": _named("<cat-toy>"),
    "an infinite alpha": _infinite_alpha,
}


def changed(*, name: str = "", number: float | None = None) -> Write:
    """Return what writes a LoRA of the pocket model with its layers called otherwise, or one number everywhere."""

    def write(path: Path) -> None:
        content = GOOD.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8 : 8 + length])
        body, end = content[8 + length :], 0
        if name:
            header = {key.replace("unet.", name): value for key, value in header.items()}
        if number is not None:
            for tensor in (value for key, value in header.items() if key != "__metadata__"):
                begin, end = end, end + 4 * math.prod(tensor["shape"])
                tensor |= {"dtype": "F32", "data_offsets": [begin, end]}
            body = struct.pack("<f", number) * (end // 4)
        _file(header, body)(path)

    return write


WELL_FORMED: dict[str, Write] = {
    "layers of no model": changed(name="unet.nowhere."),
    "layers of a transformer": changed(name="transformer.single_transformer_blocks.0."),
    "finite numbers that overflow": changed(number=1e38),
}
"""Files that the store keeps and only the engine can refuse."""

REASONS: dict[str, str] = {
    "empty": "is empty",
    "seven bytes": "too short",
    "length zero|a download of zeros": "begins with zeros alone, .* fetch it again",
    "only a length|length past the end": "ends inside its header: it was not copied whole",
    "length of everything|length over|metadata bomb|too many long names": "header over 8 MiB",
    "a PNG": "is a picture, .* choose the safetensors file",
    "header that is a": "header that is no object",
    "header with NaN": "malformed shape",
    "header": "header is not JSON in UTF-8",
    "8 MiB of names|no tensors|only metadata|too many tensors": "1 to 20000 tensors",
    "8 MiB of": "malformed tensor entry",
    "metadata of many keys": "over 1000 metadata entries",
    "metadata": "metadata that is not text",
    "a name twice": "names a tensor twice",
    "a name|an empty name": "forbidden name",
    "an entry": "malformed( tensor)? entry",
    "an unknown dtype|a dtype": "in a type, .*, that is not one of F64, F32",
    "a shape with a zero": "an empty tensor, unet.x.* as DeepSpeed",
    "a shape (with a negative|that overflows)|a side": "side out of bounds",
    "a shape": "malformed shape",
    "offsets the wrong way": "offsets that do not fit",
    "offsets (below|past)|tensors that overlap|a hole": "a hole or an overlap",
    "offsets that are text|three offsets": "malformed offsets",
    "data": "data that no tensor names, or ends early",
    "NaN in|infinity in|128 MB": "numbers that are not finite in",
    "a pickle": "is a pickle .* convert it to safetensors",
    "a (zip|RAR|7z|tar)": "is a (zip|RAR|7z|tar) archive: unpack it",
    "a gzip|a bzip2|an xz": "is compressed with .*: unpack it",
    "GGUF": "is GGUF, .* send the LoRA as safetensors",
    "HTML|XML": "is a web page, not weights",
    "JSON": "is JSON, .* check the download address",
    "PEFT's": "is PEFT's adapter_config.json, .* choose the adapter_model.safetensors",
    "text|a text of": "is text, .* check the download address",
    "a pointer": "is a Git LFS pointer",
    "the mark of float8": "is quantized to float8 with scales .* save it as float16",
    "three gigabytes": "larger than 2 GiB",
    "a bundled embedding": "bundles an embedding .* save the LoRA without it",
    "a LoRA of cloneofsimo": "is a LoRA of cloneofsimo's lora for SD 1 or SD 2, .* convert it",
    "a textual inversion": "is a textual inversion or holds one",
    "an infinite alpha": "numbers that are not finite in",
}
"""What the error says, by how the names of the files begin; the first that fits holds."""


def reason_of(name: str) -> str:
    """Return the expression that the error of a file has to hold."""
    return next(reason for beginning, reason in REASONS.items() if re.match(beginning, name))


def main(folder: Path) -> None:
    store = WeightStore(Settings(data_dir=folder / "var", redis_url="unix:///unused"))
    rows = {name: offer(store, folder / "offered", write) for name, write in CORPUS.items()}
    left = [path.name for path in (folder / "var" / "weights").iterdir()]
    sys.stdout.write(json.dumps({"rows": rows, "left": left, "peak_mb": peak_mb(), "child_mb": child_peak_mb()}))


def processor_time() -> float:
    """Seconds of this process and of the children that have ended: a file is checked in one of its own."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


def child_peak_mb() -> float:
    """The peak of the largest child, which begins with this process's own memory, so that it is never too low."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000


def peak_mb() -> float:
    """This program's own peak: `ru_maxrss` would begin at that of the process that started it."""
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1000


def offer(store: WeightStore, path: Path, write: Write) -> dict[str, Any]:
    """Offer the file to the store, and remove it; return the answer and the processor time.

    The time is that of the process and its child.
    """
    write(path)
    adapter = hostile_adapter(path)
    began = processor_time()
    try:
        asyncio.run(store.fetch(adapter))
        outcome = "kept"
    except AdapterUnavailable as error:
        outcome = f"refused: {error.message}"
    except Exception as error:  # noqa: BLE001 - anything else is what the test looks for
        outcome = f"broke: {error!r}"
    path.unlink()
    return {"outcome": outcome, "seconds": processor_time() - began}


def hostile_adapter(path: Path) -> Adapter:
    digest = "0" * 64  # a file over the limit is refused before it is read
    if path.stat().st_size < MAX_FILE_BYTES:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Adapter(
        id="model_hostile",
        name="Hostile",
        description="",
        created_at=datetime.now(UTC),
        file=str(path),
        sha256=digest,
        base_model="pocket",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
