"""Checks manifests against the schemas of their kinds, and refuses unknown fields.

They are Kubernetes' own, and closed excerpts for the custom resources that the chart uses a few fields of. KubeRay's
whole definition is used too, where KUBERAY_CRD names its file:
ray-operator/config/crd/bases/ray.io_rayservices.yaml of KubeRay 1.7.
"""

import json
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import jsonschema
import kubernetes_validate
import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.manifests.chart import Document
from tests.manifests.pods import templates

KUBERNETES = ("1.29.0", "1.37.0")
"""The oldest version that the chart names, and the newest whose schemas are at hand."""
CRD = os.environ.get("KUBERAY_CRD", "")
EXCERPTS = Path(__file__).with_name("excerpts.yaml")


def mistakes(document: Document) -> list[str]:
    """What is wrong with one manifest by its schema; its place comes first."""
    name = f"{document['kind']}/{document['metadata'].get('name')}"
    return [f"{name}: {mistake}" for mistake in _mistakes(document)]


def _mistakes(document: Document) -> list[str]:
    if document["kind"] == "RayService":
        schemas = [excerpt("RayService"), *([kuberay()] if CRD else [])]
        parts = [{"apiVersion": "v1", "kind": "Pod", **template} for _, template in templates(document)]
        parts.append({"apiVersion": "v1", "kind": "Service", **document["spec"]["serveService"]})
        found = [mistake for schema in schemas for mistake in _errors(schema, document)]
        return found + [mistake for part in parts for mistake in _kubernetes_mistakes(part)]
    if document["apiVersion"].startswith(("gateway.", "monitoring.coreos.com/")):
        return _errors(excerpt(document["kind"]), document)
    return _kubernetes_mistakes(document)


def _kubernetes_mistakes(document: Document) -> list[str]:
    for version in KUBERNETES:
        found = _errors(_kubernetes(document["apiVersion"], document["kind"], version), document)
        if found:
            return [f"{found[0]} (Kubernetes {version})"]
    return []


@cache
def _kubernetes(api_version: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    """The package's schema that refuses unknown fields. It is read once: the schemas are megabytes."""
    group, _, name = api_version.rpartition("/")
    file = "-".join(filter(None, (kind.lower(), group.split(".")[0], name)))
    folder = resources.files(kubernetes_validate) / "kubernetes-json-schema" / f"v{version}-local-strict"
    schema = json.loads((folder / f"{file}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Registry[Any]:
    folder = resources.files(kubernetes_validate) / "kubernetes-json-schema" / f"v{version}-local-strict"
    file = folder / "_definitions.json"
    return Resource.from_contents(json.loads(file.read_text()), DRAFT202012) @ Registry()


def _errors(schema: jsonschema.Draft7Validator | jsonschema.Draft202012Validator, document: Document) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in schema.iter_errors(document)]


@cache
def excerpt(kind: str) -> jsonschema.Draft7Validator:
    """The schema of the fields of a custom resource that the chart may use."""
    return jsonschema.Draft7Validator(close(yaml.safe_load(EXCERPTS.read_text())[kind]))


@cache
def kuberay() -> jsonschema.Draft7Validator:
    """The whole definition of a RayService."""
    versions = yaml.load(Path(CRD).read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    closed = close(schema)
    closed["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(closed)


def close(schema: Any) -> Any:
    """The schema, made to refuse unknown fields, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [close(item) for item in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    node = {key: close(value) for key, value in cast(dict[str, Any], schema).items()}
    if node.get("x-kubernetes-int-or-string"):
        node["type"] = ["integer", "string"]
    if node.get("nullable") and isinstance(node.get("type"), str):
        node["type"] = [node["type"], "null"]
    is_open = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if node.get("type") == "object" and "properties" in node and not is_open:
        node["additionalProperties"] = False
    return node
