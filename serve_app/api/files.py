"""Image files under their signed addresses: whoever holds the address may open it, and nothing else tells that it exists."""

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api.answers import refusal
from serve_app.domain.errors import NotFound
from serve_app.stores.images import ImageStore

_UNIX_TIME = re.compile(r"[0-9]{1,12}")
_HEADERS = {
    "Cache-Control": "private, max-age=86400, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Content-Disposition": "inline",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Referrer-Policy": "no-referrer",
}
"""An image's name is never used twice, so its bytes never change; a page of any origin may show it."""


def routes(images: ImageStore) -> list[Route]:
    async def open_file(request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        try:
            expires = query.get("exp", "")
            if not _UNIX_TIME.fullmatch(expires):
                raise NotFound("no such image")
            if not images.verify(name, expires, query.get("kid", ""), query.get("sig", "")):
                raise NotFound("no such image")
            png = await images.get(images.uri(name))
        except NotFound as error:
            return refusal(404, error.code, "There is no such image, or its address is no longer valid.")
        return Response(png, media_type="image/png", headers=_HEADERS)

    return [Route("/files/{name:path}", open_file, methods=["GET"])]
