"""Converts a picture's colours to sRGB, from its ICC profile or from what a PNG says of its primaries and its curve."""

import re
import struct
from collections.abc import Sequence
from io import BytesIO
from itertools import chain, product
from typing import Any, cast

from PIL import Image, ImageCms

Point = tuple[float, float]
"""The x and y of a colour (CIE 1931)."""

_D65: Point = (0.3127, 0.329)
_SRGB: Sequence[Point] = ((0.64, 0.33), (0.3, 0.6), (0.15, 0.06), _D65)
PRIMARIES: dict[int, Sequence[Point]] = {
    1: _SRGB,
    9: ((0.708, 0.292), (0.17, 0.797), (0.131, 0.046), _D65),
    11: ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06), (0.314, 0.351)),
    12: ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06), _D65),
}
"""Red, green, blue and white by their numbers in ITU-T H.273, table 2."""
_SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_BT709_CURVE = (1 / 0.45, 1 / 1.099, 0.099 / 1.099, 1 / 4.5, 0.081)
CURVES: dict[int, Sequence[float]] = {
    **dict.fromkeys((1, 6, 14, 15), _BT709_CURVE), 4: (2.2,), 5: (2.8,), 8: (1.0,), 13: _SRGB_CURVE
}  # fmt: skip
"""Parameters of ICC's parametric curves (ICC.1:2022, 10.18) by the numbers of H.273, table 3."""
_PQ, _HLG = 16, 18
_PNG_SRGB_GAMMA = 0.45455
_BRADFORD = ((0.8951, 0.2664, -0.1614), (-0.7502, 1.7135, 0.0367), (0.0389, -0.0685, 1.0296))
_D50 = (0.9642, 1.0, 0.8249)
_CICP = re.compile(rb"\x00\x00\x00\x04cICP(....)", re.DOTALL)
_CUBE = bytes(value for colour in product(range(0, 256, 15), repeat=3) for value in colour)


class HighDynamicRange(Exception):
    """A picture whose numbers mean more light than sRGB has, or are those of video."""


def profile_of(image: Image.Image, content: bytes) -> bytes | None:
    """Return the ICC profile that a picture's file has or describes; None where it says sRGB or nothing.

    In a PNG, cICP counts before iCCP, sRGB, gAMA and cHRM (PNG, third edition, 4.3). Raises `HighDynamicRange`.
    """
    cicp = _CICP.search(content, 0, max(0, content.find(b"IDAT"))) if image.format == "PNG" else None
    if cicp is not None:
        primaries, curve, matrix, is_full = cicp[1]
        if curve in (_PQ, _HLG) or matrix or not is_full:
            raise HighDynamicRange
        if primaries in PRIMARIES and curve in CURVES:
            return _made_profile(PRIMARIES[primaries], CURVES[curve])
    info: Any = image.info
    if info.get("icc_profile"):
        return info["icc_profile"]
    gamma, numbers = info.get("gamma"), info.get("chromaticity")
    if image.format != "PNG" or "srgb" in info or not (gamma or numbers):
        return None
    white, *colours = [numbers[i : i + 2] for i in range(0, 8, 2)] if numbers else (_D65, *_SRGB[:3])
    told, srgb = (gamma, *white, *chain(*colours)), (_PNG_SRGB_GAMMA, *_D65, *chain(*_SRGB[:3]))
    if gamma and all(abs(one - other) < 0.001 for one, other in zip(told, srgb, strict=True)):
        return None  # many programs write this and mean sRGB
    return _made_profile((*colours, white), (1 / gamma,) if gamma else _SRGB_CURVE)


def to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Return a picture of mode L, LA, RGB, RGBA or CMYK in sRGB, in grey where it was; it may be the same object.

    It stays as it is where its profile cannot be read or is of other pictures, and where it means the same as sRGB but
    for rounding.
    """
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if image.mode in ("L", "LA"):
            return _grey_to_srgb(image, source)
        cube = Image.frombytes("RGB", (len(_CUBE) // 3, 1), _CUBE)
        if image.mode != "CMYK" and _is_same(_CUBE, _transformed(cube, source).tobytes()):
            return image
        return _transformed(image, source, in_place=image.mode != "CMYK")
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        return image


def _grey_to_srgb(image: Image.Image, source: ImageCms.ImageCmsProfile) -> Image.Image:
    ramp, profile = bytes(range(256)), cast(Any, source.profile)
    mode = "L" if profile.xcolor_space.strip() == "GRAY" else "RGB"
    shown = _transformed(Image.frombytes("L", (256, 1), ramp).convert(mode), source)
    table = shown.getchannel("G").tobytes()
    return image if _is_same(ramp, table) else image.point([*table, *ramp][: 256 * len(image.getbands())])


def _transformed(image: Image.Image, source: ImageCms.ImageCmsProfile, *, in_place: bool = False) -> Image.Image:
    target, mode = ImageCms.createProfile("sRGB"), image.mode if image.mode == "RGBA" else "RGB"
    transform = ImageCms.buildTransform(source, target, image.mode, mode)
    return ImageCms.applyTransform(image, transform, inPlace=in_place) or image


def _is_same(one: bytes, other: bytes) -> bool:
    return all(abs(a - b) <= 1 for a, b in zip(one, other, strict=True))


def _made_profile(points: Sequence[Point], curve: Sequence[float]) -> bytes | None:
    """Return an ICC profile of red, green, blue and white, and a parametric curve; None where they are no colours."""
    import numpy as np  # here, since few pictures need it

    try:
        columns = np.array([(x / y, 1.0, (1 - x - y) / y) for x, y in points]).T
        primaries, white = columns[:, :3], columns[:, 3]
        bradford = np.array(_BRADFORD)
        adapted = np.linalg.solve(bradford, ((bradford @ _D50) / (bradford @ white))[:, None] * bradford)
        colorants = adapted @ (primaries * np.linalg.solve(primaries, white))
        curves = b"para\0\0\0\0" + struct.pack(">HH", {1: 0, 5: 3}[len(curve)], 0) + _fixed(curve)
        tags = {b"wtpt": b"XYZ \0\0\0\0" + _fixed(_D50)}
        for name, column in zip((b"r", b"g", b"b"), colorants.T.tolist(), strict=True):
            tags |= {name + b"XYZ": b"XYZ \0\0\0\0" + _fixed(column), name + b"TRC": curves}
    except (ZeroDivisionError, np.linalg.LinAlgError, struct.error, OverflowError, ValueError):
        return None
    at = 132 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", at + len(data), len(tag))
        data += tag
    head = struct.pack(">IxxxxI", at + len(data), 0x04300000) + b"mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28)
    return head + _fixed(_D50) + bytes(48) + table + data


def _fixed(numbers: Sequence[float]) -> bytes:
    """Return numbers as ICC's s15Fixed16."""
    return struct.pack(f">{len(numbers)}i", *(round(number * 65536) for number in numbers))
