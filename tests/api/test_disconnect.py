"""A caller that disconnects: its request is accepted whole or not at all."""

import asyncio
import json
from typing import Any

import httpx

from tests.api.app import BODY_A, Member, TestService
from tests.support import wait_until


async def test_a_request_whose_caller_left_after_its_body_is_accepted_whole(
    service: TestService, member: Member
) -> None:
    """Ray Serve cancels the handler when the client disconnects, here in the turn that read the body."""
    transport = service.client._transport  # pyright: ignore[reportPrivateUsage] # the application is in it
    assert isinstance(transport, httpx.ASGITransport)
    sent: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    async def receive() -> dict[str, Any]:
        loop.call_soon(calling.cancel)
        return {"type": "http.request", "body": json.dumps(BODY_A).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/generate",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"authorization", member.a["Authorization"].encode())],
        "server": ("service.test", 80),
    }
    calling = asyncio.ensure_future(transport.app(scope, receive, send))  # pyright: ignore[reportArgumentType]
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert sent == []
    await wait_until(lambda: _accepted(service, member))


async def _accepted(service: TestService, member: Member) -> bool:
    return len(await service.resources.job_history.list(member.account.id)) == 1
