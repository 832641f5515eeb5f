"""Marks pictures as an operator's settings say: XMP, a signed manifest of C2PA, and a watermark."""

from collections.abc import Callable
from datetime import UTC, datetime
from io import BytesIO

from PIL import Image

from serve_app.domain.requests import ImageFormat
from serve_app.marking.certificates import BadMarking, CertificateEnded, Credentials, read_credentials
from serve_app.marking.credentials import read_manifest, signed
from serve_app.marking.watermark import LEAST_SIDE, Pixels, Watermark
from serve_app.marking.xmp import SourceType, packet
from serve_app.settings import Settings

MARKS = ("xmp", "c2pa", "watermark")
"""What a marked picture has, as records of jobs name it; a small one is without a watermark."""

Encode = Callable[[Pixels, str], bytes]
"""Writes pixels and an XMP packet as a file."""


class Marker:
    """Marks the pictures of one operator. Any thread may call it."""

    def __init__(self, settings: Settings, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Read the certificate, and try it. Raises `BadMarking` where it cannot sign, or not today."""
        self._settings, self._clock = settings, clock
        self._watermark = Watermark(settings.watermark_key)
        self._credentials = usable_credentials(settings)

    @property
    def has_ended(self) -> bool:
        """Whether the certificate has ended, so that nothing can be marked by it."""
        return self._clock() > self._credentials.ends

    def renew(self) -> None:
        """Read the files again where the certificate has ended. Raises `CertificateEnded` while they hold no other."""
        if self.has_ended:
            try:
                self._credentials = usable_credentials(self._settings)
            except BadMarking as error:
                raise CertificateEnded(error.message) from error

    def mark(self, pixels: Pixels, form: ImageFormat, source: SourceType, encode: Encode) -> bytes:
        """Return the file of a picture with every mark; only its pixels are the same each time. Raises `BadMarking`."""
        self.renew()
        content = encode(self._watermark.added_to(pixels), packet(source))
        return signed(content, form.media_type, source, self._credentials)


def marks_of(width: int, height: int) -> tuple[str, ...]:
    """Return the marks of a picture of this size."""
    return MARKS if min(width, height) >= LEAST_SIDE else MARKS[:2]


def usable_credentials(settings: Settings) -> Credentials:
    """Return the operator's certificate, with which a picture was signed to try it. Raises `BadMarking`."""
    found, out = read_credentials(*settings.marking_files), BytesIO()
    Image.new("RGB", (8, 8)).save(out, "png")
    read = read_manifest(signed(out.getvalue(), "image/png", SourceType.GENERATED, found), "image/png")
    if read is None or read["state"] not in ("Valid", "Trusted"):
        problems = ", ".join(read["problems"]) if read else "nothing was signed"
        raise BadMarking(f"ATELIER_MARKING_CERTIFICATE: {settings.marking_files[0]} is not one for C2PA: {problems}")
    return found
