"""A marked file says by each of its marks how it was made; what is wrong with a mark, or with a certificate, is told."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import c2pa
import numpy as np
import pytest
from cryptography import x509
from PIL import Image

from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import GenerationRequest, ImageFormat, LoraUse
from serve_app.marking.certificates import BadMarking, make_for_development, read_credentials
from serve_app.marking.drawing_texts import A1111, INVOKEAI, drawing_texts
from serve_app.marking.marker import Marker, usable_credentials
from serve_app.marking.reading import FoundMarks, read
from serve_app.marking.xmp import SourceType
from serve_app.settings import Settings
from serve_app.worker.image_files import encode
from tests.marking.test_watermark import photo

PICTURE = photo(256, 320)
DRAWN = GenerationRequest(
    prompt="ein Café, 茶", negative_prompt="red", base_model="pocket", sampler="dpm++2m-karras", seeds=(3, 4),
    loras=(LoraUse("model_x", 0.8),), guidance_start=0.2, guidance_end=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    made = Settings(data_dir=tmp_path_factory.mktemp("operator"), mark_images=True)
    make_for_development(*made.marking_files)
    return made


def marked(settings: Settings, form: ImageFormat, source: SourceType = SourceType.GENERATED) -> bytes:
    texts = drawing_texts(DRAWN, 1, "Atelier")
    return Marker(settings).mark(PICTURE, form, source, lambda pixels, xmp: encode(pixels, form, texts=texts, xmp=xmp))


def found(folder: Path, content: bytes, key: bytes | None = None) -> FoundMarks:
    (folder / "file").write_bytes(content)
    return asyncio.run(read(folder / "file", folder / "luminance", key))


@pytest.mark.parametrize(("form", "source"), [*zip(ImageFormat, [*SourceType, SourceType.GENERATED], strict=True)])
def test_each_mark_is_read_from_each_format(
    settings: Settings, tmp_path: Path, form: ImageFormat, source: SourceType
) -> None:
    content = marked(settings, form, source)
    with c2pa.Reader(form.media_type, BytesIO(content)) as reader:
        store = json.loads(reader.json())
        assert reader.get_validation_state() == "Valid"
    assert source.uri in json.dumps(store)
    assert "thumbnail" not in json.dumps(store)
    told = found(tmp_path, content, settings.watermark_key)
    assert (told.format, told.width, told.height) == (form.upper(), 256, 320)
    assert told.source_type == source
    assert told.manifest is not None
    assert told.manifest["source_type"] == source
    assert (told.manifest["state"], told.manifest["problems"]) == ("Valid", [])
    assert told.manifest["signer"].startswith("Development signer, Atelier development")
    assert told.has_watermark
    assert told.settings[A1111] == (
        "ein Café, 茶 <lora:model_x:0.8>\nNegative prompt: red\nSteps: 30, Sampler: DPM++ 2M, Schedule type: Karras, "
        "CFG scale: 7.5, Skip Early CFG: 0.2, Guidance end: 0.5, Seed: 4, Size: 512x512, Model: pocket, Version: Atelier"
    )
    if form is ImageFormat.PNG:
        invoke = json.loads(told.settings[INVOKEAI])
        assert (invoke["seed"], invoke["scheduler"], invoke["positive_prompt"]) == (4, "dpmpp_2m_k", "ein Café, 茶")


def test_the_pixels_are_the_same_each_time_and_the_signature_is_not(settings: Settings) -> None:
    first, again = (marked(settings, ImageFormat.PNG) for _ in range(2))
    assert first != again
    pixels = [np.asarray(Image.open(BytesIO(each))) for each in (first, again)]
    assert np.array_equal(pixels[0], pixels[1])


def test_a_changed_file_is_invalid_and_a_copy_keeps_the_watermark_alone(settings: Settings, tmp_path: Path) -> None:
    content = bytearray(marked(settings, ImageFormat.JPEG))
    content[-300] ^= 1
    told = found(tmp_path, bytes(content))
    assert told.manifest is not None
    assert (told.manifest["state"], told.manifest["problems"]) == ("Invalid", ["assertion.dataHash.mismatch"])
    assert told.has_watermark is None, "nobody looked for it"
    copy = BytesIO()
    Image.open(BytesIO(content)).save(copy, "jpeg", quality=80)
    told = found(tmp_path, copy.getvalue(), settings.watermark_key)
    assert (told.source_type, told.manifest, told.settings, told.has_watermark) == ("", None, {}, True)
    assert found(tmp_path, copy.getvalue(), b"another operator's").has_watermark is False


def bomb() -> bytes:
    out = BytesIO()
    Image.new("1", (10_000, 10_000)).save(out, "png")
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (lambda: b"hello", "is no PNG, JPEG or WebP"),
        (lambda: encode(PICTURE, ImageFormat.PNG)[:5000], "is damaged or incomplete"),
        (bomb, "has 10000 × 10000 pixels"),
    ],
    ids=["a text", "half a file", "100 megapixels"],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, content: Callable[[], bytes], refusal: str) -> None:
    with pytest.raises(InvalidParameter, match=refusal):
        found(tmp_path, content())
    with pytest.raises(InvalidParameter, match="is no file"):
        asyncio.run(read(tmp_path, tmp_path / "luminance", None))


def test_texts_of_strangers_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    told = found(
        tmp_path, encode(PICTURE, ImageFormat.PNG, texts={A1111: "a\x1b[2Jb"}, xmp='DigitalSourceType="\x1bc"')
    )
    assert (told.settings[A1111], told.source_type) == ("a\ufffd[2Jb", "\ufffdc")


def test_a_certificate_that_cannot_sign_is_told_by_name(settings: Settings, tmp_path: Path) -> None:
    def refusal(certificate: Path, key: Path) -> str:
        changed = settings.model_copy(update={"marking_certificate": certificate, "marking_key": key})
        with pytest.raises(BadMarking) as refused:
            Marker(changed)
        return refused.value.message

    certificate, key = settings.marking_files
    expired = tmp_path / "expired.pem", tmp_path / "expired-key.pem"
    make_for_development(*expired, ends=datetime.now(UTC) - timedelta(days=2))
    assert "expired.pem has expired" in refusal(*expired)
    assert "is not one for C2PA: claimSignature.mismatch" in refusal(certificate, expired[1])
    assert "atelier marking init" in refusal(tmp_path / "nothing.pem", key)
    assert "is no PEM that can be read" in refusal(key, key)
    own_ca = tmp_path / "ca.pem"
    own_ca.write_text(certificate.read_text().partition("-----END CERTIFICATE-----\n")[2])
    assert "it cannot sign: Signature: the certificate was self-signed" in refusal(own_ca, key)
    with pytest.raises(FileExistsError, match="remove it first"):
        make_for_development(certificate, key)
    assert usable_credentials(settings).is_development
    issued = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    assert read_credentials(certificate, key).ends == issued
