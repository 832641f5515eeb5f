"""Reads an OpenAPI document for the reference page: operations, fields, examples and answers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Schema = Mapping[str, Any]
DEEPEST = 4
"""The fields of objects within objects are listed this deep."""
_REF = "#/components/schemas/"
_FORMATS = {"date-time": "time (ISO 8601, UTC)", "uri": "address", "uri-reference": "address", "binary": "file"}
_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "object",
}


class Field(NamedTuple):
    """A parameter, or a field of a body: `images[].url` for one within a list of objects."""

    name: str
    kind: str
    is_required: bool
    default: str
    description: str
    place: str = ""
    """Where a parameter is sent: in the path, the query or a header; empty for a field of a body."""


class Shape(NamedTuple):
    """The fields of an object; its description says when a body has this one of several shapes."""

    description: str
    fields: Sequence[Field]


class Example(NamedTuple):
    """A body as one sends or gets it; `value` as the document has it."""

    name: str
    text: str
    value: Any


class Body(NamedTuple):
    """A request's body in one content type."""

    media_type: str
    shapes: Sequence[Shape]
    examples: Sequence[Example]
    files: Sequence[str]


class Answer(NamedTuple):
    """A response of one status."""

    status: str
    description: str
    shapes: Sequence[Shape]
    examples: Sequence[Example]


class Operation(NamedTuple):
    """A method of a path."""

    id: str
    method: str
    path: str
    summary: str
    description: str
    parameters: Sequence[Field]
    bodies: Sequence[Body]
    answers: Sequence[Answer]

    @property
    def successes(self) -> Sequence[Answer]:
        return [answer for answer in self.answers if answer.status < "4"]

    @property
    def errors(self) -> Sequence[Answer]:
        return [answer for answer in self.answers if answer.status >= "4"]


class Credential(NamedTuple):
    """A header that a key may be sent in, and what stands before the key."""

    header: str
    prefix: str


def operations_of(document: Mapping[str, Any]) -> list[Operation]:
    """List the operations in the order of the document."""
    schemas = document["components"]["schemas"]
    return [
        _operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def messages_of(document: Mapping[str, Any]) -> list[Operation]:
    """List what the service sends by itself: the document's webhooks."""
    schemas = document["components"]["schemas"]
    return [_operation("post", name, each["post"], schemas) for name, each in document.get("webhooks", {}).items()]


def credentials_of(document: Mapping[str, Any]) -> list[Credential]:
    schemes = document["components"]["securitySchemes"].values()
    return [
        Credential(scheme["name"], "") if scheme["type"] == "apiKey" else Credential("Authorization", "Bearer ")
        for scheme in schemes
    ]


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Schema) -> Operation:
    contents = operation.get("requestBody", {}).get("content", {})
    return Operation(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        summary=operation["summary"],
        description=operation.get("description", ""),
        parameters=[_parameter(each, schemas) for each in operation.get("parameters", ())],
        bodies=[_body(media_type, content, schemas) for media_type, content in contents.items()],
        answers=[_answer(status, answer, schemas) for status, answer in operation["responses"].items()],
    )


def _parameter(parameter: Mapping[str, Any], schemas: Schema) -> Field:
    schema = parameter["schema"]
    return Field(
        parameter["name"], kind_of(schema, schemas), parameter.get("required", False), _default(schema),
        parameter.get("description", ""), parameter["in"],
    )  # fmt: skip


def _body(media_type: str, content: Mapping[str, Any], schemas: Schema) -> Body:
    properties = _resolved(content["schema"], schemas).get("properties", {})
    files = [name for name, schema in properties.items() if schema.get("format") == "binary"]
    return Body(media_type, _shapes(content["schema"], schemas), _examples(content), files)


def _answer(status: str, answer: Mapping[str, Any], schemas: Schema) -> Answer:
    content = next(iter(answer.get("content", {}).values()), {})
    schema = content.get("schema", {})
    shapes = _shapes(schema.get("contentSchema", schema), schemas)  # of a stream, its events'
    return Answer(status, answer["description"], shapes, _examples(content))


def _examples(content: Mapping[str, Any]) -> list[Example]:
    return [
        Example(name, json.dumps(each["value"], indent=2, ensure_ascii=False), each["value"])
        for name, each in content.get("examples", {}).items()
    ]


def _shapes(schema: Schema, schemas: Schema) -> list[Shape]:
    """Return the schema's shape, or one for each alternative."""
    found = _resolved(schema, schemas)
    choices = () if "properties" in found else found.get("oneOf", found.get("anyOf", ()))
    alternatives = [_resolved(each, schemas) for each in choices] or [found]
    return [Shape(each.get("description", ""), list(_fields(each, schemas, ""))) for each in alternatives]


def _fields(schema: Schema, schemas: Schema, prefix: str, depth: int = 1) -> Iterator[Field]:
    """Yield an object's fields, each followed by those of the objects that it holds."""
    for name, each in schema.get("properties", {}).items():
        found = _resolved(each, schemas)
        is_required = name in schema.get("required", ())
        description = each.get("description", found.get("description", ""))
        yield Field(prefix + name, kind_of(each, schemas), is_required, _default(found), description)
        inner, path = found, f"{prefix}{name}."
        if found.get("type") == "array":
            inner, path = _resolved(found["items"], schemas), f"{prefix}{name}[]."
        if depth < DEEPEST:
            yield from _fields(inner, schemas, path, depth + 1)


def kind_of(schema: Schema, schemas: Schema) -> str:
    """Describe the values that a schema takes."""
    found = _resolved(schema, schemas)
    if "const" in found:
        return f"always {_text(found['const'])}"
    if "enum" in found:
        return _any_of([_text(value) for value in found["enum"]])
    if alternatives := found.get("anyOf", found.get("oneOf")):
        return _any_of(list(dict.fromkeys(kind_of(each, schemas) for each in alternatives)))
    if found.get("type") == "array":
        most = f" of up to {found['maxItems']}" if "maxItems" in found else ""
        return f"list{most}: {kind_of(found['items'], schemas)}"
    kind = _FORMATS.get(found.get("format", ""), _TYPES.get(found.get("type", ""), "any value"))
    return ", ".join([kind, *_bounds(found)])


def _bounds(schema: Schema) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f"{low} to {high}"
    elif low is not None:
        yield f"at least {low}"
    elif high is not None:
        yield f"at most {high}"
    if "maxLength" in schema:
        yield f"up to {schema['maxLength']} characters"


def _any_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _default(schema: Schema) -> str:
    return "" if schema.get("default", "") in ("", None) else _text(schema["default"])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(_REF)]
    return schema
