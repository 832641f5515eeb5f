"""Serves the guide at `/guide` to anybody: the static pages that `make guide` builds from `docs/`."""

import asyncio
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serve_app.domain.errors import NotFound
from serve_app.web.site import PAGE_HEADERS, takes_gzip

SITE = Path(__file__).parent / "site"
POLICY = "content-security-policy.txt"
"""The build writes the policy that its pages need: the scripts within them are named by hashes."""
_NAMED_BY_CONTENT = re.compile(r"\.[0-9a-f]{8}\.min\.(js|css)$")


def is_built() -> bool:
    return (SITE / POLICY).exists()


class Guide(StaticFiles):
    """The files of the built guide, compressed where a caller takes them so, each page as Markdown too."""

    def __init__(self, site: Path = SITE) -> None:
        super().__init__(directory=site, html=True, check_dir=False)
        self._policy, self._missing = site / POLICY, site / "404.html"
        self.config_checked = True  # where nothing has been built, the answer is 404 and says so

    async def get_response(self, path: str, scope: Scope) -> Response:
        try:
            policy = await asyncio.to_thread(self._policy.read_text)
        except FileNotFoundError:
            raise NotFound("The guide has not been built here: `make guide` builds it.") from None
        response = await super().get_response(path, scope)
        if response.status_code == 404:  # this page alone has whole addresses, since it answers at any
            page = await asyncio.to_thread(self._missing.read_text)
            response = HTMLResponse(page.replace('"/guide/', f'"{scope["root_path"]}/'), 404)
        is_lasting = response.status_code < 400 and _NAMED_BY_CONTENT.search(path)
        response.headers.update(PAGE_HEADERS)
        response.headers["Content-Security-Policy"] = policy
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable" if is_lasting else "no-cache"
        response.headers["Vary"] = "Accept-Encoding"
        if "location" in response.headers:  # its last slash; the host and scheme are what the caller's proxy says
            address = urlsplit(response.headers["location"])
            response.headers["Location"] = address._replace(scheme="", netloc="").geturl()
        return response

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        packed = f"{full_path}.gz"
        if not (takes_gzip(scope) and os.path.exists(packed)):
            return super().file_response(full_path, stat_result, scope, status_code)
        response = super().file_response(packed, os.stat(packed), scope, status_code)
        response.headers["Content-Encoding"] = "gzip"
        return response
