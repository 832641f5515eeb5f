"""Serves image files to everybody who has their signed address."""

import re

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.domain.errors import NotFound

_UNIX_TIME = re.compile(r"[0-9]{1,12}")
_HEADERS = {
    "Cache-Control": "private, max-age=86400, immutable",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Content-Disposition": "inline",
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Referrer-Policy": "no-referrer",
}
"""An image's name is never used twice, so its bytes never change; a page of any origin may show it."""

FILES = "/files/"

router = APIRouter()


@router.get(FILES + "{name:path}", response_class=Response)
async def open_file(request: Request, name: str, exp: str = "", kid: str = "", sig: str = "") -> Response:
    resources = resources_of(request)
    images = resources.images
    try:
        if not _UNIX_TIME.fullmatch(exp) or not images.verify(name, exp, kid, sig):
            raise NotFound("There is no such image.")
        if not await resources.image_access.is_open(name.split("/")[-2]):
            raise NotFound("There is no such image.")
        png = await images.get(images.uri(name))
    except NotFound:
        raise NotFound("There is no such image, or its address is no longer valid.") from None
    return Response(png, media_type="image/png", headers=_HEADERS)
