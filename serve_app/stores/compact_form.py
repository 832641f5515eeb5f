"""The compact form of a completed job's record: what readers need, deflated into a few short fields.

Redis keeps a hash whose values have at most 64 bytes as one list of bytes; a longer value costs it a table. So the
packed text is cut into parts of that length, as text of seven bits a character, which every client reads.
"""

import hashlib
import json
import re
import zlib
from base64 import b32decode, b32encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import UnreadableRecord

PART = 64
"""`hash-max-ziplist-value` (or `-listpack-value`) of a server that nobody has configured."""
KEPT = ("account", "variant", "attempt", "idempotency")
"""Fields that scripts read of an ended job, and that stay as they are; `state`, too."""
_DICTIONARY = (
    b"a photo of portrait the with and in on at of by, highly detailed, cinematic light, watercolor, oil painting, "
    b'soft light, style, sharp focus, best quality, 4kblurry, low quality, bad anatomy{"image_id":"img_","source_uri":"'
    b'source_width":,"source_height":"scale_factor":2}file:///s3://gcs:///images/","lora_weight":0.75,"width":512,'
    b'"height":512,"guidance_scale":7.5,"steps":20,"steps":30,"seeds":[{"prompt":","lora_id":"model_","negative_prompt":""'
    b',"lora_weight":0.75,"width":512,"height":512,"guidance_scale":7.5,"steps":30,"seeds":[key_'
)
"""Texts that most records have, the commonest last. Part of the format: never change it, add another format beside it."""
_FORMAT = 1
_IMAGE_ID, _SHA256 = re.compile(r"img_[a-z2-7]{26}"), re.compile(r"[0-9a-f]{64}")
_URI = re.compile(r"(?P<root>.*/)images/(?P<owner>[0-9a-f]{32})/(?P<place>.*)/a(?P<attempt>\d+)-(?P<index>\d+)\.png")
_IMAGE_FIELDS = {"image_id", "image_uri", "width", "height", "sha256", "size_bytes"}


