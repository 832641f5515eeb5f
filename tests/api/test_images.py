"""An account uploads pictures: checked in a process of its own, stored as plain PNGs, counted, read and deleted."""

import resource
import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from functools import cache
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from serve_app.domain.audit import Actor
from serve_app.domain.requests import Variant
from serve_app.jobs.deletion import Deletions, remove_listed_objects
from serve_app.jobs.uploads import HELD_FOR, LEAST_COUNTED, Hold
from serve_app.store.keys import redis_key
from tests.api.app import ALL, LORA, Member, TestService, open_service, refused
from tests.composition import Resources
from tests.made_jobs import job_of, stored_image
from tests.rewriting import later
from tests.support import existing, plain_redis, png_of

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
MAX_FILE = 20_000_000


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png(width: int, height: int, *chunks: tuple[bytes, bytes], depth: int = 8) -> bytes:
    """Write a PNG by hand: its header, these chunks, and pixels for as far as a few bytes go."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    rows = ((b"IHDR", header), *chunks, (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b""))
    written = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in rows
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def of_many_scans(image: Image.Image) -> bytes:
    whole = file_of(image, "jpeg", progressive=True)
    last, end = whole.rindex(b"\xff\xda"), whole.rindex(b"\xff\xd9")
    return whole[:last] + whole[last:end] * 20_000 + whole[end:]


def shaded(jpeg: bytes) -> bytes:
    """Put a marker without a length before the scans, which would hide them if the bytes after it were one."""
    at = jpeg.index(b"\xff\xda")
    return jpeg[:at] + b"\xff\x01\xff\xff" + jpeg[at:]


def of_size(side: int, jpeg: bytes) -> bytes:
    at = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:at] + struct.pack(">HH", side, side) + jpeg[at + 4 :]


def with_chunk(file: bytes, name: bytes, data: bytes, *, crc: int = 0) -> bytes:
    """Put a chunk after a PNG's header; `crc` damages its checksum."""
    chunk = name + data
    return file[:33] + struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk) ^ crc) + file[33:]


def icc_profile(space: bytes, **tags: bytes) -> bytes:
    """Write an ICC profile of a display, or of a printer for CMYK, by hand (ICC.1:2022, clause 7)."""
    kind = b"prtr" if space == b"CMYK" else b"mntr"
    at, table, data = 132 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, tag in tags.items():
        table += name.encode() + struct.pack(">II", at + len(data), len(tag))
        data += tag
    white = struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(">II", at + len(data), 0) + struct.pack(">I", 0x02400000) + kind + space.ljust(4)
    pcs = b"Lab " if space == b"CMYK" else b"XYZ "
    return head + pcs + bytes(12) + b"acsp" + bytes(28) + white + bytes(48) + table + data


def xyz(*numbers: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(number * 65536) for number in numbers))


def gamma(number: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(number * 256)) + bytes(2)


def inks() -> bytes:
    """Write a table from four inks to L, a and b of 8 bits: each ink takes its part of the light."""
    corners = [
        ([255, 200, 140, 90, 40][sum(ink)], 128 + 20 * (ink[1] - ink[0]), 128 + 20 * ink[2])
        for ink in product((0, 1), repeat=4)
    ]
    unit = struct.pack(">9i", *(65536 if i % 4 == 0 else 0 for i in range(9)))
    curves = bytes(range(256))
    return b"mft1" + bytes(4) + bytes([4, 3, 2, 0]) + unit + curves * 4 + bytes(sum(corners, ())) + curves * 3


