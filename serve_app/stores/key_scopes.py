"""Scopes in an API key's record; a record without these fields has all of them."""

from serve_app.domain.accounts import ALL_SCOPES, Scope
from serve_app.domain.errors import InvalidParameter

MAX_ADAPTERS = 100
_BETWEEN = "\n"


def write_scopes(scopes: frozenset[Scope]) -> str:
    """Write scopes as a field. Raises `InvalidParameter` for none at all."""
    if not scopes:
        raise InvalidParameter(f"scopes: must name at least one of {', '.join(Scope)}")
    return "" if scopes == ALL_SCOPES else _BETWEEN.join(sorted(scopes))


def read_scopes(text: str) -> frozenset[Scope]:
    """Read scopes of a field; one that only a newer version knows allows nothing here."""
    return frozenset(scope for scope in Scope if scope in text.split(_BETWEEN)) if text else ALL_SCOPES


def write_adapters(adapters: frozenset[str] | None) -> str:
    """Write adapters as a field. Raises `InvalidParameter` for none at all, and for too many."""
    if adapters is None:
        return ""
    if not 1 <= len(adapters) <= MAX_ADAPTERS:
        raise InvalidParameter(f"adapters: must be 1 to {MAX_ADAPTERS} ids")
    return _BETWEEN.join(sorted(adapters))


def read_adapters(text: str) -> frozenset[str] | None:
    return frozenset(text.split(_BETWEEN)) if text else None
