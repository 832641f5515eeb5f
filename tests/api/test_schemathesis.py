"""Schemathesis against the served application: every check, on what each document promises."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.house import house_settings
from tests.api.live import LiveHouse, serve_house

EXAMPLES = 10

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveHouse]:
    settings = house_settings(tmp_path_factory.mktemp("live"), [], max_queued_per_account=100_000)
    with serve_house(settings) as opened:
        yield opened


def schemathesis(live: LiveHouse, document: str, variant: Variant, folder: Path, *options: str) -> str:
    """Run every check on a document; what it printed, with an empty first line when all passed."""
    (header,) = live.member.headers(variant).items()
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", document),
        *("--url", live.base_url, "--header", ": ".join(header)),
        *("--checks", "all", "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"),
        *("--generation-database", "none", "--request-timeout", "30"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.parametrize("variant", Variant)
def test_the_service_keeps_what_its_document_promises(live: LiveHouse, variant: Variant, tmp_path: Path) -> None:
    failures = schemathesis(live, f"{live.base_url}/openapi/{variant}.json", variant, tmp_path)
    assert not failures, failures


def test_the_jobs_room_keeps_what_its_document_promises(live: LiveHouse, tmp_path: Path) -> None:
    """The document names two credentials, of which schemathesis may send both: refused, and rightly so."""
    document = f"{live.base_url}/openapi/jobs.json"
    options = ("--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing")
    failures = schemathesis(live, document, Variant.A, tmp_path, *options)
    assert not failures, failures


def test_a_document_that_promises_more_is_found_out(live: LiveHouse, tmp_path: Path) -> None:
    """The checks can fail: here the document allows a guidance that the service does not."""
    document = httpx.get(f"{live.base_url}/openapi/b.json").json()
    document["components"]["schemas"]["GenerationRequest"]["properties"]["guidance"]["maximum"] = 30
    path = tmp_path / "b.json"
    path.write_text(json.dumps(document))
    options = ("--phases", "coverage", "--include-path", "/v1/generate")
    assert "Schema-valid request rejected" in schemathesis(live, str(path), Variant.B, tmp_path, *options)
