"""The layout, style, scripts and headers of all pages, which load nothing from elsewhere."""

import gzip
import os
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from serve_app.domain.durations import period_text

_HERE = Path(__file__).parent
STATIC = _HERE / "static"

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # not no-referrer: under it browsers send `Origin: null` with our own forms, which the console's protection refuses
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Pages run nothing inline and load nothing from elsewhere; they fetch parts of themselves from this service."""


def page_templates(folder: Path) -> Environment:
    """The templates of a folder, over the shared layout."""
    templates = Environment(
        loader=FileSystemLoader([folder, _HERE / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"period": period_text, "size": size_text}
    return templates


def size_text(number: float) -> str:
    """Write bytes in decimal units: `850 kB`, `1.2 GB`."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}" if number < 10 * length else f"{number / length:.0f} {unit}"
    return f"{number:.0f} B"


_TAKES_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)


def takes_gzip(scope: Scope) -> bool:
    return _TAKES_GZIP.search(Headers(scope=scope).get("accept-encoding", "")) is not None


class SiteFiles(StaticFiles):
    """Serves `static/`: browsers keep pictures for five minutes, and revalidate styles and scripts.

    Styles and scripts are compressed once, when the application is built.
    """

    def __init__(self, folder: Path = STATIC) -> None:
        super().__init__(directory=folder)
        code = (path for path in folder.rglob("*") if path.suffix in (".css", ".js"))
        self._packed = {str(path): gzip.compress(path.read_bytes(), mtime=0) for path in code}

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        is_code = path.endswith((".css", ".js"))  # a page of this version must not meet those of the one before
        response.headers.update({**PAGE_HEADERS, "Cache-Control": "no-cache" if is_code else "public, max-age=300"})
        return response

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        plain = super().file_response(full_path, stat_result, scope, status_code)
        packed = self._packed.get(str(full_path))
        if packed is None:
            return plain
        plain.headers.update({"Vary": "Accept-Encoding", "ETag": f"W/{plain.headers['etag']}"})  # of both encodings
        if plain.status_code != 200 or not takes_gzip(scope):
            return plain
        headers = {**plain.headers, "content-encoding": "gzip", "content-length": str(len(packed))}
        return Response(packed, headers=headers)
