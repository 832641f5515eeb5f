"""OpenAPI 3.1 documents: the parts every room's document shares. Each room says what is its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from serve_app.api.fields import Body
from serve_app.domain.accounts import Plan

Schema = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a document says of this installation: its address, an adapter for the examples, its plans and what it keeps."""

    server: str
    adapter_id: str
    plans: tuple[Plan, ...]
    image_url_life: timedelta
    retention: timedelta

    @property
    def plan_text(self) -> str:
        return ", ".join(
            f"{plan.name.capitalize()} {plan.limit} per {span_text(plan.window, one='')}" for plan in self.plans
        )

    @property
    def keeping_text(self) -> str:
        return (
            f"Image addresses work without the key for {span_text(self.image_url_life)} and are signed anew at every poll; "
            f"images and records are kept for {span_text(self.retention)}."
        )


def span_text(span: timedelta, *, one: str = "1 ") -> str:
    """`30 days`, `24 hours`, `1 minute`: in the largest unit that divides it; `one` stands before a single unit."""
    seconds = span.total_seconds()
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds % length == 0 and (seconds > length or unit != "day"):
            count = int(seconds // length)
            return f"{one}{unit}" if count == 1 else f"{count} {unit}s"
    return f"{seconds:g} seconds"


TIME = {"type": "string", "format": "date-time", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}
PROGRESS = {"type": "integer", "minimum": 0, "maximum": 100}
CODES: dict[int, tuple[str, ...]] = {
    400: ("invalid_parameter", "invalid_json"),
    401: ("unauthorized",),
    403: ("forbidden",),
    404: ("not_found",),
    409: ("idempotency_conflict",),
    413: ("payload_too_large",),
    415: ("unsupported_media_type",),
    429: ("rate_limit_exceeded", "queue_full"),
    500: ("internal_error",),
    503: ("unavailable",),
}
MEANING: dict[int, str] = {
    400: "The body is not valid JSON, or a field breaks its rule. The message names the field and its valid range.",
    401: "The API key is missing or not valid.",
    403: "You may not use this LoRA, or it does not exist.",
    404: "There is no such thing in your account, or it is past its retention.",
    409: "The `Idempotency-Key` was used before with another body.",
    413: "The body is over 64 KiB.",
    415: "The body is declared as something other than JSON.",
    429: "Over the plan's limit (`rate_limit_exceeded`), or the queue has no room (`queue_full`).",
    500: "Something went wrong on our side.",
    503: "The service cannot reach its store. Nothing was accepted; try again.",
}
FAILURE_CODES = ["generation_failed", "timeout", "canceled", "expired", "lora_unavailable", "out_of_memory"]

MESSAGES: dict[str, str] = {
    "invalid_parameter": "guidance: must be between 1 and 20",
    "invalid_json": "The body is not valid JSON: line 1, column 3.",
    "ambiguous_credentials": "Send either 'Authorization: Bearer' or 'X-API-Key', not both.",
    "unauthorized": "The API key is not valid.",
    "forbidden": "You have no permission to use this LoRA.",
    "not_found": "There is no such request.",
    "idempotency_conflict": "This Idempotency-Key was used before with another body.",
    "payload_too_large": "The body must be at most 65536 bytes.",
    "unsupported_media_type": "Send the body as 'Content-Type: application/json'.",
    "rate_limit_exceeded": "Your plan allows 50 requests per hour; try again in 1800 seconds.",
    "queue_full": "The queue is full; try again in 5 seconds.",
    "internal_error": "Something went wrong on our side; quote request id req_5f0c when you report it.",
    "unavailable": "The service cannot reach its store; nothing was accepted. Try again in a few seconds.",
}


def _header(description: str, schema: Schema, *, required: bool = True) -> Schema:
    return {"description": description, "required": required, "schema": schema}


HEADERS: dict[str, Schema] = {
    "X-RateLimit-Limit": _header("Requests the plan allows in a window.", {"type": "integer", "minimum": 0}),
    "X-RateLimit-Remaining": _header("Requests left in the window.", {"type": "integer", "minimum": 0}),
    "X-RateLimit-Reset": _header("When the window ends, in Unix seconds.", {"type": "integer", "minimum": 0}),
    "RateLimit-Policy": _header(
        "The window's name, quota and length (IETF draft).",
        {"type": "string", "pattern": '^"[^"]+";q=[0-9]+;w=[0-9]+$'},
    ),
    "RateLimit": _header(
        "Requests and seconds left in the window (IETF draft).",
        {"type": "string", "pattern": '^"[^"]+";r=[0-9]+;t=[0-9]+$'},
    ),
    "X-Request-Id": _header(
        "Quote it when you report a problem.", {"type": "string", "pattern": r"^[A-Za-z0-9._\-]{8,128}$"}
    ),
    "Cache-Control": _header(
        "Answers are for the caller alone.", {"type": "string", "enum": ["no-store", "private, no-cache"]}
    ),
    "Retry-After": _header("Seconds to wait before the next try.", {"type": "integer", "minimum": 1}),
    "Location": _header("Where to poll for the result.", {"type": "string", "format": "uri-reference"}),
    "WWW-Authenticate": _header("How to authenticate.", {"type": "string"}),
    "Idempotency-Replayed": _header(
        "The answer repeats that of an earlier request with the same key.", {"const": "true"}, required=False
    ),
}
_POLL_HINT = {
    "Retry-After": _header(
        "Seconds to wait before polling again; absent once the record has ended.",
        {"type": "integer", "minimum": 1},
        required=False,
    )
}
IDEMPOTENCY_KEY: Schema = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Makes a retry safe: within 24 hours the same key with the same body answers with the first request again.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
}
ALWAYS = (
    "X-RateLimit-Limit",
    "X-RateLimit-Remaining",
    "X-RateLimit-Reset",
    "RateLimit-Policy",
    "RateLimit",
    "X-Request-Id",
    "Cache-Control",
)
_BY_STATUS: dict[int, tuple[str, ...]] = {401: ("WWW-Authenticate",), 429: ("Retry-After",), 503: ("Retry-After",)}


