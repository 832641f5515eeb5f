"""Schemathesis against the served application: every check, on what each document promises."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from serve_app.domain.requests import Variant
from serve_app.stores.embedded import stop_redis
from tests.api.house import house_settings
from tests.live import live_service

EXAMPLES = 10

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True, slots=True)
class Served:
    """The application at an address, a worker that completes what is asked for, and a key for both interfaces."""

    base_url: str
    key: str

    def header(self, variant: Variant) -> str:
        return f"Authorization: Bearer {self.key}" if variant is Variant.A else f"X-API-Key: {self.key}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = house_settings(tmp_path_factory.mktemp("served"), [], max_queued_per_account=100_000)
    with live_service(settings) as live:
        _, key = live.member(plan_a="roomy", plan_b="roomy")
        yield Served(live.base_url, key)
    stop_redis(settings.data_dir)


def schemathesis(served: Served, document: str, variant: Variant, folder: Path, *options: str) -> str:
    """Run every check on a document; what it printed, with an empty first line when all passed."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", document),
        *("--url", served.base_url, "--header", served.header(variant)),
        *("--checks", "all", "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"),
        *("--generation-database", "none", "--request-timeout", "30"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


@pytest.mark.parametrize("variant", Variant)
def test_the_service_keeps_what_its_document_promises(served: Served, variant: Variant, tmp_path: Path) -> None:
    failures = schemathesis(served, f"{served.base_url}/openapi/{variant}.json", variant, tmp_path)
    assert not failures, failures


def test_the_jobs_room_keeps_what_its_document_promises(served: Served, tmp_path: Path) -> None:
    """The document names two credentials, of which schemathesis may send both: refused, and rightly so."""
    document = f"{served.base_url}/openapi/jobs.json"
    options = ("--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing")
    failures = schemathesis(served, document, Variant.A, tmp_path, *options)
    assert not failures, failures


def test_a_document_that_promises_more_is_found_out(served: Served, tmp_path: Path) -> None:
    """The checks can fail: here the document allows a guidance that the service does not."""
    document = httpx.get(f"{served.base_url}/openapi/b.json").json()
    document["components"]["schemas"]["GenerationRequest"]["properties"]["guidance"]["maximum"] = 30
    path = tmp_path / "b.json"
    path.write_text(json.dumps(document))
    options = ("--phases", "coverage", "--include-path", "/v1/generate")
    assert "Schema-valid request rejected" in schemathesis(served, str(path), Variant.B, tmp_path, *options)
