"""Which pages the console has for keys, and which roles may open which page.

Keys are made on *API* and *API Keys*, as the two documents call them, and on *Both interfaces*. Guards and links ask
`ROLES`, the one table of who may open what.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from serve_app.domain.accounts import Role, Scope
from serve_app.domain.requests import Variant

KEY_NAME_LENGTH = 60
ROLL_GRACE = timedelta(days=1)
"""A rolled key still works for this long, as its successor does."""
SCOPES: Mapping[Scope, str] = {
    Scope.READ: "Read jobs, images and LoRAs",
    Scope.GENERATE: "Generate, upscale, cancel and delete",
    Scope.LORAS: "Add, change, share and delete LoRAs",
}


class Expiry(NamedTuple):
    """A choice of how long a key works, in words; `life` is None for one that works for good."""

    words: str
    life: timedelta | None


EXPIRIES: Mapping[str, Expiry] = {
    "": Expiry("Never", None),
    "30": Expiry("In 30 days", timedelta(days=30)),
    "90": Expiry("In 90 days", timedelta(days=90)),
    "365": Expiry("In a year", timedelta(days=365)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPage:
    """A page for keys: its texts, and how its keys are sent. `variant` is the interface of its examples."""

    slug: str
    title: str
    button: str
    variant: Variant
    header: str
    about: str
    other_header: str = ""
    """The header for the other interface, on the page whose keys work on both."""

    @property
    def interfaces(self) -> frozenset[Variant]:
        """The interfaces on which its keys work."""
        return frozenset(Variant) if self.other_header else frozenset({self.variant})


API = KeyPage(
    slug="api",
    title="API",
    button="Generate API key",
    variant=Variant.A,
    header="Authorization: Bearer",
    about="Keys for the bearer interface: generate up to four images a request, and upscale them.",
)
API_KEYS = KeyPage(
    slug="api-keys",
    title="API Keys",
    button="Create new API key",
    variant=Variant.B,
    header="X-API-Key:",
    about="Keys for the X-API-Key interface: one image a run, with a negative prompt and free sizes.",
)
BOTH = KeyPage(
    slug="both",
    title="Both interfaces",
    button="Create key for both",
    variant=Variant.A,
    header="Authorization: Bearer",
    about="Active keys on the bearer interface and with X-API-Key, each within its own plan.",
    other_header="X-API-Key:",
)
KEY_PAGES = (API, API_KEYS)
"""Each interface has one of these pages."""
ALL_KEY_PAGES = (*KEY_PAGES, BOTH)


_ALL = frozenset(Role)
_DRAWING = frozenset({Role.OWNER, Role.MEMBER})
_OWNER = frozenset({Role.OWNER})
ROLES: Mapping[str, frozenset[Role]] = {
    "/playground": _DRAWING,
    "/compare": _DRAWING,
    "/pictures": _DRAWING,
    "/pictures/verify": _ALL,
    "/history": _DRAWING,
    "/loras": _DRAWING,
    "/verify": _ALL,
    "/usage": _ALL,
    "/usage.csv": _ALL,
    "/settings": _ALL,
    "/settings/delete-account": _OWNER,
    "/settings/password": _ALL,
    "/settings/sessions": _ALL,
    "/settings/users": _OWNER,
    "/settings/{slug}": _DRAWING,
}
"""The longest beginning of a route's path decides which roles may open it; others are for owners alone."""


def may_open(role: Role, path: str) -> bool:
    """Return whether the role may open a route's path."""
    parts = path.split("/")
    beginnings = ("/".join(parts[:length]) for length in range(len(parts), 1, -1))
    return role in next((ROLES[each] for each in beginnings if each in ROLES), _OWNER)


def home_of(role: Role) -> str:
    """Return the page that a role sees first."""
    return "playground" if may_open(role, "/playground") else "usage"
