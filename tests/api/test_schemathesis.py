"""Schemathesis against the served application: every check, on what each document promises."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.app import Member
from tests.forked import Interpreter, interpreter
from tests.live import Live

QUICK = ("--phases", "examples,coverage", "--max-examples", "5")
SWEEP = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "200")
"""The long sweep, which runs only with the mark `soak`."""
DOCUMENTS = {"a": Variant.A, "b": Variant.B, "jobs": Variant.A, "loras": Variant.A}
TWO_CREDENTIALS = ("--exclude-checks", "positive_data_acceptance")
"""A document of two credentials, of which schemathesis may send both: refused, and rightly so."""
SPECIAL = {
    "jobs": (*TWO_CREDENTIALS, "--exclude-operation-id", "addImage", "--exclude-operation-id", "followJob"),
    "loras": (*TWO_CREDENTIALS, "--exclude-operation-id", "addLora"),
}
"""Each upload would start a process that reads it: `test_loras.py` and `test_images.py` send what is wrong with one. A
stream's schema is that of its whole text, which is taken here for that of each event: `test_job_events.py` reads those."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("schemathesis")]


class Served(NamedTuple):
    base_url: str
    member: Member
    interpreter: Interpreter

    def header(self, variant: Variant) -> str:
        [row] = self.member.headers(variant).items()
        return ": ".join(row)


@pytest.fixture(scope="module")
def served(live: Live) -> Iterator[Served]:
    with interpreter(
        "import schemathesis.cli.commands.run.executor, schemathesis.engine.run.unit, werkzeug"
    ) as started:
        yield Served(live.base_url, Member(*live.member(plan_a="unlimited", plan_b="unlimited")), started)


def schemathesis(served: Served, document: str, variant: Variant, folder: Path, *options: str) -> str:
    """Run every check on a document; what it printed, or nothing when all passed."""
    command = [
        *("schemathesis", "run", document),
        *("--url", served.base_url, "--header", served.header(variant)),
        *("--checks", "all", "--seed", "1", "--no-color"),
        *("--generation-database", "none", "--request-timeout", "30"),
        *options,
    ]
    done = served.interpreter.run(
        "schemathesis.cli.schemathesis()", command, output=folder / "output", errors=folder / "errors",
        environment=os.environ, folder=folder,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


def check(served: Served, name: str, folder: Path, *options: str) -> None:
    address = f"{served.base_url}/openapi/{name}.json"
    failures = schemathesis(served, address, DOCUMENTS[name], folder, *options, *SPECIAL.get(name, ()))
    assert not failures, failures


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_service_keeps_what_its_document_promises(served: Served, tmp_path: Path, name: str) -> None:
    check(served, name, tmp_path, *QUICK)


@pytest.mark.soak
@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_service_keeps_what_its_document_promises_in_a_long_sweep(
    served: Served, tmp_path: Path, name: str
) -> None:
    check(served, name, tmp_path, *SWEEP)


@pytest.mark.slow
def test_a_document_that_promises_more_is_found_out(served: Served, tmp_path: Path) -> None:
    """The checks can fail: here the document allows a guidance that the service does not."""
    document = httpx.get(f"{served.base_url}/openapi/b.json").json()
    document["components"]["schemas"]["GenerationRequest"]["properties"]["guidance"]["maximum"] = 30
    path = tmp_path / "b.json"
    path.write_text(json.dumps(document))
    options = ("--phases", "coverage", "--include-path", "/v1/generate")
    assert "Schema-valid request rejected" in schemathesis(served, str(path), Variant.B, tmp_path, *options)
