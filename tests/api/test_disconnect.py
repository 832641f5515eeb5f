"""A caller that disconnects: its request is accepted whole or not at all; its upload leaves nothing."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.multipart import BLOCK_BYTES
from serve_app.domain.requests import Variant
from tests.api.app import BODY_A, Member, TestService
from tests.api.test_images import listed
from tests.api.test_loras import FILE_PART, uploads
from tests.support import existing, png_of, wait_until


async def test_a_request_whose_caller_left_after_its_body_is_accepted_whole(
    service: TestService, member: Member
) -> None:
    """Ray Serve cancels the handler when the client disconnects, here in the turn that read the body."""
    sent: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    async def receive() -> dict[str, Any]:
        loop.call_soon(calling.cancel)
        return {"type": "http.request", "body": json.dumps(BODY_A).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"path": "/v1/generate", "headers": [(b"authorization", member.a["Authorization"].encode())]}
    calling = asyncio.ensure_future(service.call(scope, receive, send))
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert sent == []
    await wait_until(lambda: _accepted(service, member))


async def test_a_picture_whose_caller_left_keeps_its_file_until_it_is_stored(
    service: TestService, member: Member, tmp_path: Path
) -> None:
    resources, file = service.resources, tmp_path / "picture"
    file.write_bytes(png_of((8, 8)))
    caller = existing((await resources.auth.authenticate(member.key, Variant.A, counted=False)).caller)

    async def bring() -> None:
        async with AsyncExitStack() as place:
            place.callback(file.unlink)
            await resources.for_jobs.uploads.add(caller, file, place=place)

    bringing = asyncio.create_task(bring())
    await asyncio.sleep(0)
    bringing.cancel()
    await asyncio.wait([bringing])
    assert bringing.cancelled()
    assert file.exists()
    await wait_until(lambda: not file.exists())
    assert len(await listed(service, member)) == 1


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_an_upload_whose_caller_left_leaves_no_folder_however_often_it_is_cancelled(
    service: TestService, member: Member, cancels: int
) -> None:
    """Ray Serve cancels the handler, more than once.

    Here that comes in the turn of the loop that shows the folder, or some turns later.
    """
    key, form = member.a["Authorization"].encode(), b"multipart/form-data; boundary=b"
    scope = {"path": "/v1/loras", "headers": [(b"authorization", key), (b"content-type", form)]}
    for turns in range(0, 40, 2):
        blocks = iter((FILE_PART + bytes(BLOCK_BYTES), bytes(BLOCK_BYTES)))

        async def receive(blocks: Iterator[bytes] = blocks) -> dict[str, Any]:
            if (block := next(blocks, None)) is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": block, "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            raise AssertionError(message)

        uploading = asyncio.ensure_future(service.call(scope, receive, send))
        async with asyncio.timeout(10):
            while not uploads(service):  # noqa: ASYNC110 - it is looked at in each turn of the loop
                await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for _ in range(cancels):
            uploading.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([uploading])
        assert uploading.cancelled()
        await wait_until(lambda: not uploads(service), timeout=10)


async def _accepted(service: TestService, member: Member) -> bool:
    return len(await service.resources.job_history.list(member.account.id)) == 1