def pack(job_id: str, fields: Mapping[str, str]) -> list[str]:
    """Pack what a reader needs of a completed record. Raises `UnreadableRecord` for one that is not whole."""
    try:
        created = int(fields["created"])
        images, binary = _pack_images(json.loads(fields["images"]), _place(job_id, created))
        timings = [*json.loads(fields["timings"]).values()] if fields.get("timings") else None
        row: list[Any] = [
            images,
            created,
            int(fields["started"]) - created if "started" in fields else None,
            int(fields["finished"]) - created,
            round(float(fields["seconds"]), 3) if "seconds" in fields else None,
            timings,
            fields.get("key", ""),
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise UnreadableRecord(f"compact form: {type(error).__name__}") from error
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=_DICTIONARY)
    text = f"{fields['request']}\n{json.dumps(row, separators=(',', ':'))}".encode()
    whole = bytes((_FORMAT, len(binary) // 16)) + binary + deflate.compress(text) + deflate.flush()
    line = _to_seven_bits(whole)
    return [line[start : start + PART] for start in range(0, len(line), PART)]


def short_digest(name: str) -> str:
    """What a compact record keeps of an adapter's or a key's id, for lists; '' of none."""
    return hashlib.sha256(name.encode()).hexdigest()[:10] if name else ""


def is_packed(fields: Mapping[str, str]) -> bool:
    return "0" in fields


def packed_parts(fields: Mapping[str, str]) -> list[str]:
    return list(_parts(fields))


def unpack(job_id: str, fields: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields of a record as they were before `pack`, less those that nobody reads.

    A record that is not packed is returned as it is. Raises `UnreadableRecord`.
    """
    if not is_packed(fields):
        return fields
    try:
        whole = _from_seven_bits("".join(_parts(fields)))
        if whole[0] != _FORMAT:
            raise UnreadableRecord(f"compact form {whole[0]} is of another version")
        end = 2 + 16 * whole[1]
        inflate = zlib.decompressobj(-15, zdict=_DICTIONARY)
        request, _, text = inflate.decompress(whole[end:]).decode().rpartition("\n")
        images, created, started, finished, seconds, timings, key = json.loads(text)
        stored = {name: fields[name] for name in (*KEPT, "state") if name in fields}
        names = {
            "kind": "upscale" if job_id.startswith("up_") else "generation",
            "request": request,
            "images": json.dumps(_unpack_images(images, whole[2:end], _place(job_id, created)), separators=(",", ":")),
            "created": str(created),
            "finished": str(created + finished),
            "progress": "100",
        }
        if started is not None:
            names["started"] = str(created + started)
        if seconds is not None:
            names["seconds"] = str(seconds)
        if timings is not None:
            names["timings"] = json.dumps(dict(zip(("load", "denoise", "store"), timings, strict=True)))
        if key:
            names["key"] = key
        if "a" in fields:
            names["adapter"] = json.loads(request)["lora_id"]
    except (KeyError, ValueError, TypeError, IndexError, zlib.error) as error:
        raise UnreadableRecord(f"compact form: {type(error).__name__}") from error
    return stored | names


def _parts(fields: Mapping[str, str]) -> Iterator[str]:
    number = 0
    while (part := fields.get(str(number))) is not None:
        yield part
        number += 1


def _pack_images(images: Sequence[Mapping[str, Any]], usual_place: str) -> tuple[Any, bytes]:
    """Return the images as cells for JSON and their random bytes, which do not compress.

    Images of an unusual form are returned whole, without bytes.
    """
    found = [_URI.fullmatch(image["image_uri"]) for image in images]
    heads = {(uri["root"], uri["owner"], uri["place"]) if uri else None for uri in found}
    is_plain = len(heads) == 1 and all(
        set(image) == _IMAGE_FIELDS
        and _IMAGE_ID.fullmatch(image["image_id"])
        and _SHA256.fullmatch(image["sha256"])
        and _image_id(_image_bytes(image["image_id"])) == image["image_id"]
        and uri
        and f"{int(uri['attempt'])}-{int(uri['index'])}" == f"{uri['attempt']}-{uri['index']}"
        for image, uri in zip(images, found, strict=True)
    )
    if not is_plain:
        return list(images), b""
    root, owner, place = next(head for head in heads if head)
    binary, cells = bytes.fromhex(owner), [root, "" if place == usual_place else place]
    for image, uri in zip(images, found, strict=True):
        assert uri
        binary += _image_bytes(image["image_id"]) + bytes.fromhex(image["sha256"])
        cells += [int(uri["attempt"]), int(uri["index"]), image["width"], image["height"], image["size_bytes"]]
    return cells, binary


def _unpack_images(cells: Sequence[Any], binary: bytes, usual_place: str) -> list[Mapping[str, Any]]:
    if not binary:
        return list(cells)
    root, place, *rest = cells
    images: list[Mapping[str, Any]] = []
    for number in range(len(rest) // 5):
        attempt, index, width, height, size = rest[5 * number : 5 * number + 5]
        own = binary[16 + 48 * number : 64 + 48 * number]
        images.append(
            {
                "image_id": _image_id(own[:16]),
                "image_uri": f"{root}images/{binary[:16].hex()}/{place or usual_place}/a{attempt}-{index}.png",
                "width": width,
                "height": height,
                "sha256": own[16:].hex(),
                "size_bytes": size,
            }
        )
    return images


def _place(job_id: str, created_ms: int) -> str:
    """Where a job's images are in its account's folder: `ImageStore.job_folder`."""
    return f"{from_epoch_ms(created_ms):%Y/%m/%d}/{job_id}"


def _image_bytes(image_id: str) -> bytes:
    return b32decode(image_id.removeprefix("img_").upper() + "=" * 6)


def _image_id(name: bytes) -> str:
    return "img_" + b32encode(name).decode().rstrip("=").lower()


def _to_seven_bits(data: bytes) -> str:
    """The bytes as a number in base 128, with a leading 1 that keeps its zeros."""
    number = int.from_bytes(b"\x01" + data)
    digits = bytearray()
    while number:
        digits.append(number & 127)
        number >>= 7
    return digits[::-1].decode("ascii")


def _from_seven_bits(text: str) -> bytes:
    number = 0
    for digit in text.encode("ascii"):
        number = number << 7 | digit
    return number.to_bytes((number.bit_length() + 7) // 8)[1:]
