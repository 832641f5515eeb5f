"""What is known about the request now being answered: its id, and where its caller stands in the plan's window."""

from dataclasses import dataclass

from starlette.types import Scope

from serve_app.domain.accounts import Window

_KEY = "atelier.exchange"


@dataclass(slots=True)
class Exchange:
    """Made by the edge, filled by the rooms, read by the edge when the answer leaves."""

    request_id: str
    window: Window | None = None


def exchange_of(scope: Scope) -> Exchange:
    return scope[_KEY]


def with_exchange(scope: Scope, exchange: Exchange) -> Scope:
    return {**scope, _KEY: exchange}
