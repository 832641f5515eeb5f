"""Looks up known holes of every package of an environment, with the standard library only.

    audit.py PIP_AUDIT SITE_PACKAGES

pip-audit alone is green when it could look nothing up: offline, behind a mirror without advisories, or for a version
with a local part (`2.13.0+cpu`). Exit code 0: nothing known; 1: holes; 3: nothing could be looked up.
"""

import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

OURS = "atelier"


def main(pip_audit: str, site_packages: str) -> int:
    found = {dist.name.lower(): dist.version.partition("+")[0] for dist in distributions(path=[site_packages])}
    wanted = sorted(f"{name}=={version}" for name, version in found.items() if name != OURS)
    with TemporaryDirectory() as folder:
        requirements, report = Path(folder) / "requirements.txt", Path(folder) / "report.json"
        requirements.write_text("\n".join(wanted) + "\n")
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [pip_audit, "--requirement", str(requirements), *options, "--output", str(report)]
        done = subprocess.run(command, capture_output=True, text=True)
        answer: dict[str, Any] = json.loads(report.read_text()) if report.exists() and report.stat().st_size else {}
    rows: list[dict[str, Any]] = answer.get("dependencies", [])
    known = [row for row in rows if "skip_reason" not in row]
    if not known:
        reason = (done.stderr.strip().splitlines() or ["no advisories for any package"])[-1]
        print(f"Nothing was audited: the advisories need a network. ({reason})", file=sys.stderr)
        return 3
    holes = [(row, hole) for row in known for hole in row["vulns"]]
    for row, hole in holes:
        fixed = ", ".join(hole["fix_versions"]) or "none yet"
        print(f"{row['name']} {row['version']}: {hole['id']}, fixed in {fixed}")
    skipped = sorted(row["name"] for row in rows if "skip_reason" in row)
    print(f"{len(known)} of {len(wanted)} packages looked up, {len(holes)} known holes")
    if skipped:
        print(f"Not looked up: {', '.join(skipped)}")
    return 1 if holes else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
