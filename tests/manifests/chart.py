"""Renders the Helm chart without a cluster, with Helm's own library."""

import copy
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any, cast

import helm_python
import yaml

from tests.support import ROOT

CHART = ROOT / "configs" / "helm" / "atelier"
Document = dict[str, Any]

PROFILES = {
    "one-gpu": ("one-gpu",),
    "many-gpus": ("many-gpus",),
    "cpu-demo": ("cpu-demo",),
    "production": ("many-gpus", "production"),
}
"""By name: the values files of one installation, in the order in which they are given to Helm."""


def profile_values(profile: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in PROFILES[profile]:
        merged = merge(merged, yaml.safe_load((CHART / f"values-{name}.yaml").read_text()))
    return merged


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge values as Helm merges files of them: mappings word by word, everything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(cast(dict[str, Any], old), cast(dict[str, Any], value)) if both else value
    return merged


@cache
def _chart(folder: Path) -> helm_python.Chart:
    return helm_python.Chart.load(folder)


def chart_beside_secret(folder: Path, **data: str) -> Path:
    """Copy the chart, for a cluster in which `lookup` finds a Secret with `data`."""
    chart = folder / "atelier"
    shutil.copytree(CHART, chart, symlinks=True)
    found = " ".join(f'"{key.replace("_", "-")}" "{value}"' for key, value in data.items())
    for name in ("_names.tpl", "secret.yaml"):
        template = chart / "templates" / name
        text, count = _LOOKUP.subn(f'dict "data" (dict {found})', template.read_text())
        assert count == 1, name
        template.write_text(text)
    return chart


_LOOKUP = re.compile(r'lookup "v1" "Secret" \.Release\.Namespace [$.\w]+')


def render(values: dict[str, Any], *, folder: Path = CHART) -> list[Document]:
    """Render the chart's objects, in the order of its templates.

    Raises `helm_python.HelmError` with the chart's own message.
    """
    rendered = _chart(folder).render(values, name="atelier", namespace="atelier")
    texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.load_all(text, yaml.CSafeLoader) if document]


@cache
def _rendered(profile: str) -> list[Document]:
    return render(profile_values(profile))


def rendered(profile: str) -> list[Document]:
    """The objects of a shipped installation; a copy, to be spoiled."""
    return copy.deepcopy(_rendered(profile))


def serve_config(documents: list[Document]) -> dict[str, Any]:
    return yaml.safe_load(find(documents, "RayService")["spec"]["serveConfigV2"])


def find(documents: list[Document], kind: str, name: str | None = None) -> Document:
    """The one object of that kind, and of that name where several have the kind."""
    (found,) = [
        document for document in documents if document["kind"] == kind and name in (None, document["metadata"]["name"])
    ]
    return found
