"""Packs a job's request and its result for its record: deflated, in short fields.

Redis keeps a hash as one compact list only while no value is longer than 64 bytes. So the scripts cut
what is packed here into shorter fields (`packed_fields` in `queue.lua`): `0`, `1`, … hold the request from its accept
to the end, `r0`, `r1`, … the result. They are bytes, which our clients read as text with surrogate escapes.
"""

import json
import re
import zlib
from base64 import b32decode, b32encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date, timedelta
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import to_json

from serve_app.domain.errors import UnreadableRecord
from serve_app.domain.jobs import StoredImage, Timings
from serve_app.domain.requests import Request

RESULT = "r"
"""The names of the result's fields begin with this letter; those of the request's are numbers."""
_LEVEL = 6
"""This is the level of deflate: level 9 takes three times as long for the longest prompts, and saves only 2 %."""
_DICTIONARY = (
    b"a photo of portrait the with and in on at of by, highly detailed, cinematic light, watercolor, oil painting, "
    b'soft light, style, sharp focus, best quality, 4kblurry, low quality, bad anatomy{"image_id":"img_","source_uri":"'
    b'source_width":,"source_height":"scale_factor":2}file:///s3://gcs:///images/","lora_weight":0.75,"width":512,'
    b'"height":512,"guidance_scale":7.5,"steps":20,"steps":30,"seeds":[{"prompt":","lora_id":"model_","negative_prompt":""'
    b',"lora_weight":0.75,"width":512,"height":512,"guidance_scale":7.5,"steps":30,"seeds":['
    b']],[["file:///images/","/gen_","1-0",1024,1024,"1-1",512,768,1"1-0",768,512,1"1-0",512,512,1[["s3://'
)
"""Texts that most records have, the commonest last. They are part of the format: a change of them needs a new version
of the records."""
_IMAGE_ID, _SHA256 = re.compile(r"img_[a-z2-7]{25}[aeimquy4]"), re.compile(r"[0-9a-f]{64}")
_URI = re.compile(
    r"(?P<root>.*/)images/(?P<owner>[0-9a-f]{32})/(?P<date>\d{4}/\d\d/\d\d)/(?P<job>\w+)/"
    r"a(?P<name>\d+-\d+\.(?:png|jpg|webp))"
)
_OWNER_BYTES, _IMAGE_BYTES, _FIRST_DAY = 16, 48, date(2026, 1, 1)


_REQUEST = TypeAdapter[Request](Request)


class Result(NamedTuple):
    """What a completed attempt made; the seconds are those of one worker."""

    images: tuple[StoredImage, ...] = ()
    seconds: float | None = None
    timings: Timings | None = None


def pack_request(request: Request, adapters: str) -> bytes:
    """Deflate a request as JSON, without what is as its class has it; `adapters` is what the record says of them."""
    return deflate(_REQUEST.dump_json(request, exclude_defaults=True), adapters)


def unpack_request(fields: Mapping[str, str]) -> bytes:
    """Return the request of a record (JSON). Raises `UnreadableRecord`."""
    try:
        return _inflate(_joined("", fields), fields.get("adapter", ""))
    except (ValueError, zlib.error) as error:
        raise UnreadableRecord(f"request: {type(error).__name__}") from error


def request_bytes(fields: Mapping[str, str]) -> int:
    """Return how many bytes a record's packed request has."""
    return len(_joined("", fields))


def pack_result(job_id: str, result: Result) -> bytes:
    """Pack a result; its first byte is the number of images.

    A deletion script tells by its first field whether images were deleted since its caller has read the result.
    """
    cells, binary = _pack_images(job_id, result.images)
    timings = None if result.timings is None else [_ms(part) for part in asdict(result.timings).values()]
    seconds = None if result.seconds is None else _ms(result.seconds)
    packed = deflate(to_json([cells, seconds, timings]), job_id)
    return bytes((len(result.images), bool(binary))) + binary + packed


