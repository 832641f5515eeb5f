"""Writes the names that the chart's schema has from the code: `make schema`."""

import json
import re
from typing import Any, cast

import pydantic

from deployments.args import AppArgs
from deployments.config import Autoscaling
from serve_app.loras.catalog_file import AdapterRow, BaseModelRow
from serve_app.settings import OTHERS_VARIABLES, PREFIX, PlanRow, Settings
from tests.manifests.chart import CHART

SCHEMA = CHART / "values.schema.json"


def written_schema() -> str:
    """The chart's schema with the words of the Serve file, each of which may be left out, and other names of the code."""
    schema = json.loads(SCHEMA.read_text())
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
    while unused := set(schema["definitions"]) - set(re.findall(r"#/definitions/(\w+)", json.dumps(schema))):
        for name in unused:
            del schema["definitions"][name]
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


if __name__ == "__main__":
    SCHEMA.write_text(written_schema())