WHITE = xyz(0.9642, 1, 0.8249)
ADOBE_RGB = icc_profile(
    b"RGB", wtpt=WHITE, rXYZ=xyz(0.60974, 0.31111, 0.01947), gXYZ=xyz(0.20528, 0.62567, 0.06087),
    bXYZ=xyz(0.14919, 0.06322, 0.74457), **{f"{c}TRC": gamma(2.2) for c in "rgb"},
)  # fmt: skip
GREY_18 = icc_profile(b"GRAY", wtpt=WHITE, kTRC=gamma(1.8))
CMYK = icc_profile(b"CMYK", wtpt=WHITE, A2B0=inks())
FROM_P3 = np.array([[1.22494, -0.22494, 0], [-0.042057, 1.042057, 0], [-0.019638, -0.078636, 1.098274]])
FROM_ADOBE = np.array([[1.398356, -0.398356, 0], [0, 1, 0], [0, -0.042929, 1.042929]])
"""Linear Display P3 and Adobe RGB in linear sRGB, from their primaries and D65."""
TONES = np.asarray(PHOTO) / 255


def in_srgb(linear: np.ndarray) -> np.ndarray:
    """Encode light as sRGB of 8 bits (IEC 61966-2-1)."""
    light = linear.clip(0, 1)
    return (np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055) * 255).round()


def by_image_cms(image: Image.Image, profile: bytes) -> np.ndarray:
    shown = ImageCms.profileToProfile(image, BytesIO(profile), ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert shown is not None
    return np.asarray(shown)


@cache
def bomb() -> bytes:
    """200 MiB in 200 kB. They take a second to make, which the workers of pytest with other tests are spared."""
    return zlib.compress(bytes(200 << 20), 9)


EXIF = Image.Exif()
EXIF[0x0112] = 6  # the camera was turned: the picture is upright after a quarter to the right
EXIF[0x010F] = "Maker of the camera"
TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("Author", "somebody")
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SEVERAL: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", PHOTO.size)], "duration": 50}

HOSTILE: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "a decompression bomb": (lambda: png(30_000, 30_000), 400, "file: has 30000 × 30000 pixels; at most 16384 on a side"),
    "too many pixels": (lambda: png(8_000, 8_000), 400, "52428800 in all"),
    "1 × 60,000": (lambda: png(1, 60_000), 400, "file: has 1 × 60000 pixels"),
    "a WebP of 16,383 a side": (lambda: _vp8x(16_383, 16_383), 400, "file: "),
    "a zTXt bomb": (lambda: png(8, 8, (b"zTXt", b"a\0\0" + bomb())), 400, "file: its metadata unpack to too many bytes"),
    "an ICC bomb": (lambda: png(8, 8, (b"iCCP", b"a\0\0" + bomb())), 400, "file: its metadata unpack to too many bytes"),
    "20,000 scans": (lambda: of_many_scans(PHOTO), 400, "file: has more than 32 scans"),
    "another format": (lambda: file_of(PHOTO, "gif"), 415, "file: must be a PNG, JPEG or WebP"),
    "no picture": (lambda: b"MZ" + bytes(500), 415, "file: must be a PNG, JPEG or WebP"),
    "a wrong magic": (lambda: b"\x89PNG\r\n\x1a\n" + file_of(PHOTO, "jpeg"), 415, "file: must be a PNG, JPEG or WebP"),
    "20,000 scans in a thumbnail's shade": (lambda: shaded(of_many_scans(PHOTO)), 400, "file: has more than 32 scans"),
    "HEIC": (lambda: b"\0\0\0\x18ftypheic" + bytes(500), 415, "picture, and this is HEIC or AVIF; save it as a JPEG"),
    "CMYK": (lambda: file_of(PHOTO.convert("CMYK"), "jpeg"), 400, "file: is in CMYK without a colour profile"),
    "PQ": (lambda: png(8, 8, (b"cICP", bytes([9, 16, 0, 1]))), 400, "file: is in HDR (PQ, HLG) or video colours"),
    "HLG": (lambda: png(8, 8, (b"cICP", bytes([9, 18, 0, 1]))), 400, "file: is in HDR (PQ, HLG) or video colours"),
    "16 bits": (lambda: png(8, 8, depth=16), 400, "file: has 16 bits a channel; send it with 8"),
    "an animated PNG": (lambda: file_of(PHOTO, "png", **SEVERAL), 400, "file: is animated"),
    "an animated WebP": (lambda: file_of(PHOTO, "webp", **SEVERAL), 400, "file: is animated"),
    "a huge JPEG without its end": (lambda: of_size(60_000, file_of(PHOTO, "jpeg")[:-2]), 400, "has 60000 × 60000"),
    "a cut JPEG": (lambda: file_of(PHOTO, "jpeg")[:-200], 400, "file: is damaged or incomplete"),
    "a cut progressive JPEG": (lambda: file_of(PHOTO, "jpeg", progressive=True)[:-200], 400, "file: is damaged or inc"),
    "a cut PNG": (lambda: file_of(PHOTO, "png")[:-2000], 400, "file: is damaged or incomplete"),
}  # fmt: skip


