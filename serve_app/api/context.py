"""RequestContext: what is known about the request being answered."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from serve_app.domain.accounts import Caller, Window
from serve_app.domain.requests import Variant

_KEY = "atelier.context"


@dataclass(slots=True)
class RequestContext:
    """Created by the middleware, filled in by authentication, read when the response starts.

    `variant` is the interface whose lowest plan an unknown caller sees in the rate headers.
    """

    request_id: str
    variant: Variant | None = None
    window: Window | None = None
    caller: Caller | None = None
    route: str = ""
    """Of an answer that no application gave."""
    error_code: str = ""
    """Of an error answer."""

    @classmethod
    def of(cls, request: HTTPConnection | Scope) -> "RequestContext":
        return request[_KEY]

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