def closed(properties: Mapping[str, Any], **extra: Any) -> Schema:
    """An object with exactly these members."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
        **extra,
    }


def job_id(*prefixes: str) -> Schema:
    return {"type": "string", "pattern": f"^(?:{'|'.join(prefixes)})_[a-z2-7]{{26}}$"}


def body_schema(model: type[Body]) -> Schema:
    """The schema of the very model that reads the body, so that the document cannot drift from the code."""
    schema = model.model_json_schema()
    for field in schema["properties"].values():
        field.pop("title", None)
        if field.get("default", "") is None:  # "absent" has no spelling in JSON
            del field["default"]
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def request_body(schema: str, examples: Mapping[str, Any]) -> Schema:
    named = {name: {"summary": name, "value": value} for name, value in examples.items()}
    return {
        "required": True,
        "content": {"application/json": {"schema": reference("schemas", schema), "examples": named}},
    }


def answer(
    description: str,
    schema: str,
    examples: Mapping[str, Any],
    *,
    headers: Iterable[str] = (),
    polled: bool = False,
    **extra: Any,
) -> Schema:
    """A successful answer; `headers` are those beside the ones that every answer carries, `polled` adds the hint to ask again."""
    named = {name: {"summary": name, "value": value} for name, value in examples.items()}
    return {
        "description": description,
        "headers": _headers((*ALWAYS, *headers)) | (_POLL_HINT if polled else {}),
        "content": {"application/json": {"schema": reference("schemas", schema), "examples": named}},
        **extra,
    }


def refusals(*statuses: int) -> dict[str, Schema]:
    """References to the documented errors, with the two that any operation may meet."""
    return {str(status): reference("responses", f"Error{status}") for status in (*statuses, 500, 503)}


def document(
    *,
    facts: Facts,
    title: str,
    description: str,
    security: Mapping[str, Schema],
    paths: Mapping[str, Schema],
    schemas: Mapping[str, Schema],
    codes: Mapping[int, tuple[str, ...]] = CODES,
) -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1.0.0", "description": description},
        "servers": [{"url": facts.server}],
        "security": [{name: []} for name in security],
        "paths": dict(paths),
        "components": {
            "securitySchemes": dict(security),
            "headers": HEADERS,
            "parameters": {"IdempotencyKey": IDEMPOTENCY_KEY},
            "responses": {f"Error{status}": _error(status, names) for status, names in codes.items()},
            "schemas": dict(schemas),
        },
    }


def _error(status: int, codes: Iterable[str]) -> Schema:
    code = {"type": "string", "enum": list(codes)}
    return {
        "description": MEANING[status],
        "headers": _headers((*ALWAYS, *_BY_STATUS.get(status, ()))),
        "content": {
            "application/json": {
                "schema": closed({"error": closed({"code": code, "message": {"type": "string", "minLength": 1}})}),
                "examples": {name: {"value": {"error": {"code": name, "message": MESSAGES[name]}}} for name in codes},
            }
        },
    }


def _headers(names: Iterable[str]) -> dict[str, Schema]:
    return {name: reference("headers", name) for name in names}


def reference(kind: str, name: str) -> Schema:
    return {"$ref": f"#/components/{kind}/{name}"}
