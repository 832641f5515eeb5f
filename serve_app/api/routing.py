"""ContractRoute: the contract's order of checks as a FastAPI route."""

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

from fastapi import Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, create_model
from starlette.responses import Response

from serve_app.api.body import MAX_DIGITS, read_json
from serve_app.api.dependencies import authenticate, check_query
from serve_app.api.errors import SHOWN_NAME_LENGTH, shown_name
from serve_app.api.schemas import LINE_PATTERN, RequestBody
from serve_app.domain.errors import InvalidParameter
from serve_app.tracing import set_caller

SHOWN_UNKNOWN_FIELDS = 5

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
                check_query(request)
            try:
                return await handle(request)
            except RequestValidationError as error:
                raise InvalidParameter(rules.explain(error.errors())) from None

        return handle_in_order

    def _rules(self) -> "Rules":
        """Read the rules from the schemas of the body and of the query parameters."""
        schemas = self.query_schemas()
        model = self.body_field.field_info.annotation if self.body_field else None
        if isinstance(model, type) and issubclass(model, RequestBody):
            return Rules(schemas | properties_of(model), model.other_api_fields)
        models = {each.kind_of_body(): each for each in _models_of(model)}
        kind = {"kind": {"enum": [*models]}} if models else {}
        others = {name: text for each in models.values() for name, text in each.other_api_fields.items()}
        return Rules(schemas | kind, others, {name: properties_of(each) | kind for name, each in models.items()})

    def query_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the schema of each query parameter, of those of dependencies too."""
        fields = [each for each in get_flat_params(self.dependant) if isinstance(each.field_info, Query)]
        query: dict[str, Any] = {field.alias: (field.field_info.annotation, field.field_info) for field in fields}
        return properties_of(create_model("Query", **query)) if query else {}


class ClosedRoute(ContractRoute):
    """Refuses a query parameter that it does not have; interfaces A and B ignore them, as they were published.

    The check is `check_query`, which comes after that of the key.
    """

    query: Mapping[str, bool]
    """Each query parameter, and whether it may be repeated."""

    def get_route_handler(self) -> Handler:
        self.query = {name: "items" in _of_value(schema) for name, schema in self.query_schemas().items()}
        return super().get_route_handler()


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
        raise InvalidParameter(
            Rules(properties_of(model), getattr(model, "other_api_fields", {})).explain(faults)
        ) from None


def properties_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of each field, and of a list's items, with what they refer to written out."""
    whole = model.model_json_schema()
    for field in whole["properties"].values():
        choices = (field, *field.get("anyOf", ()))
        for schema in (*choices, *(choice.get("items", {}) for choice in choices)):
            schema |= whole["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}
    return whole["properties"]


class Rule(NamedTuple):
    """Says in words what a parameter takes, for a value out of bounds and for a value of another type."""

    bounds: str
    type: str


class Field(NamedTuple):
    """A field of a request, `owner` being what stands before its name, with the schemas of its siblings."""

    owner: str
    name: str
    siblings: dict[str, dict[str, Any]]
    kind: str = ""

    @property
    def whole_name(self) -> str:
        return self.owner + self.name


class Rules:
    """What each parameter of a path operation takes, in words."""

    def __init__(
        self,
        schemas: dict[str, dict[str, Any]],
        other_api_fields: dict[str, str],
        kinds: Mapping[str, dict[str, dict[str, Any]]] | None = None,
    ) -> None:
        """`kinds` are those of a body, each with fields of its own."""
        self._schemas = schemas
        self._other_api_fields = other_api_fields
        self._kinds = kinds or {}

    def explain(self, faults: Any) -> str:
        """Write a clause for each parameter that is unknown, missing or breaks its rule.

        One that may be left out is also told not to be null, which is no rule of it (`none_required`).
        """
        found = [(self._field(each["loc"]), str(each["type"])) for each in faults if each["type"] != "none_required"]
        unknown = [field for field, kind in found if kind == "extra_forbidden"]
        broken = {field.whole_name: (field, kind) for field, kind in found if kind != "extra_forbidden"}
        clauses = [self._unknown(field) for field in unknown[:SHOWN_UNKNOWN_FIELDS]]
        clauses += [f"{name}: {self._broken(*fault)}" for name, fault in broken.items()]
        return "; ".join(clauses)

    def _field(self, place: Sequence[Any]) -> "Field":
        """Return the field at a fault's place: of the query, of the body, of one of its kinds or of an object in a list."""
        if place[0] != "body":
            return Field("", str(place[1]), self._schemas)
        if len(place) == 1:
            return Field("", "kind", self._schemas)  # the body names none of the kinds that there are
        is_tagged = place[1] in self._kinds and len(place) > 2
        kind, place = (str(place[1]), place[2:]) if is_tagged else ("", place[1:])
        schemas, name = self._kinds.get(kind, self._schemas), str(place[0])
        items = _of_value(schemas.get(name, {})).get("items", {}).get("properties")
        if items is not None and len(place) > 2:
            return Field(f"{name}[{place[1]}].", str(place[2]), items)
        return Field("", name, schemas, kind)

    def _broken(self, field: "Field", kind: str) -> str:
        rule = rule_of(field.siblings[field.name])
        if kind == "missing":
            return f"is required, {rule.type}"
        return rule.type if kind.endswith(("_type", "_parsing")) or kind == "value_error" else rule.bounds

    def _unknown(self, field: "Field") -> str:
        name, place = field.name, re.sub(r"\[\d+\]", "[]", field.whole_name)
        if place in self._other_api_fields:
            return f"{field.whole_name}: {self._other_api_fields[place]}"
        of_other = next((kind for kind, schemas in self._kinds.items() if name in schemas and field.kind), None)
        if of_other:
            return f"{name}: is for `kind: {of_other}` alone"
        near = get_close_matches(name[:SHOWN_NAME_LENGTH].lower(), field.siblings, n=1, cutoff=0.55)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(field.siblings)}"
        return f"{field.owner}{shown_name(name)}: unknown field; {hint}"


def _of_value(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter's value, for one that may be absent."""
    return next((each for each in schema.get("anyOf", ()) if each != {"type": "null"}), schema)


def rule_of(schema: dict[str, Any]) -> Rule:
    """Describe a JSON Schema's constraints; of a parameter that may be absent, those of its value."""
    schema = _of_value(schema)
    if "enum" in schema or "const" in schema:
        choices = " or ".join(str(value) for value in schema.get("enum") or [schema["const"]])
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
    if schema["type"] == "array" and "enum" in schema["items"]:
        return Rule(*[f"must be a list of {' or '.join(schema['items']['enum'])}"] * 2)
    if schema["type"] == "array":
        item = schema["items"]
        texts = f"at most {schema['maxItems']} texts of {item['minLength']} to {item['maxLength']} characters"
        return Rule(f"must be {texts}", f"must be a list of {texts}")
    if schema.get("format") == "date-time":
        return Rule(*["must be a time such as 2026-11-21T12:00:00Z"] * 2)
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
