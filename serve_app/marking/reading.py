"""Reads the marks of a picture that anybody may have sent, in a process of limited memory and time.

`python -m serve_app.marking.reading FILE LUMINANCE SECONDS` prints one line of JSON, the marks or {"refused": reason},
and writes what the watermark is looked for in, so that no secret leaves the process that asks.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from serve_app.domain.errors import InvalidParameter
from serve_app.marking.credentials import missing_library, read_manifest
from serve_app.marking.drawing_texts import A1111, INVOKEAI
from serve_app.marking.watermark import GRID, THRESHOLD, Watermark, luminance_of
from serve_app.marking.xmp import SourceType, source_type_in
from serve_app.safetensors_file import limit_memory
from serve_app.store.limited_process import read_in_process

MAX_FILE_BYTES = 64 * 1000 * 1000
"""A file of more bytes is not read: an enlarged picture of 16 megapixels has fewer as a PNG."""
MAX_PIXELS = 50 << 20
MEMORY = 768 << 20
"""Reading may take this many bytes beyond the libraries': enough for 50 megapixels, or 40 of a WebP (16 bytes each)."""
READ_LIMIT_S, LIMIT_S = 5.0, 30.0
"""Reading may take this much processor time, and this long on a busy machine."""
LONGEST_TEXT = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMarks:
    """What was found in a file; `manifest` is what `read_manifest` returns, `settings` is keyword → text."""

    format: str
    width: int
    height: int
    source_type: str
    """The digital source type that its XMP names; empty where it names none."""
    manifest: Mapping[str, Any] | None
    settings: Mapping[str, str]
    score: float | None = None

    @property
    def has_watermark(self) -> bool | None:
        """Whether the operator's watermark is there; None where nobody looked for one."""
        return None if self.score is None else self.score >= THRESHOLD


_WORDS: Mapping[str, str] = {
    SourceType.GENERATED: "made by a model: ",
    SourceType.COMPOSITE: "changed by a model: ",
    "Valid": "nothing has changed since somebody signed it",
    "Trusted": "nothing has changed since it was signed",
    "Invalid": "it was changed, or its signature does not hold",
    "Ended": "signed by a certificate that has ended since; without a time stamp it cannot be shown when it was signed",
    "Elsewhere": "its manifest is at an address, from which nothing is fetched",
}


def shown_marks(found: FoundMarks) -> list[tuple[str, str]]:
    """Return what was found in words, label and text, but for the drawing's settings, which are texts themselves."""
    manifest = found.manifest or {"state": "none", "problems": (), "signer": "", "source_type": "", "when": ""}
    watermark = "not looked for, since no service has its secret here"
    if found.score is not None:
        watermark = (
            f"{'found' if found.has_watermark else 'not found'}: score {found.score:.1f}, from {THRESHOLD:.1f} on"
        )
    told = {
        "Picture": f"{found.format}, {found.width} × {found.height} pixels",
        "XMP": _words(found.source_type) or "none that says how it was made",
        "C2PA": ": ".join(filter(None, (manifest["state"], _WORDS.get(manifest["state"]), *manifest["problems"]))),
        "C2PA, signed by": manifest["signer"],
        "C2PA, source": _words(manifest["source_type"]),
        "C2PA, time": manifest["when"] and f"{manifest['when']}, by the signer's clock",
        "Watermark of this service": watermark,
    }
    return [(label, text) for label, text in told.items() if text]


def _words(source_type: str) -> str:
    return _WORDS.get(source_type, "") + source_type


async def read(file: Path, scratch: Path, key: bytes | None) -> FoundMarks:
    """Read a file; `scratch` is a path for another beside it, and `key` the watermark's, if there is one.

    Raises `InvalidParameter` with the reason for what is no picture, or more than is read.
    """
    _check(file)
    answer = await read_in_process(
        "serve_app.marking.reading", file, scratch, READ_LIMIT_S,
        kind="a picture", seconds=LIMIT_S, processor_seconds=READ_LIMIT_S,
    )  # fmt: skip
    return await asyncio.to_thread(_with_score, answer, scratch, key)


def _check(file: Path) -> None:
    if not file.is_file():
        raise InvalidParameter(f"file: {'is no file' if file.exists() else 'there is no such file'}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise InvalidParameter(f"file: has more than {MAX_FILE_BYTES // 10**6} MB")


def _with_score(answer: Mapping[str, Any], scratch: Path, key: bytes | None) -> FoundMarks:
    luminance = np.frombuffer(scratch.read_bytes(), np.float32).reshape(GRID, GRID)
    return FoundMarks(**answer, score=None if key is None else Watermark(key).score(luminance))


def main(file: str, luminance: str, seconds: str) -> None:
    missing_library()  # loaded before the limit, its 50 MB do not count
    Image.preinit()
    limit_memory(MEMORY)
    signal.setitimer(signal.ITIMER_PROF, float(seconds))  # when it is over, the kernel ends the process by SIGPROF
    sys.stdout.write(json.dumps(_plain(_read(Path(file).read_bytes(), Path(luminance)))) + "\n")


def _read(content: bytes, luminance: Path) -> dict[str, Any]:
    Image.MAX_IMAGE_PIXELS = None  # `MAX_PIXELS` is looked at below
    try:
        with Image.open(BytesIO(content), formats=("PNG", "JPEG", "WEBP")) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                return {"refused": f"has {picture.width} × {picture.height} pixels; at most {MAX_PIXELS} are read"}
            picture.load()
            luminance.write_bytes(luminance_of(picture).tobytes())
            form = "JPEG" if picture.format == "MPO" else str(picture.format)
            return {
                "format": form,
                "width": picture.width,
                "height": picture.height,
                "source_type": source_type_in(_xmp(picture)),
                "manifest": read_manifest(content, f"image/{form.lower()}"),
                "settings": _settings(picture),
            }
    except UnidentifiedImageError:
        return {"refused": "is no PNG, JPEG or WebP"}
    except MemoryError:
        return {"refused": f"takes more than {MEMORY >> 20} MiB of memory to read"}
    except Exception:  # noqa: BLE001 - Pillow raises errors of any kind for a damaged file
        return {"refused": "is damaged or incomplete"}


def _xmp(picture: Image.Image) -> bytes:
    found = picture.info.get("xmp") or picture.info.get("XML:com.adobe.xmp") or b""
    return found.encode() if isinstance(found, str) else bytes(found)


def _settings(picture: Image.Image) -> dict[str, str]:
    """Return the texts that A1111 and InvokeAI read, as they are."""
    found = {name: picture.info.get(name) for name in (A1111, INVOKEAI)}
    comment = picture.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    if isinstance(comment, bytes) and comment.startswith(b"UNICODE\0"):
        found[A1111] = comment[8:].decode("utf-16-be", "replace")
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _plain(found: Any) -> Any:
    """Return what a stranger wrote without what a terminal would obey, and not at any length."""
    if isinstance(found, str):
        text = found[:LONGEST_TEXT].translate({ord("\t"): " ", ord("\r"): " "})
        return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)
    if isinstance(found, dict):
        return {name: _plain(value) for name, value in cast("dict[str, Any]", found).items()}
    return [_plain(each) for each in cast("list[Any]", found)] if isinstance(found, list) else found


if __name__ == "__main__":
    main(*sys.argv[1:])