def _vp8x(width: int, height: int) -> bytes:
    sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides + file_of(PHOTO, "webp", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


async def send(service: TestService, headers: dict[str, str], file: bytes, **more: bytes) -> httpx.Response:
    files = {"file": ("x.png", file), **more} if file else more or {"file": b""}
    return await service.client.post("/v1/images", headers=headers, files=files)


async def sent(service: TestService, member: Member, file: bytes) -> dict[str, Any]:
    answer = await send(service, member.b, file)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def pixels(service: TestService, url: str) -> Image.Image:
    return Image.open(BytesIO((await service.client.get(url)).content))


def objects(service: TestService, member: Member) -> list[Path]:
    resources = service.resources
    folder = resources.settings.data_dir / "images" / resources.images.account_folder(member.account.id)
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
async def test_a_hostile_picture_is_refused_by_name_within_a_second(service: TestService, member: Member) -> None:
    """The time is that of a processor, so that a busy machine does not fail the test."""
    for name, (make, status, text) in HOSTILE.items():
        file, before = make(), _seconds()
        answer = await send(service, member.a, file)
        took = _seconds() - before
        code = "unsupported_media_type" if status == 415 else "invalid_parameter"
        refused(answer, status, code, text)
        assert took < 1, (name, took)
    assert objects(service, member) == []
    assert list((service.resources.settings.data_dir / "uploads").iterdir()) == []
    await sent(service, member, file_of(PHOTO, "png"))


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
async def test_a_picture_is_stored_upright_opaque_and_without_metadata(service: TestService, member: Member) -> None:
    turned = PHOTO.transpose(Image.Transpose.ROTATE_270)
    clear = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    on_white, grey = Image.new("RGB", (8, 8), "white"), PHOTO.convert("L")
    kinds: dict[str, tuple[bytes, Image.Image]] = {
        "turned": (file_of(PHOTO, "webp", lossless=True, exif=EXIF), turned),
        "polyglot": (
            file_of(PHOTO, "png", pnginfo=TEXT, icc_profile=PROFILE) + b"PK\x03\x04<script>alert(1)</script>",
            PHOTO,
        ),
        "transparent": (file_of(clear, "png"), on_white),
        "palette": (file_of(on_white.quantize(4), "png", transparency=0), on_white),
        "grey": (file_of(grey, "png"), grey),
        "grey and clear": (file_of(Image.new("LA", (8, 8), (9, 0)), "png"), Image.new("L", (8, 8), 255)),
        "one bit": (file_of(Image.new("1", (8, 8), 1), "png"), Image.new("L", (8, 8), 255)),
    }
    for name, (file, expected) in kinds.items():
        record = await sent(service, member, file)
        stored = await pixels(service, record["url"])
        assert (record["width"], record["height"]) == stored.size == expected.size, name
        assert (stored.format, stored.mode, stored.info) == ("PNG", expected.mode, {}), name
        assert stored.tobytes() == expected.tobytes(), name
    assert not any(word in path.read_bytes() for path in objects(service, member) for word in (b"Maker", b"script"))


@pytest.mark.slow
async def test_colours_become_those_of_srgb(service: TestService, member: Member) -> None:
    """A profile that says sRGB, that is broken or that is of another kind of picture changes no byte."""
    linear_p3 = np.where(TONES <= 0.04045, TONES / 12.92, ((TONES + 0.055) / 1.055) ** 2.4)
    whole, grey, cmyk = file_of(PHOTO, "png"), PHOTO.convert("L"), PHOTO.convert("CMYK")
    jpeg_cmyk = file_of(cmyk, "jpeg", quality=100, icc_profile=CMYK)
    points = struct.pack(">8I", 31270, 32900, 64000, 33000, 21000, 71000, 15000, 6000)
    adobe = with_chunk(with_chunk(whole, b"cHRM", points), b"gAMA", struct.pack(">I", 45455))
    of_srgb = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
    srgb = with_chunk(with_chunk(whole, b"cHRM", of_srgb), b"gAMA", struct.pack(">I", 45455))
    p3 = with_chunk(file_of(PHOTO, "png", icc_profile=PROFILE), b"cICP", bytes([12, 13, 0, 1]))
    light = with_chunk(file_of(Image.merge("LA", (grey, grey)), "png"), b"gAMA", struct.pack(">I", 100000))
    through = np.asarray(grey)[..., None] / 255
    palette = PHOTO.quantize(16)
    cases: dict[str, tuple[bytes, np.ndarray]] = {
        "cICP before iCCP": (p3, in_srgb(linear_p3 @ FROM_P3.T)),
        "gAMA and cHRM": (adobe, in_srgb(TONES**2.2 @ FROM_ADOBE.T)),
        "gAMA of sRGB": (with_chunk(whole, b"gAMA", struct.pack(">I", 45455)), np.asarray(PHOTO)),
        "gAMA and cHRM of sRGB": (srgb, np.asarray(PHOTO)),
        "gAMA, grey and clear": (light, (in_srgb(through)[..., 0] * through[..., 0] + 255 * (1 - through[..., 0]))),
        "iCCP": (file_of(PHOTO, "png", icc_profile=ADOBE_RGB), by_image_cms(PHOTO, ADOBE_RGB)),
        "WebP": (file_of(PHOTO, "webp", lossless=True, icc_profile=ADOBE_RGB), by_image_cms(PHOTO, ADOBE_RGB)),
        "palette": (file_of(palette, "png", icc_profile=ADOBE_RGB), by_image_cms(palette.convert("RGB"), ADOBE_RGB)),
        "grey": (file_of(grey, "png", icc_profile=GREY_18), by_image_cms(grey, GREY_18)[..., 1]),
        "CMYK": (jpeg_cmyk, by_image_cms(Image.open(BytesIO(jpeg_cmyk)), CMYK)),
        "sRGB": (file_of(PHOTO, "png", icc_profile=PROFILE), np.asarray(PHOTO)),
        "broken": (file_of(PHOTO, "png", icc_profile=ADOBE_RGB[:300]), np.asarray(PHOTO)),
        "another kind": (file_of(PHOTO, "png", icc_profile=GREY_18), np.asarray(PHOTO)),
    }
    exact = (
        "gAMA of sRGB",
        "gAMA and cHRM of sRGB",
        "iCCP",
        "WebP",
        "palette",
        "CMYK",
        "sRGB",
        "broken",
        "another kind",
    )
    for name, (file, expected) in cases.items():
        stored = np.asarray(await pixels(service, (await sent(service, member, file))["url"])).astype(int)
        assert stored.shape == expected.shape, name
        assert abs(stored - expected).max() <= (0 if name in exact else 1), name


@pytest.mark.slow
async def test_what_viewers_show_is_taken(service: TestService, member: Member) -> None:
    """A phone's movie, another picture or a thumbnail beside a JPEG is none of its scans."""
    baseline, progressive = file_of(PHOTO, "jpeg"), file_of(PHOTO, "jpeg", progressive=True)
    movie = b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\x08" * 99
    thumbnail = b"\xff\xe1" + struct.pack(">H", 8 + len(baseline)) + b"Exif\0\0" + baseline
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
    whole = file_of(PHOTO, "png")
    cases: dict[str, tuple[bytes, bytes]] = {
        "a motion photo": (progressive + movie, progressive),
        "several pictures": (file_of(PHOTO, "mpo", save_all=True, append_images=[PHOTO] * 3), baseline),
        "many pictures": (baseline * 40, baseline),
        "a thumbnail": (baseline[:2] + thumbnail + baseline[2:], baseline),
        "a Samsung trailer": (baseline + baseline + b"SEFH" + bytes(24) + b"SEFT", baseline),
        "no end": (baseline[:-2], baseline),
        "half an end": (progressive[:-1], progressive),
        "turned by XMP alone": (file_of(PHOTO, "jpeg", xmp=xmp), baseline),
        "turned by XMP alone, WebP": (file_of(PHOTO, "webp", lossless=True, xmp=xmp), whole),
        "damaged EXIF": (file_of(PHOTO, "jpeg", exif=b"Exif\0\0MM\0*\xff\xff"), baseline),
        "a damaged eXIf": (with_chunk(whole, b"eXIf", b"MM\0*\0\0\0\x08\0\xff", crc=1), whole),
        "an eXIf of noise": (with_chunk(whole, b"eXIf", bytes(range(99))), whole),
    }
    for name, (file, plain) in cases.items():
        stored = await pixels(service, (await sent(service, member, file))["url"])
        assert stored.tobytes() == Image.open(BytesIO(plain)).convert("RGB").tobytes(), name


@pytest.mark.slow
async def test_what_a_camera_makes_is_halved_and_the_largest_that_is_promised_is_not(
    service: TestService, member: Member
) -> None:
    """The time and the memory are those of the process that reads them."""
    square = Image.new("RGBA", (4096, 4096), (200, 100, 50, 128))
    camera = Image.linear_gradient("L").resize((8192, 6144)).convert("RGB")
    panorama = camera.resize((12_000, 1_000))
    cases = {
        "a clear PNG": (file_of(square, "png"), square.size),
        "a clear WebP": (file_of(square, "webp", lossless=True, method=0), square.size),
        "50 megapixels": (file_of(camera, "jpeg"), (4096, 3072)),
        "50 megapixels in many scans": (file_of(camera, "jpeg", progressive=True), (4096, 3072)),
        "a long PNG": (file_of(panorama, "png"), (6_000, 500)),
    }
    for name, (file, size) in cases.items():
        stored = await pixels(service, (await sent(service, member, file))["url"])
        assert stored.size == size, name
        corners = [(0, 0), (size[0] - 1, size[1] - 1)]
        shades = [(227, 177, 152)] * 2 if "clear" in name else [(0, 0, 0), (255, 255, 255)]
        for corner, shade in zip(corners, shades, strict=True):
            found: Any = stored.convert("RGB").getpixel(corner)
            assert max(abs(a - b) for a, b in zip(found, shade, strict=True)) <= 2, (name, corner, found)


@pytest.mark.slow
async def test_an_upload_is_read_counted_repeated_and_deleted_by_its_account_alone(
    service: TestService, member: Member
) -> None:
    file, once = file_of(PHOTO, "png"), member.a | {"Idempotency-Key": "k1"}
    first = await send(service, once, file)
    image = first.json()
    path = f"/v1/images/{image['id']}"
    assert (first.status_code, first.headers["location"]) == (201, path)
    assert image["size_bytes"] == len((await service.client.get(image["url"])).content)
    again = await send(service, once, file)
    assert (again.headers["idempotency-replayed"], again.json()) == ("true", image)
    refused(await send(service, once, png_of((8, 8))), 409, "idempotency_conflict")
    same = await sent(service, member, file_of(PHOTO, "webp", lossless=True))
    assert (same["id"], same["created_at"]) == (image["id"], image["created_at"]), "it is known by its pixels"
    assert len(objects(service, member)) == 1
    read = (await service.client.get(path, headers=member.b)).json()
    assert {**read, "url": ""} == {**same, "url": ""}

    other = await service.member()
    refused(await service.client.get(path, headers=other.a), 404, "not_found")
    refused(await service.client.delete(path, headers=other.a), 404, "not_found")
    _, kept = await service.resources.api_keys.create(member.account.id, interfaces=ALL, adapters=frozenset({LORA}))
    refused(await service.client.delete(path, headers=Member(member.account, kept).a), 403, "forbidden")

    assert (await service.client.delete(path, headers=member.b)).status_code == 204
    for gone in (await service.client.get(path, headers=member.a), await service.client.delete(path, headers=member.a)):
        refused(gone, 404, "not_found")
    assert objects(service, member) == []
    assert (await service.client.get(image["url"])).status_code == 404
    assert [(row.act, row.subject) for row in await service.resources.audit.rows(member.account.id)] == [
        ("image_deleted", image["id"])
    ]
    with plain_redis(service.resources.redis_url) as redis:
        assert not [name for name in redis.scan_iter(match=f"*{image['id']}*") if "deletions" not in name]
        assert not [*redis.scan_iter(match=f"*upload*{member.account.id}*")]


async def test_a_form_that_has_no_picture_is_refused_before_a_process_starts(
    service: TestService, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_exists = Path.exists

    def exists_off_the_loop(path: Path) -> bool:
        assert threading.current_thread() is not threading.main_thread(), f"{path}: asked for on the event loop"
        return real_exists(path)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "exists", exists_off_the_loop)
        refused(await send(service, member.a, b""), 400, "invalid_parameter", "file: is required")
    refused(await send(service, member.a, b"", name=b"x"), 400, "invalid_parameter", "the fields are file")
    large = await send(service, member.a, bytes(MAX_FILE + 1))
    refused(large, 413, "payload_too_large", f"The file must be at most {MAX_FILE} bytes")
    form = await service.client.post("/v1/images", headers=member.a, content=b"x")
    refused(form, 415, "unsupported_media_type", "multipart/form-data")


@pytest.mark.slow
async def test_uploads_have_a_limit_expire_and_go_with_their_account(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_image_bytes_per_account": LEAST_COUNTED, "retention": timedelta(days=3)}
    async with open_service(tmp_path, **options) as service:
        member, resources = await service.member(), service.resources
        image = await sent(service, member, png_of((8, 8)))
        full = await send(service, member.a, png_of((8, 16)))
        refused(full, 409, "image_quota_exceeded", f"may store {LEAST_COUNTED} bytes of uploaded images")
        assert len(objects(service, member)) == 1
        lasts = datetime.fromisoformat(image["expires_at"]) - datetime.fromisoformat(image["created_at"])
        assert lasts in (timedelta(days=3), timedelta(days=3, seconds=1))
        await due(resources, timedelta(days=3, minutes=-1))
        assert (await service.client.get(f"/v1/images/{image['id']}", headers=member.a)).status_code == 200
        await resources.account_deletion.delete(member.account, Actor("test"))
        assert objects(service, member) == []
        late = await resources.uploaded.add(
            stored_image("file:///x.png"), account=member.account.id, user="x", lasts=timedelta(days=1)
        )
        assert late == ("closed", ""), "a request that was under way leaves nothing behind"
        assert await resources.account_records.left(member.account.id) == []
        with plain_redis(resources.redis_url) as redis:
            assert [*redis.scan_iter(match="*upload*")] == []


@pytest.mark.slow
async def test_a_job_takes_an_uploaded_picture_and_interface_a_does_not(service: TestService, member: Member) -> None:
    image, other = await sent(service, member, file_of(PHOTO, "png")), await service.member()
    body = {"kind": "upscale", "image_id": image["id"]}
    answer = await service.client.post("/v1/jobs", json=body, headers=member.b)
    assert answer.status_code == 202, answer.text
    path = f"/v1/images/{image['id']}"
    refused(await service.client.delete(path, headers=member.b), 409, "job_unfinished", answer.json()["id"])
    job = await service.complete(answer.json()["id"])
    assert (job.images[0].width, job.images[0].height) == (2 * PHOTO.width, 2 * PHOTO.height)
    for wish in ({"kind": "upscale"}, {"prompt": "a boat", "steps": 2}):  # what is made of it is marked as a composite
        made_of_it = {**wish, "image_id": job.images[0].image_id}
        later = (await service.client.post("/v1/jobs", json=made_of_it, headers=member.b)).json()
        assert existing((await job_of(service.resources, later["id"])).request).from_upload, wish
    refused(await service.client.post("/v1/jobs", json=body, headers=other.b), 404, "not_found")
    of_a = await service.client.post("/v1/upscale", json={"image_id": image["id"]}, headers=member.a)
    refused(of_a, 404, "not_found")
    assert (await service.client.delete(path, headers=member.a)).status_code == 204
    refused(await service.client.post("/v1/jobs", json=body, headers=member.b), 404, "not_found")


async def test_an_image_of_a_job_has_an_address_for_as_long_as_it_is_there(
    service: TestService, member: Member
) -> None:
    job = await service.complete(await service.submit(member))
    image_id, other = job.images[0].image_id, await service.member()
    path, of_the_job = f"/v1/images/{image_id}", f"/v1/jobs/{job.id}"
    image = (await service.client.get(path, headers=member.b)).json()
    assert (image["job_id"], image["sha256"]) == (job.id, job.images[0].sha256)
    assert (await service.client.get(image["url"])).content == await service.resources.images.get(
        job.images[0].image_uri
    )
    refused(await service.client.get(path, headers=other.a), 404, "not_found")
    refused(await service.client.delete(path, headers=member.a), 404, "not_found", f"Job {job.id} made this image")
    larger = (await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=member.a)).json()
    for needed in (of_the_job, f"{of_the_job}/images/{image_id}"):
        refused(await service.client.delete(needed, headers=member.a), 409, "job_unfinished", larger["request_id"])
    await service.client.post(f"/v1/jobs/{larger['request_id']}/cancel", headers=member.a)
    assert (await service.client.delete(of_the_job, headers=member.a)).status_code == 204


async def due(resources: Resources, after: timedelta) -> None:
    """Remove the uploads that nothing needs after that time, as the housekeeper does."""
    while await Deletions(resources.process.redis, resources.images, rewrite=later(after)).remove_due_uploads():
        pass


async def listed(service: TestService, member: Member, limit: int = 50) -> list[str]:
    """The ids of all pages, newest first."""
    ids, query = list[str](), f"limit={limit}"
    while True:
        page = (await service.client.get(f"/v1/images?{query}", headers=member.b)).json()
        assert len(page["images"]) <= limit
        ids += [image["id"] for image in page["images"]]
        if "next_cursor" not in page:
            return ids
        query = f"limit={limit}&cursor={page['next_cursor']}"


@pytest.mark.slow
async def test_pictures_are_listed_by_pages_and_those_of_the_version_before_stay_as_they_are(
    service: TestService, member: Member
) -> None:
    records = [await sent(service, member, png_of((8, side))) for side in (8, 16, 24)]
    ids = [record["id"] for record in reversed(records)]
    assert [await listed(service, member, limit) for limit in (1, 2, 3)] == [ids] * 3
    assert await listed(service, await service.member()) == []
    bad = await service.client.get("/v1/images?cursor=1-gen_x", headers=member.a)
    refused(bad, 400, "invalid_parameter", "cursor: ")

    resources, before = service.resources, records[0]["id"]
    with plain_redis(resources.redis_url) as redis:  # as the version before left it
        redis.hset(redis_key("upload", before), "day", 30_000)
        redis.pexpire(redis_key("upload", before), 86_400_000)
        redis.delete(redis_key("image_uses", before))
        redis.delete(redis_key("upload_of", member.account.id, records[0]["sha256"]))
        for index in (redis_key("uploads", member.account.id), redis_key("uploads_due")):
            redis.zrem(index, before)
        counted = redis_key("uploaded", member.account.id)
        redis.hset(counted, mapping={"30000": LEAST_COUNTED, "99999999": 2 * LEAST_COUNTED})
        await due(resources, timedelta(hours=1))
        assert await listed(service, member) == ids[:2]
        assert (await service.client.get(f"/v1/images/{before}", headers=member.a)).json()["id"] == before
        body = {"kind": "upscale", "image_id": before}
        job = (await service.client.post("/v1/jobs", json=body, headers=member.a)).json()
        refused(await service.client.delete(f"/v1/images/{before}", headers=member.a), 409, "job_unfinished")
        await service.client.post(f"/v1/jobs/{job['id']}/cancel", headers=member.a)
        assert (await service.client.delete(f"/v1/jobs/{job['id']}", headers=member.a)).status_code == 204
        for image_id in ids:
            assert (await service.client.delete(f"/v1/images/{image_id}", headers=member.a)).status_code == 204
        assert not redis.exists(counted)
    assert (await listed(service, member), objects(service, member)) == ([], [])


@pytest.mark.slow
async def test_a_picture_that_was_brought_goes_with_the_last_job_that_needs_it(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        member, resources, uploads = await service.member(), service.resources, service.resources.for_jobs.uploads
        key = await resources.auth.authenticate(member.key, Variant.A, counted=False)
        caller, hold = existing(key.caller), Hold()

        async def bring(side: int) -> str:
            """Bring a picture by a call that then crashes."""
            file = tmp_path / "file"
            file.write_bytes(png_of((8, side)))
            async with AsyncExitStack() as place:
                return (await uploads.add(caller, file, place=place, hold=hold)).upload.image.image_id

        async def enlarge(image_id: str) -> str:
            body = {"kind": "upscale", "image_id": image_id}
            return (await service.client.post("/v1/jobs", json=body, headers=member.a)).json()["id"]

        lost, brought, kept = [await bring(side) for side in (8, 16, 24)]
        assert (await sent(service, member, png_of((8, 24))))["id"] == kept, "it is now there on purpose"
        jobs = [await enlarge(image_id) for image_id in (brought, brought, kept)]
        await due(resources, HELD_FOR)
        assert await listed(service, member) == [kept, brought], "without a job it went"
        await due(resources, 2 * HELD_FOR)  # the jobs have not ended
        for job_id in jobs:
            await service.complete(job_id)
        await due(resources, 4 * HELD_FOR)  # the jobs' records are still there
        assert await bring(16) == brought
        assert await listed(service, member) == [kept, brought]
        assert (await service.client.delete(f"/v1/jobs/{jobs[0]}", headers=member.a)).status_code == 204
        await resources.uploaded.let_go(brought, hold.name)
        await due(resources, timedelta())
        assert await listed(service, member) == [kept, brought]
        for job_id in jobs[1:]:
            assert (await service.client.delete(f"/v1/jobs/{job_id}", headers=member.a)).status_code == 204
        assert await listed(service, member) == [kept]
        again = await bring(16)
        await service.complete(await enlarge(again))
        await due(resources, resources.settings.retention + timedelta(hours=1))
        assert await listed(service, member) == []
        await remove_listed_objects(resources.deletions, resources.images, lease=timedelta(hours=1))
        left = {path.parent.name for path in objects(service, member)}
        assert not any(name.startswith("img_") for name in left), lost
        with plain_redis(resources.redis_url) as redis:
            assert [*redis.scan_iter(match="*upload*")] == []
