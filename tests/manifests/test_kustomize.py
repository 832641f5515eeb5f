"""The plain manifests and the kustomize overlays over them: those of the chart, valid, and as strict."""

import copy
import os
import shutil
import subprocess
from functools import cache

import pytest
import yaml

from deployments.config import ServeConfig
from tests.manifests.chart import Document, find, serve_config
from tests.manifests.render import KUBERAY, KUSTOMIZE, manifests
from tests.manifests.rules import broken_rules
from tests.manifests.schemas import mistakes
from tests.support import ROOT

OVERLAYS = ("many-gpus", "one-gpu", "cpu-demo")
KUSTOMIZE_COMMAND = (
    ["kubectl", "kustomize"]
    if shutil.which("kubectl")
    else ["kustomize", "build"]
    if shutil.which("kustomize")
    else None
)

overlays = pytest.mark.parametrize("overlay", OVERLAYS)
needs_kustomize = pytest.mark.skipif(KUSTOMIZE_COMMAND is None, reason="neither kubectl nor kustomize is on PATH")


@cache
def _built(overlay: str) -> list[Document]:
    assert KUSTOMIZE_COMMAND
    command = [*KUSTOMIZE_COMMAND, str(KUSTOMIZE / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=_environment())
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def _environment() -> dict[str, str]:
    """The environment without a cluster's address: building reads files alone."""
    return {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}


def built(overlay: str) -> list[Document]:
    return copy.deepcopy(_built(overlay))


def test_the_plain_manifests_are_the_charts() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in manifests().items() if path.read_text() != text]
    assert stale == [], "run `make rayservice`"


def test_the_plain_manifest_is_valid_and_keeps_the_rules() -> None:
    documents = list(yaml.safe_load_all((KUBERAY / "rayservice.yaml").read_text()))
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    assert broken_rules(documents) == []
    assert "Helm" not in yaml.safe_dump_all([document["metadata"] for document in documents])


@needs_kustomize
@overlays
def test_an_overlay_is_valid_and_keeps_the_rules(overlay: str) -> None:
    documents = built(overlay)
    assert [mistake for document in documents for mistake in mistakes(document)] == []
    assert broken_rules(documents) == []
    assert {document["metadata"]["namespace"] for document in documents} == {"atelier"}
    for document in documents:
        spoiled = copy.deepcopy(document)
        spoiled["specs"] = {}
        assert mistakes(spoiled), f"a typo in {document['kind']}"


@needs_kustomize
@overlays
def test_the_replicas_of_an_overlay_fit_its_pods(overlay: str) -> None:
    documents = built(overlay)
    config = ServeConfig.model_validate(serve_config(documents))
    cluster = find(documents, "RayService")["spec"]["rayClusterConfig"]
    made = {
        (group["groupName"], group["maxReplicas"], *sorted(set(group["resources"]) - {"CPU", "GPU"}))
        for group in cluster.get("workerGroupSpecs", [])
    }
    declared = {(pool.name, pool.nodes, *sorted(pool.resources)) for pool in config.pools if pool.name != "head"}
    assert made == declared
    catalogs = [each["data"]["catalog.yaml"] for each in documents if each["metadata"]["name"] == "atelier-catalog"]
    for catalog in map(yaml.safe_load, catalogs):
        assert {each.get("group", "default") for each in catalog["base_models"]} == config.served_groups


@needs_kustomize
def test_an_image_of_ones_own_reaches_every_pod() -> None:
    images = {line.split()[-1] for line in yaml.safe_dump_all(built("many-gpus")).splitlines() if " image: " in line}
    assert images == {"registry.example.com/atelier:0.1.0", "valkey/valkey:8.1.7"}
