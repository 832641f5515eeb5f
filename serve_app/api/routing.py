"""ContractRoute: the contract's order of checks as a FastAPI route."""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, create_model
from starlette.responses import Response

from serve_app.api.body import read_json
from serve_app.api.dependencies import authenticate
from serve_app.api.schemas import LINE_PATTERN, RequestBody
from serve_app.api.strict_json import MAX_DIGITS
from serve_app.domain.errors import InvalidParameter
from serve_app.tracing import set_caller

SHOWN_NAME_LENGTH, SHOWN_UNKNOWN_FIELDS = 64, 5

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
M = TypeVar("M", bound=BaseModel)


class ContractRoute(APIRoute):
    """Authenticates before the body is read, parses strict JSON, and names each invalid parameter.

    FastAPI reads a body first and solves dependencies afterwards; the contract has it the other way round.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        has_body = self.body_field is not None
        rules = self._rules()

        async def handle_in_order(request: Request) -> Response:
            if has_body:
                set_caller(request.headers.get("traceparent", ""))
                await authenticate(request)
                request = await read_json(request)
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise InvalidParameter(rules.explain(error.errors())) from None

        return handle_in_order

    def _rules(self) -> "Rules":
        """Read the rules from the schemas of the body and of the query parameters."""
        query: dict[str, Any] = {
            field.alias: (field.field_info.annotation, field.field_info) for field in self.dependant.query_params
        }
        schemas: dict[str, Any] = properties_of(create_model("Query", **query)) if query else {}
        model = self.body_field.field_info.annotation if self.body_field else None
        if isinstance(model, type) and issubclass(model, RequestBody):
            return Rules(schemas | properties_of(model), model.other_api_fields)
        kinds = {each.kind_of_body(): each for each in _models_of(model)}
        for each in kinds.values():
            schemas |= properties_of(each)
        return Rules(schemas | ({"kind": {"enum": [*kinds]}} if kinds else {}), {}, kinds)


def _models_of(union: Any) -> list[type[RequestBody]]:
    """Return the models of a body that has several kinds, each with its tag."""
    return [get_args(each)[0] for each in get_args(union) if get_origin(each) is Annotated]


def validate(model: type[M], values: Mapping[str, Any]) -> M:
    """Return the model of values that FastAPI has not read, such as a form's.

    Raises `InvalidParameter`, as a path operation does for its body.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        raise InvalidParameter(Rules(properties_of(model), {}).explain(faults)) from None


def properties_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of each field, and of a list's items, with what they refer to written out."""
    whole = model.model_json_schema()
    for field in whole["properties"].values():
        for schema in (field, field.get("items", {})):
            schema |= whole["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    return whole["properties"]


class Rule(NamedTuple):
    """Says in words what a parameter takes, for a value out of bounds and for a value of another type."""

    bounds: str
    type: str


class Rules:
    """What each parameter of a path operation takes, in words."""

    def __init__(
        self, schemas: dict[str, dict[str, Any]], other_api_fields: dict[str, str], kinds: Collection[str] = ()
    ) -> None:
        """`kinds` are those of a body, of which each has its own fields."""
        self._schemas = schemas
        self._other_api_fields = other_api_fields
        self._kinds = kinds

    def explain(self, faults: Any) -> str:
        """Write a clause for each parameter that is unknown, missing or breaks its rule."""
        names = [self._named(fault["loc"], str(fault["type"])) for fault in faults]
        unknown = [name for name, kind in names if kind == "extra_forbidden"]
        broken = {name: kind for name, kind in names if kind != "extra_forbidden"}
        clauses = [self._unknown(name) for name in unknown[:SHOWN_UNKNOWN_FIELDS]]
        clauses += [f"{name}: {self._broken(name, kind)}" for name, kind in broken.items()]
        return "; ".join(clauses)

    def _named(self, place: Sequence[Any], kind: str) -> tuple[str, str]:
        """Return the parameter that a fault is in, and the fault's kind for it."""
        if place[0] != "body":
            return str(place[-1]), kind
        if len(place) == 1:
            return "kind", kind  # of a body that has several, and is of none
        name, *inner = place[2:] if place[1] in self._kinds and len(place) > 2 else place[1:]
        return str(name), "inner_type" if inner and kind in ("missing", "extra_forbidden") else kind

    def _broken(self, name: str, kind: str) -> str:
        rule = rule_of(self._schemas[name])
        if kind == "missing":
            return f"is required, {rule.type}"
        return rule.type if kind.endswith("_type") or kind == "value_error" else rule.bounds

    def _unknown(self, name: str) -> str:
        if name in self._other_api_fields:
            return f"{name}: {self._other_api_fields[name]}"
        if name in self._schemas:
            return f"{name}: unknown field; only another kind has it"
        shown = name if name.isidentifier() and name.isascii() and len(name) <= SHOWN_NAME_LENGTH else "body"
        near = get_close_matches(name[:SHOWN_NAME_LENGTH].lower(), self._schemas, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(self._schemas)}"
        return f"{shown}: unknown field; {hint}"


def rule_of(schema: dict[str, Any]) -> Rule:
    """Describe a JSON Schema's constraints; of a parameter that may be absent, those of its value."""
    if "anyOf" in schema:
        schema = next(each for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema:
        choices = " or ".join(str(value) for value in schema["enum"])
        return Rule(f"must be {choices}", f"must be {choices}")
    if schema["type"] == "boolean":
        return Rule(*["must be true or false"] * 2)
    if schema["type"] == "object":
        names, texts = (schema[each]["maxLength"] for each in ("propertyNames", "additionalProperties"))
        pairs = f"at most {schema['maxProperties']} texts of at most {texts} characters, by names of at most {names}"
        return Rule(f"must be {pairs}", f"must be an object of {pairs}")
    if schema["type"] == "array" and "properties" in schema["items"]:
        fields = (f"{name} {rule_of(field).bounds}" for name, field in schema["items"]["properties"].items())
        objects = f"at most {schema['maxItems']} objects, in each of which {' and '.join(fields)}"
        return Rule(f"must be {objects}", f"must be a list of {objects}")
    if schema["type"] == "array":
        item = schema["items"]
        texts = f"at most {schema['maxItems']} texts of {item['minLength']} to {item['maxLength']} characters"
        return Rule(f"must be {texts}", f"must be a list of {texts}")
    if schema["type"] == "string":
        length = f"{schema['minLength']} to" if "minLength" in schema else "at most"
        length += f" {schema['maxLength']} characters"
        line = ", without control characters" if schema.get("pattern") == LINE_PATTERN else ""
        return Rule(f"must be {length} long{line}", f"must be a string of {length}{line}")
    if "minimum" not in schema:
        return Rule(*[f"must be an integer of at most {MAX_DIGITS} digits"] * 2)
    kind = "a number" if schema["type"] == "number" else "an integer"
    bounds = f"between {schema['minimum']} and {schema['maximum']}"
    if "multipleOf" in schema:
        multiple = f"a multiple of {schema['multipleOf']} {bounds}"
        return Rule(f"must be {multiple}", f"must be {kind}, {multiple}")
    return Rule(f"must be {bounds}", f"must be {kind} {bounds}")
