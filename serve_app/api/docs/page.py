"""An OpenAPI document as rows to read: what a page says about each operation."""

import json
import re
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class FieldRow:
    name: str
    type: str
    required: bool
    allowed: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class Example:
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class ErrorRow:
    status: str
    codes: tuple[str, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Operation:
    id: str
    method: str
    path: str
    summary: str
    parameters: tuple[FieldRow, ...]
    fields: tuple[FieldRow, ...]
    requests: tuple[Example, ...]
    success_status: str
    success_meaning: str
    success_headers: tuple[FieldRow, ...]
    answers: tuple[Example, ...]
    errors: tuple[ErrorRow, ...]


def operations(document: dict[str, Any], base: str) -> list[Operation]:
    """Every operation of a document, in its order; curl examples call `base`."""
    found: list[Operation] = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            found.append(_operation(document, base, path, method, operation))
    return found


def code_spans(text: str) -> Markup:
    """Text with `backticks` as code, everything else escaped; paragraphs are split at blank lines by the page."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))


def _operation(document: dict[str, Any], base: str, path: str, method: str, operation: dict[str, Any]) -> Operation:
    parameters = [_resolve(document, parameter) for parameter in operation.get("parameters", [])]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = _resolve(document, body.get("schema", {}))
    success_status, success = next((code, row) for code, row in operation["responses"].items() if code.startswith("2"))
    examples = body.get("examples", {"": {"value": None}})
    extra = {
        name: row
        for name, row in success["headers"].items()
        if name in ("Location", "Retry-After", "Idempotency-Replayed")
    }
    return Operation(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        summary=operation["summary"],
        parameters=tuple(_parameter(row) for row in parameters),
        fields=tuple(
            _field(document, name, row, required=name in schema.get("required", []))
            for name, row in schema.get("properties", {}).items()
        ),
        requests=tuple(
            Example(title, _curl(document, base, path, method, example["value"])) for title, example in examples.items()
        ),
        success_status=success_status,
        success_meaning=success["description"],
        success_headers=tuple(_header(document, name, row) for name, row in extra.items()),
        answers=tuple(
            Example(title, json.dumps(example["value"], indent=2, ensure_ascii=False))
            for title, example in success["content"]["application/json"]["examples"].items()
        ),
        errors=tuple(
            _error(status, _resolve(document, row))
            for status, row in operation["responses"].items()
            if not status.startswith("2")
        ),
    )


def _parameter(row: dict[str, Any]) -> FieldRow:
    place = {"header": "header", "path": "path", "query": "query"}[row["in"]]
    schema = row["schema"]
    return FieldRow(
        name=row["name"],
        type=f"{place}, {schema['type']}",
        required=row.get("required", False),
        allowed=_allowed(schema),
        default=_default(schema),
        description=row["description"],
    )


def _field(document: dict[str, Any], name: str, row: dict[str, Any], *, required: bool) -> FieldRow:
    schema = _resolve(document, row)
    values = schema.get("enum")
    kind = schema.get("type") or ("integer" if values else "")
    return FieldRow(name, kind, required, _allowed(schema), _default(schema), row.get("description", ""))


def _header(document: dict[str, Any], name: str, row: dict[str, Any]) -> FieldRow:
    header = _resolve(document, row)
    return FieldRow(name, "header", header.get("required", False), "", "", header["description"])


def _allowed(schema: dict[str, Any]) -> str:
    if "x-allowed" in schema:
        return str(schema["x-allowed"])
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    words = f"{low} to {high}" if low is not None and high is not None else ""
    if "multipleOf" in schema:
        words += f", multiple of {schema['multipleOf']}"
    if "maxLength" in schema:
        words += f"{schema.get('minLength', 0)} to {schema['maxLength']} characters"
    return words


def _default(schema: dict[str, Any]) -> str:
    return json.dumps(schema["default"]) if "default" in schema else ""


def _error(status: str, response: dict[str, Any]) -> ErrorRow:
    error = response["content"]["application/json"]["schema"]["properties"]["error"]
    return ErrorRow(status, tuple(error["properties"]["code"]["enum"]), response["description"])


def _curl(document: dict[str, Any], base: str, path: str, method: str, body: Any) -> str:
    scheme = next(iter(document["components"]["securitySchemes"].values()))
    key = "X-API-Key: $ATELIER_KEY" if scheme["type"] == "apiKey" else "Authorization: Bearer $ATELIER_KEY"
    address = base + re.sub(r"\{(\w+)\}", lambda name: f"${name[1].upper()}", path)
    lines = [f'curl -s "{address}"' if method == "get" else f'curl -s -X {method.upper()} "{address}"', f'  -H "{key}"']
    if body is not None:
        lines += ['  -H "Content-Type: application/json"', f"  -d '{_indented(body)}'"]
    return " \\\n".join(lines)


def _indented(body: Any) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False).replace("\n", "\n  ")


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        target: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = target
    return schema
