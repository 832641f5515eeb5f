"""A marked file says by each of its marks how it was made; what is wrong with a mark or a certificate is told."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path

import c2pa
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from PIL import Image

from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import GenerationRequest, ImageFormat, LoraUse
from serve_app.marking import credentials, reading
from serve_app.marking.certificates import LIFE, BadMarking, make_for_development, read_credentials
from serve_app.marking.credentials import read_manifest
from serve_app.marking.drawing_texts import A1111, INVOKEAI, drawing_texts
from serve_app.marking.marker import Marker, usable_credentials
from serve_app.marking.reading import LONGEST_TEXT, MAX_FILE_BYTES, FoundMarks, read, shown_marks
from serve_app.marking.xmp import SourceType
from serve_app.settings import Settings
from serve_app.worker.image_files import encode
from tests.api.test_images import of_many_scans, png
from tests.marking.test_watermark import photo

PICTURE = photo(256, 320)
ENDED = Path(__file__).with_name("signed_until_2026-11-28.jpg")
PROVENANCE = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:dcterms="http://purl.org/dc/terms/" dcterms:provenance="{}"/></rdf:RDF></x:xmpmeta>'
)
"""XMP that says where a file's manifest is."""
DRAWN = GenerationRequest(
    prompt="ein Café, 茶", negative_prompt="red", base_model="pocket", sampler="dpm++2m-karras", seeds=(3, 0),
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
        "CFG scale: 7.5, Skip Early CFG: 0.2, Guidance end: 0.5, Seed: 0, Size: 512x512, Model: pocket, Version: Atelier"
    )
    if form is ImageFormat.PNG:
        invoke = json.loads(told.settings[INVOKEAI])
        assert (invoke["seed"], invoke["scheduler"], invoke["positive_prompt"]) == (0, "dpmpp_2m_k", "ein Café, 茶")


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


def test_a_file_whose_certificate_has_ended_since_is_told_apart_from_a_changed_one(tmp_path: Path) -> None:
    content = bytearray(ENDED.read_bytes())
    told = found(tmp_path, bytes(content))
    assert told.manifest is not None
    assert (told.manifest["state"], told.manifest["problems"]) == ("Ended", ["signingCredential.expired"])
    assert "Ended: signed by a certificate that has ended since" in dict(shown_marks(told))["C2PA"]
    content[-50] ^= 1
    told = found(tmp_path, bytes(content))
    assert told.manifest is not None
    problems = ["signingCredential.expired", "assertion.dataHash.mismatch"]
    assert (told.manifest["state"], told.manifest["problems"]) == ("Invalid", problems)


def test_a_manifest_at_an_address_is_not_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/manifest.c2pa"
        told = found(tmp_path, encode(PICTURE, ImageFormat.JPEG, xmp=PROVENANCE.format(address)))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert told.manifest is not None
    assert (told.manifest["state"], told.manifest["problems"]) == ("Elsewhere", [address])


def test_a_manifest_of_many_problems_names_each_once_and_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ENDED.read_bytes()
    for part in (b"softwareAgent", b"jumbf manifest"):  # of two assertions, each of which no longer has its hash
        changed = changed.replace(part, part.swapcase())
    told = read_manifest(changed, "image/jpeg")
    assert told is not None
    assert told["problems"] == ["signingCredential.expired", "assertion.hashedURI.mismatch"]
    monkeypatch.setattr(credentials, "MOST_PROBLEMS", 1)
    told = read_manifest(changed, "image/jpeg")
    assert told is not None
    assert told["problems"] == ["signingCredential.expired"]


def test_without_the_library_it_is_named_and_nothing_breaks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = marked(settings, ImageFormat.PNG)
    monkeypatch.setitem(sys.modules, "c2pa", None)
    told = read_manifest(content, "image/png")
    assert told is not None
    assert (told["state"], "the library c2pa-python cannot be loaded" in told["problems"][0]) == ("Unread", True)
    with pytest.raises(BadMarking, match="ATELIER_MARK_IMAGES: the library c2pa-python cannot be loaded"):
        usable_credentials(settings)


WEBP_OF_50_MEGAPIXELS = bytes.fromhex(
    "5249464626000000574542505650384c190000002f47dc1117075081540820000a1a02495bbced8f8f88e87f0000"
)
"""Its decoder takes 16 bytes a pixel."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (lambda: b"hello", "is no PNG, JPEG or WebP"),
        (lambda: encode(PICTURE, ImageFormat.PNG)[:5000], "is damaged or incomplete"),
        (lambda: png(10_000, 10_000), "has 10000 × 10000 pixels"),  # without their bytes: it is not decoded
        (lambda: WEBP_OF_50_MEGAPIXELS, "takes more than 768 MiB of memory"),
        (lambda: of_many_scans(Image.new("L", (1024, 1024))), "takes more than 1 s of a processor"),
        (lambda: bytes(MAX_FILE_BYTES + 1), "has more than 64 MB"),
    ],
    ids=["a text", "half a file", "100 megapixels", "much memory", "much time", "much data"],
)
def test_what_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Callable[[], bytes], refusal: str
) -> None:
    monkeypatch.setattr(reading, "READ_LIMIT_S", 1.0 if "processor" in refusal else 60.0)
    with pytest.raises(InvalidParameter, match=refusal):
        found(tmp_path, content())


def test_texts_of_strangers_hold_nothing_that_a_terminal_obeys_and_are_cut(tmp_path: Path) -> None:
    texts = {A1111: "a\x1b[2J\tb\r" + "c" * LONGEST_TEXT}
    told = found(tmp_path, encode(PICTURE, ImageFormat.PNG, texts=texts, xmp='DigitalSourceType="\x1bc"'))
    assert told.settings[A1111] == "a\ufffd[2J b " + "c" * (LONGEST_TEXT - 8)
    assert told.source_type == "\ufffdc"


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
    tomorrow = tmp_path / "tomorrow.pem", tmp_path / "tomorrow-key.pem"
    make_for_development(*tomorrow, ends=datetime.now(UTC) + LIFE + timedelta(days=1))
    assert "tomorrow.pem is not valid yet" in refusal(*tomorrow)
    own_ca = tmp_path / "ca.pem"
    own_ca.write_text(certificate.read_text().partition("-----END CERTIFICATE-----\n")[2])
    assert "it cannot sign: Signature: the certificate was self-signed" in refusal(own_ca, key)
    with pytest.raises(FileExistsError, match="remove it first"):
        make_for_development(certificate, key)
    assert usable_credentials(settings).is_development
    for form in ("EC PRIVATE KEY", "PRIVATE KEY"):  # as openssl writes it, and in PKCS#8
        private = load_pem_private_key(key.read_bytes(), None)
        kind = PrivateFormat.TraditionalOpenSSL if "EC" in form else PrivateFormat.PKCS8
        key.write_bytes(private.private_bytes(Encoding.PEM, kind, NoEncryption()))
        assert f"BEGIN {form}" in key.read_text()
        assert usable_credentials(settings).algorithm == "es256"
    issued = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    assert read_credentials(certificate, key).ends == issued
