"""Finds the rate window of a caller whom no check has identified.

So it is at a path that does not exist, and at an image's address.
"""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Scope

from serve_app.api.context import RequestContext
from serve_app.api.credentials import SHARED_PATH, read_api_key, read_bearer, read_either
from serve_app.api.files import FILES
from serve_app.domain.accounts import Window
from serve_app.domain.errors import AmbiguousCredentials, StoreUnavailable, Unauthorized
from serve_app.domain.requests import Variant
from serve_app.stores.auth import Authenticator

_READERS = {Variant.A: read_bearer, Variant.B: read_api_key, None: read_either}


async def caller_window(
    authenticator: Authenticator, scope: Scope, context: RequestContext, status: int
) -> Window | None:
    """Return the window of a valid key, counting nothing; None without one, or where none is needed.

    Only text in the form of a key costs a round trip; an anonymous request costs none.
    """
    is_missing = status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if not is_missing and not path.startswith(FILES):
        return None
    read = _READERS[None if path == SHARED_PATH else context.variant]
    try:
        key, variant = read(Headers(scope=scope))
        return (await authenticator.authenticate(key, variant, counted=False)).window
    except (Unauthorized, AmbiguousCredentials, StoreUnavailable):
        return None
