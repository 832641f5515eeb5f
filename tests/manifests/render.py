"""Writes the chart's plain manifests for kubectl and kustomize, and the names that its schema has from the code.

`python -m tests.manifests.render`
"""

import json
from pathlib import Path
from typing import Any, cast

import pydantic
import yaml

from deployments.args import AppArgs
from deployments.config import Autoscaling
from serve_app.loras.catalog_file import AdapterRow, BaseModelRow
from serve_app.settings import OTHERS_VARIABLES, PREFIX, PlanRow, Settings
from tests.manifests.chart import CHART, Document, find, merge, profile_values, render
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
        CHART / "values.schema.json": _schema(),
        KUBERAY / "rayservice.yaml": _text("many-gpus"),
        KUSTOMIZE / "cpu-demo" / "atelier.yaml": _text("cpu-demo"),
        KUSTOMIZE / "one-gpu" / "serve-config.yaml": _serve_config("one-gpu"),
    }


def _schema() -> str:
    """The chart's schema with the words of the Serve file, each of which may be left out, and other names of the code."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = {*OTHERS_VARIABLES, *(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)}
    names = schema["properties"]["environment"]["propertyNames"]
    names |= {"if": {"pattern": f"^{PREFIX}"}, "then": {"enum": sorted(known)}}
    catalog = schema["properties"]["catalog"]["oneOf"][1]["properties"]
    catalog["base_models"]["items"], catalog["adapters"]["items"] = _rows(BaseModelRow), _rows(AdapterRow)
    schema["properties"]["plans"]["items"] = _rows(PlanRow)
    serve = schema["properties"]["serve"]["properties"]
    for model in (AppArgs, Autoscaling):
        known = _words(cast(type[pydantic.BaseModel], model))
        schema["definitions"] |= known.pop("$defs")
        schema["definitions"][model.__name__] = known
    serve["args"] = {"$ref": "#/definitions/AppArgs"}
    for scaling in serve["scaling"]["properties"]:
        serve["scaling"]["properties"][scaling] = {"$ref": "#/definitions/Autoscaling"}
    return json.dumps(schema, indent=2) + "\n"


def _rows(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Rows with these names. Their values are checked where the file is read, which takes more than JSON does."""
    return {"type": "object", "additionalProperties": False, "properties": {name: {} for name in model.model_fields}}


def _words(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    return _bare(model.model_json_schema(ref_template="#/definitions/{model}"), is_schema=True)


def _bare(value: Any, *, is_schema: bool) -> Any:
    """A schema without what Helm does not check; names of properties stay, whatever they are."""
    if isinstance(value, list):
        return [_bare(each, is_schema=True) for each in cast(list[object], value)]
    if not isinstance(value, dict):
        return value
    parts = cast(dict[str, object], value)
    left_out = ("title", "description", "default", "required") if is_schema else ()
    return {
        name: _bare(part, is_schema=name not in ("properties", "$defs")) if is_schema else _bare(part, is_schema=True)
        for name, part in parts.items()
        if name not in left_out
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
    (CHART / "values.schema.json").write_text(_schema())  # before the chart is rendered, which asks it
    for path, text in manifests().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
