"""The guides for Kubernetes, the chart's notes and its README name only what the chart makes and takes."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from tests.manifests.chart import CHART, PROFILES, Document, merge, profile_values, render
from tests.manifests.pods import pods
from tests.support import ROOT
from tests.test_docs import unknown_commands

DOCS = ROOT / "docs"
GUIDES = [*(DOCS / "operate").glob("*.md"), CHART / "README.md"]
BACKUP: dict[str, Any] = {"redis": {"jobs": {"backup": {"enabled": True}}}}
SERVED = {"service/atelier-serve-svc", "pod/atelier-redis-jobs-0", "job/now"}
"""KubeRay, a StatefulSet and one of the guides' own commands make these."""
BROUGHT = {"secret/atelier-secrets", "secret/atelier-ray-ca", "service/kube-prometheus-stack-prometheus"}
"""A guide makes these before the chart, or beside it."""
OF_KUBERAY = {"ray.io/is-ray-node": "yes", "ray.io/node-type": "head"}
KINDS = "rayservice|service|secret|configmap|job|cronjob|statefulset|pod"
REFERENCE = re.compile(rf"\b({KINDS})/([a-z][\w-]*)(…)?")
ARGUMENT = re.compile(rf"kubectl (?:get|delete|describe|logs|exec(?: -i)?) (?:({KINDS}) )?(?:-n \w+ )?(atelier[\w-]*)")
CONTAINER = re.compile(r"kubectl (?:exec|logs) [^|&;]*?-c ([a-z-]+)")
SELECTOR = re.compile(r"(?: -l |INGRESS=)([\w./-]+=[\w.,/=-]+)")
SETTING = re.compile(r"--set ([\w.]+)=(\S+)")
FILES = (".yaml", ".json", ".py", ".md", ".rdb")
IN_SERVES_WORDS = re.compile(r"(?!serve\.).*_")
VALUE = re.compile(r"`([a-z]\w*(?:\.[\w*]+)+)(?:: [^`]*)?`")


def commands(text: str) -> str:
    """What a reader types: blocks for a shell and code within a line, with their continued lines joined."""
    code = re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, flags=re.DOTALL)
    return "\n".join(block or span for block, span in code).replace("\\\n", " ")


@cache
def documents() -> list[Document]:
    """The objects of every shipped installation, with copies of Redis."""
    return [each for profile in PROFILES for each in render(merge(profile_values(profile), BACKUP))]


def objects() -> set[str]:
    made = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in documents()}
    return made | SERVED | BROUGHT


def unknown_names(text: str) -> Iterator[str]:
    """Whatever the commands of a text name that no installation has."""
    known = objects()
    named = [(kind, name, more) for kind, name, more in REFERENCE.findall(text)]
    named += [(kind or "pod", name, "") for kind, name in ARGUMENT.findall(text)]
    for kind, name, more in named:
        whole = f"{kind}/{name}"
        if whole not in known and not (more and any(each.startswith(whole) for each in known)):
            yield whole
    containers = {container["name"] for pod in pods(documents()) for container in pod.containers}
    yield from (f"-c {name}" for name in CONTAINER.findall(text) if name not in containers)
    labels = [pod.labels | OF_KUBERAY for pod in pods(documents())]
    for selector in SELECTOR.findall(text):
        wanted = dict(part.split("=") for part in selector.split(","))
        if not any(wanted.items() <= each.items() for each in labels):
            yield selector
    waits = re.findall(r"kubectl wait [^|&;\n]*", text)
    yield from (command for command in waits if not REFERENCE.search(command) and not SELECTOR.search(command))
    yield from (file for file in re.findall(r"-f (configs/\S+)", text) if not (ROOT / file).is_file())


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_a_guide_names_what_the_chart_makes(guide: Path) -> None:
    assert list(unknown_names(commands(guide.read_text()))) == []


def test_a_wrong_name_in_a_command_is_found() -> None:
    wrong = (
        "kubectl wait rayservice/ateliers",
        "kubectl wait --for=condition=Ready atelier",
        "kubectl get secret -n atelier atelier-first-acount",
        "kubectl exec -n atelier atelier-redis-job-0 -- sh",
        "kubectl logs job/atelier-model-…",
        "kubectl exec POD -c ray-workers -- atelier doctor",
        "kubectl get pod -l app.kubernetes.io/component=ingres",
        "helm upgrade atelier -f configs/helm/atelier/values-cpu.yaml",
    )
    assert [command for command in wrong if not list(unknown_names(command))] == []


@pytest.mark.parametrize("profile", PROFILES)
def test_the_notes_name_what_the_chart_makes(profile: str) -> None:
    for change in ({}, {"account": {"create": False}}):
        values = merge(profile_values(profile), change)
        notes = helm_python.Chart.load(CHART).render(values, name="atelier", namespace="atelier")
        text = notes["atelier/templates/NOTES.txt"]
        assert "kubectl wait" in text
        assert list(unknown_names(text)) == []
        assert unknown_commands("\n".join(re.findall(r"kubectl exec .*", text))) == []


def test_the_commands_of_the_guides_set_values_that_the_chart_takes() -> None:
    """The guide of kind shows one that is refused."""
    refused: list[str] = []
    text = "\n".join(commands(guide.read_text()) for guide in GUIDES)
    settings = set(SETTING.findall(text))
    assert len(settings) > 4
    for path, value in settings:
        change: Any = yaml.safe_load(value)
        for name in reversed(path.split(".")):
            change = {name: change}
        try:
            render(merge(profile_values("cpu-demo"), change))
        except helm_python.HelmError:
            refused.append(path)
    assert refused == ["serve.args.generatr.replicas"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on PATH")
def test_the_verbs_of_the_guides_are_kubectls() -> None:
    text = "\n".join(commands(guide.read_text()) for guide in GUIDES)
    verbs = set(re.findall(r"kubectl ([a-z-]+)", text))
    known = subprocess.run(["kubectl", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert verbs <= set(re.findall(r"^  ([a-z-]+) ", known, flags=re.MULTILINE))


@cache
def the_schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def is_value(path: str) -> bool:
    """Whether the schema knows the path; `*` stands for any name."""
    schema = node = the_schema()
    for name in path.split("."):
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        options = [node, *node.get("anyOf", []), *node.get("allOf", [])]
        options = [schema["definitions"][o["$ref"].rpartition("/")[2]] if "$ref" in o else o for o in options]
        found = [o["properties"][name] for o in options if name in o.get("properties", {})]
        free = [o["additionalProperties"] for o in options if isinstance(o.get("additionalProperties"), dict)]
        if not found and not free:
            return any(o.get("additionalProperties", True) is True and "properties" not in o for o in options)
        (node, *_) = found or free
    return True


def test_the_documents_name_values_that_the_schema_knows() -> None:
    tops = set(yaml.safe_load((CHART / "values.yaml").read_text()))
    named = {
        (guide.name, path)
        for guide in GUIDES
        for path in VALUE.findall(guide.read_text())
        if path.partition(".")[0] in tops and not path.endswith(FILES) and not IN_SERVES_WORDS.match(path)
    }
    assert len(named) > 40
    assert sorted(each for each in named if not is_value(each[1])) == []
