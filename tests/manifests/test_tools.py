"""`make audit` is green only when advisories were looked up; the tools are installed by hash."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

TOOLS = ROOT / "configs" / "tools"
PIP_AUDIT = """#!{python}
import json, sys
print({complaint!r}, file=sys.stderr)
rows = json.loads({rows!r})
if rows is not None:
    open(sys.argv[sys.argv.index("--output") + 1], "w").write(json.dumps({{"dependencies": rows}}))
"""


def audit(folder: Path, rows: list[dict[str, Any]] | None, complaint: str = "") -> subprocess.CompletedProcess[str]:
    """Run `audit.py` over an environment of two packages, with a pip-audit that answers `rows`."""
    for name, version in (("torch", "2.13.0+cpu"), ("atelier", "0.1.0")):
        metadata = folder / "site" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    program = folder / "pip-audit"
    program.write_text(PIP_AUDIT.format(python=sys.executable, complaint=complaint, rows=json.dumps(rows)))
    program.chmod(0o755)
    command = [sys.executable, str(TOOLS / "audit.py"), str(program), str(folder / "site")]
    return subprocess.run(command, capture_output=True, text=True)


HOLE = {"id": "CVE-2026-1", "fix_versions": ["2.13.1"]}


@pytest.mark.parametrize(
    ("rows", "code", "says"),
    [
        ([{"name": "torch", "version": "2.13.0", "vulns": []}], 0, "1 of 1 packages looked up, 0 known holes"),
        ([{"name": "torch", "version": "2.13.0", "vulns": [HOLE]}], 1, "torch 2.13.0: CVE-2026-1, fixed in 2.13.1"),
        ([{"name": "torch", "skip_reason": "not found"}], 3, "Nothing was audited: the advisories need a network."),
        (None, 3, "(no route to host)"),
    ],
)
def test_an_audit_is_green_only_when_something_was_looked_up(
    tmp_path: Path, rows: list[dict[str, Any]] | None, code: int, says: str
) -> None:
    done = audit(tmp_path, rows, "no route to host")
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["requirements", "jupyter"])
def test_the_tools_are_installed_by_hash(name: str) -> None:
    text = (TOOLS / f"{name}.txt").read_text()
    wanted = (TOOLS / f"{name}.in").read_text().split()
    entries = [entry for entry in text.replace("\\\n", " ").splitlines() if entry and not entry.startswith("#")]
    assert all("--hash=sha256:" in entry for entry in entries)
    assert {entry.partition("==")[0] for entry in entries} >= set(wanted)
