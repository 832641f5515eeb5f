"""The pages that each role may open: one table, which guards and links ask."""

from collections.abc import Mapping

from serve_app.domain.accounts import Role

_ALL = frozenset(Role)
_DRAWING = frozenset({Role.OWNER, Role.MEMBER})
_OWNER = frozenset({Role.OWNER})
ROLES: Mapping[str, frozenset[Role]] = {
    "/playground": _DRAWING,
    "/compare": _DRAWING,
    "/history": _DRAWING,
    "/loras": _DRAWING,
    "/usage": _ALL,
    "/usage.csv": _ALL,
    "/settings": _ALL,
    "/settings/delete-account": _OWNER,
    "/settings/password": _ALL,
    "/settings/sessions": _ALL,
    "/settings/users": _OWNER,
    "/settings/{slug}": _DRAWING,
    "/sign-out": _ALL,
}
"""By the longest beginning of a route's path. What is not here is the owner's alone."""


def may_open(role: Role, path: str) -> bool:
    """Whether the role may open a route's path."""
    parts = path.split("/")
    beginnings = ("/".join(parts[:length]) for length in range(len(parts), 1, -1))
    return role in next((ROLES[each] for each in beginnings if each in ROLES), _OWNER)


def home_of(role: Role) -> str:
    """The page that a role sees first."""
    return "playground" if may_open(role, "/playground") else "usage"
