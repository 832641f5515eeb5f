"""An HTML page whose rendering lets other requests go on."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import Template
from starlette.responses import HTMLResponse
from starlette.types import Receive, Scope, Send

YIELDS_AFTER_S = 0.001
"""A poll of the API waits behind a page no longer than this."""


class PageResponse(HTMLResponse):
    """Renders a template while it is sent, in pieces, so that the event loop can serve others between.

    An error is raised before a byte is sent.
    """

    def __init__(self, template: Template, values: Mapping[str, Any], status: int = 200) -> None:
        super().__init__(status_code=status)
        self._template, self._values = template, values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = (await self._render()).encode()
        self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    async def _render(self) -> str:
        parts: list[str] = []
        yields_at = time.perf_counter() + YIELDS_AFTER_S
        for part in self._template.generate(self._values):
            parts.append(part)
            if time.perf_counter() >= yields_at:
                await asyncio.sleep(0)
                yields_at = time.perf_counter() + YIELDS_AFTER_S
        return "".join(parts)