def unpack_result(job_id: str, fields: Mapping[str, str]) -> Result:
    """Return the result of a completed job's record. Raises `UnreadableRecord`."""
    try:
        whole = _joined(RESULT, fields)
        end = 2 + (_OWNER_BYTES + whole[0] * _IMAGE_BYTES if whole[1] else 0)
        cells, seconds, timings = json.loads(_inflate(whole[end:], job_id))
        return Result(
            images=_unpack_images(job_id, cells, whole[2:end]),
            seconds=None if seconds is None else seconds / 1000,
            timings=None
            if timings is None
            else Timings(**{n: ms / 1000 for n, ms in zip(_PARTS, timings, strict=True)}),
        )
    except (ValueError, TypeError, IndexError, zlib.error) as error:
        raise UnreadableRecord(f"result: {type(error).__name__}") from error


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def as_text(packed: bytes) -> str:
    """Return packed bytes as clients read them."""
    return packed.decode(errors="surrogateescape")


def _joined(prefix: str, fields: Mapping[str, str]) -> bytes:
    parts = list[bytes]()
    while (part := fields.get(f"{prefix}{len(parts)}")) is not None:
        parts.append(part.encode(errors="surrogateescape"))
    return b"".join(parts)


def deflate(content: bytes, known: str) -> bytes:
    """Deflate JSON; parts of it that also occur in `known`, which its reader has too, take next to no space."""
    dictionary = _DICTIONARY + known.encode()
    window = min(15, (len(content) + len(dictionary)).bit_length())  # a larger one costs 0.4 MB of fresh memory a call
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -window, window - 6, zdict=dictionary)
    return deflate.compress(content) + deflate.flush()


def _inflate(packed: bytes, known: str) -> bytes:
    inflate = zlib.decompressobj(-15, zdict=_DICTIONARY + known.encode())
    content = inflate.decompress(packed)
    if not inflate.eof or inflate.unused_data:
        raise ValueError("not one whole stream")
    return content


def _pack_images(job_id: str, images: Sequence[StoredImage]) -> tuple[Any, bytes]:
    """Return the images as cells for JSON and their random bytes, which do not compress.

    Images of an unusual form are returned whole, without bytes.
    """
    found = [_URI.fullmatch(image.image_uri) for image in images]
    heads = {uri.group("root", "owner", "date") if uri else None for uri in found}
    is_plain = len(heads) == 1 and all(
        uri and uri["job"] == job_id and _IMAGE_ID.fullmatch(image.image_id) and _SHA256.fullmatch(image.sha256)
        for image, uri in zip(images, found, strict=True)
    )
    if not is_plain:
        return [[*asdict(image).values()] for image in images], b""
    root, owner, day = next(head for head in heads if head)
    binary, cells = bytes.fromhex(owner), [root, (date(*map(int, day.split("/"))) - _FIRST_DAY).days]
    for image, uri in zip(images, found, strict=True):
        assert uri, "all were found"
        binary += b32decode(image.image_id[4:].upper() + "======") + bytes.fromhex(image.sha256)
        cells += [uri["name"].removesuffix(".png"), image.width, image.height, image.size_bytes]
    return cells, binary


def _unpack_images(job_id: str, cells: Sequence[Any], binary: bytes) -> tuple[StoredImage, ...]:
    if not binary:
        return tuple(StoredImage(**dict(zip(_FIELDS, image, strict=True))) for image in cells)
    root, days, *rest = cells
    place = f"{_FIRST_DAY + timedelta(days)}".replace("-", "/") + f"/{job_id}"
    images = list[StoredImage]()
    for start in range(0, len(rest), 4):
        name, width, height, size = rest[start : start + 4]
        name += "" if "." in name else ".png"
        own = binary[_OWNER_BYTES + start // 4 * _IMAGE_BYTES :][:_IMAGE_BYTES]
        images.append(
            StoredImage(
                image_id="img_" + b32encode(own[:16]).decode().rstrip("=").lower(),
                image_uri=f"{root}images/{binary[:_OWNER_BYTES].hex()}/{place}/a{name}",
                width=width,
                height=height,
                sha256=own[16:].hex(),
                size_bytes=size,
            )
        )
    return tuple(images)


_FIELDS = ("image_id", "image_uri", "width", "height", "sha256", "size_bytes")
_PARTS = ("load", "denoise", "store")
