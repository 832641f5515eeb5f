"""Security headers of every page, and rejection of a POST from another site."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.site import PAGE_HEADERS

HSTS = "max-age=31536000"


class Protection:
    """Refuses a POST that another site made the browser send, and sets the headers of every answer.

    `public_url` is the address behind a front proxy: an accepted origin, and https when it says so.
    """

    def __init__(self, app: ASGIApp, *, public_url: str) -> None:
        self._app = app
        self._public = urlsplit(public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._set_headers(MutableHeaders(scope=message), is_https=scope["scheme"] == "https")
            await send(message)

        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD") and not self._is_own_form(headers):
            response = PlainTextResponse("This form was not sent from the console's own pages.\n", 403)
            await response(scope, receive, send_protected)
            return
        await self._app(scope, receive, send_protected)

    def _is_own_form(self, headers: Headers) -> bool:
        """Whether the form is of our own pages: by `Sec-Fetch-Site`, or by `Origin` over plain http."""
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        origin = urlsplit(headers.get("origin", "")).netloc
        return bool(origin) and origin in (headers.get("host"), self._public.netloc)

    def _set_headers(self, headers: MutableHeaders, *, is_https: bool) -> None:
        for name, value in PAGE_HEADERS.items():
            headers[name] = value
        headers.setdefault("Cache-Control", "no-store")  # images say for how long
        if is_https or self._public.scheme == "https":
            headers["Strict-Transport-Security"] = HSTS
