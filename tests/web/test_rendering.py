"""A page is rendered in pieces between which other requests go on, and whole or not at all."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import Environment, StrictUndefined, UndefinedError

from serve_app.web.site.pages import YIELDS_AFTER_S, PageResponse

ROWS = 20
TEMPLATES = Environment(autoescape=True, undefined=StrictUndefined)


async def _sent(page: PageResponse) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    await page({"type": "http", "method": "GET"}, _receive, send)
    return messages


async def _receive() -> Any:
    raise AssertionError("a page reads nothing")


def _slow_rows() -> Iterator[str]:
    """Yield rows that each take as long as a piece may."""
    for number in range(ROWS):
        until = time.perf_counter() + YIELDS_AFTER_S
        while time.perf_counter() < until:
            pass
        yield f"<{number}>"


async def test_others_go_on_while_a_long_page_is_rendered() -> None:
    turns = 0

    async def another() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    page = PageResponse(
        TEMPLATES.from_string("{% for row in rows %}{{ row }}{% endfor %}é"), {"rows": _slow_rows()}, 404
    )
    beside = asyncio.create_task(another())
    start, body = await _sent(page)
    beside.cancel()
    assert turns >= ROWS - 1
    assert start["status"] == 404
    assert body["body"].decode() == "".join(f"&lt;{number}&gt;" for number in range(ROWS)) + "é"
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


async def test_of_a_page_that_cannot_be_rendered_nothing_is_sent() -> None:
    page = PageResponse(TEMPLATES.from_string("begun {{ nothing }}"), {})
    with pytest.raises(UndefinedError):
        await _sent(page)
