"""`atelier marking init`, `atelier verify`, and what the doctor says of marking."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from serve_app.marking.certificates import make_for_development
from serve_app.worker.image_files import encode_png
from tests.cli.conftest import Atelier
from tests.marking.test_watermark import MARK, photo
from tests.support import free_port


def test_a_development_certificate_says_what_it_is(atelier: Atelier) -> None:
    made = atelier("marking", "init")
    assert made.code == 0, made.err
    assert "nobody trusts them" in made.out
    again = atelier("marking", "init")
    assert (again.code, "is there already" in again.err) == (1, True)
    found = doctor(atelier)
    assert (found["level"], "trusted by nobody" in found["found"]) == ("warn", True)


def test_the_doctor_names_a_certificate_that_does_not_sign(atelier: Atelier) -> None:
    assert "atelier marking init" in doctor(atelier)["found"]
    certificate, key = atelier.settings.marking_files
    make_for_development(certificate, key, ends=datetime.now(UTC) - timedelta(days=1))
    found = doctor(atelier)
    assert (found["level"], "certificate.pem has expired" in found["found"]) == ("fail", True)


def doctor(atelier: Atelier) -> dict[str, str]:
    env = {"ATELIER_MARK_IMAGES": "true"}
    rows = json.loads(atelier("doctor", "--json", "--port", str(free_port()), env=env).out)["checks"]
    return next(row for row in rows if row["name"] == "marking")


def test_files_are_verified_each_for_itself(atelier: Atelier, tmp_path: Path) -> None:
    good, text = tmp_path / "good.png", tmp_path / "text.png"
    good.write_bytes(encode_png(MARK.added_to(photo(256, 256))))
    text.write_text("hello")
    ended = atelier("verify", str(good), str(text), str(tmp_path), str(tmp_path / "nothing"))
    assert ended.code == 1
    for words in (f"{text}: is no PNG, JPEG or WebP", f"{tmp_path}: is no file", "nothing: there is no such file"):
        assert words in ended.out
    assert "PNG, 256 × 256 pixels" in ended.out
    assert "not looked for" in ended.out, "no service has made its secrets here"
    (found,) = atelier.json("verify", str(good))["files"]
    assert (found["has_watermark"], found["manifest"], found["settings"]) == (None, None, {})
    secret = {"ATELIER_WATERMARK_SECRET": "another operator's secret"}
    assert "not found: score" in atelier("verify", str(good), env=secret).out
