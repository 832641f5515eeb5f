"""Writes the chart's plain manifests for kubectl: `python -m tests.manifests.render`.

kustomize takes them too.
"""

from pathlib import Path
from typing import Any

import yaml

from tests.manifests.chart import Document, find, merge, profile_values, render
from tests.support import ROOT

KUBERAY = ROOT / "configs" / "kuberay"
KUSTOMIZE = ROOT / "configs" / "kustomize"
OWN_SECRET: dict[str, Any] = {"secrets": {"generate": False, "existingSecret": "atelier-secrets"}}
HEADER = """\
# Written by `make rayservice` from the Helm chart in configs/helm and values-{profile}.yaml: change those, not this.
# docs/deploy-kubernetes.md says which Secret must be there before it is applied.
"""


def manifests() -> dict[Path, str]:
    """The text of each file that is the chart's."""
    return {
        KUBERAY / "rayservice.yaml": _text("many-gpus"),
        KUSTOMIZE / "cpu-demo" / "atelier.yaml": _text("cpu-demo"),
        KUSTOMIZE / "one-gpu" / "serve-config.yaml": _serve_config("one-gpu"),
    }


def _text(profile: str) -> str:
    documents = [_plain(document) for document in render(merge(profile_values(profile), OWN_SECRET))]
    return HEADER.format(profile=profile) + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def _serve_config(profile: str) -> str:
    """A patch for kustomize."""
    text = find(render(profile_values(profile)), "RayService")["spec"]["serveConfigV2"]
    patch = [{"op": "replace", "path": "/spec/serveConfigV2", "value": text}]
    return HEADER.format(profile=profile) + yaml.dump(patch, Dumper=_Dumper, sort_keys=False)


def _plain(document: Document) -> Document:
    """The object without the labels and annotations that say that Helm looks after it."""
    metadata = document["metadata"]
    for name in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
        metadata.get("labels", {}).pop(name, None)
    metadata.get("annotations", {}).pop("helm.sh/resource-policy", None)
    if not metadata.get("annotations", True):
        del metadata["annotations"]
    if document["kind"] == "RayService":
        labels = document["spec"]["serveService"]["metadata"]["labels"]
        del labels["helm.sh/chart"], labels["app.kubernetes.io/managed-by"]
    return document


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines so that they stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)

if __name__ == "__main__":
    for path, text in manifests().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
