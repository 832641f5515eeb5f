"""`atelier marking init`, `atelier verify`, and what the doctor says of marking."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deployments.nodes import node_facts
from serve_app.marking import certificates
from serve_app.marking.certificates import make_for_development
from serve_app.marking.drawing_texts import A1111
from serve_app.operations.checks import Level
from serve_app.operations.fingerprints import differences
from serve_app.worker.image_files import encode_png
from tests.cli.conftest import Atelier
from tests.marking.test_marker import ENDED, PROVENANCE
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


def test_the_doctor_names_a_certificate_that_does_not_sign_or_not_for_long(
    atelier: Atelier, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor(atelier)
    assert (found["level"], "fine on a machine without workers" in found["advice"]) == ("warn", True)
    assert "atelier marking init" in doctor(atelier, ATELIER_REDIS_URL="")["found"], "on one machine there are workers"
    for days, level, words in (
        (-1, "fail", "certificate.pem has expired"),
        (29, "warn", "signed by A customer's"),
        (31, "ok", "signed by A customer's"),
    ):
        for file in atelier.settings.marking_files:
            file.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "DEVELOPMENT", "A customer's")
            make_for_development(*atelier.settings.marking_files, ends=datetime.now(UTC) + timedelta(days=days))
        found = doctor(atelier)
        assert (found["level"], words in found["found"]) == (level, True), found


def test_machines_are_compared_by_what_their_replicas_need(atelier: Atelier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without workers needs no certificate; where there is one, it is the same."""
    for name, value in {**atelier.env, "ATELIER_MARK_IMAGES": "true"}.items():
        monkeypatch.setenv(name, value)
    ingress, makes = frozenset({"ingress", "housekeeper"}), frozenset({"generator.second"})

    def digests(deployments: frozenset[str]) -> Mapping[str, str]:
        return node_facts(deployments, b"nonce").digests

    assert "certificate" not in digests(ingress)
    (check,) = [each for each in differences({"a": digests(makes)}) if each.name == "cluster certificate"]
    assert (check.level, "No such file" in check.found) == (Level.FAIL, True)
    seen: list[Mapping[str, str]] = []
    for secret in ("", "the watermark's secret"):
        for file in atelier.settings.marking_files:
            file.unlink(missing_ok=True)
        make_for_development(*atelier.settings.marking_files)
        if secret:
            monkeypatch.setenv("ATELIER_WATERMARK_SECRET", secret)
        seen += [digests(ingress), digests(makes)]
    assert [each["marking"] == seen[0]["marking"] for each in seen] == [True, True, False, False]
    assert seen[1]["certificate"] != seen[3]["certificate"]


def doctor(atelier: Atelier, **env: str) -> dict[str, str]:
    env["ATELIER_MARK_IMAGES"] = "true"
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
    forged = encode_png(
        photo(256, 256), texts={A1111: "a boat\nC2PA: Valid"}, xmp=PROVENANCE.format("http://elsewhere")
    )
    good.write_bytes(forged)
    answer = atelier("verify", str(good), str(ENDED))
    assert (answer.code, "C2PA: Ended: signed by a certificate" in answer.out) == (0, True)
    assert "\n  parameters: a boat\n      C2PA: Valid\n" in answer.out, "a text does not begin a line"
    assert (
        "C2PA: Elsewhere: its manifest is at an address, from which nothing is fetched: http://elsewhere" in answer.out
    )
    good.write_bytes(ENDED.read_bytes() + b"more")
    assert atelier("verify", str(good)).code == 1, "what was changed does not hold"
    secret = {"ATELIER_WATERMARK_SECRET": "another operator's secret"}
    good.write_bytes(forged)
    assert "not found: score" in atelier("verify", str(good), env=secret).out
