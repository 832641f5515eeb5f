"""The MCP SDK's own client talks to `atelier mcp`, which draws with the running service."""

import asyncio
import base64
import re
import sys
from collections.abc import Sequence

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import ImageContent, TextContent

from serve_app.domain.accounts import Account
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import GenerationRequest, LoraUse
from tests.live import Live
from tests.support import ROOT, adapter_id, wait_until


def drawn(content: Sequence[object]) -> tuple[bytes, str]:
    """Return the picture and the words of a result."""
    assert len(content) == 2, content
    picture, words = content
    assert isinstance(picture, ImageContent)
    assert isinstance(words, TextContent)
    return base64.b64decode(picture.data), words.text


def newest_is(state: JobState, live: Live, account: Account) -> bool:
    return next(iter(live.run(live.resources.job_history.list(account.id)))).state is state


@pytest.mark.slow
async def test_an_assistant_draws_enlarges_lists_and_cancels_what_it_gives_up(live: Live) -> None:
    account, key = live.member()
    environment = {"ATELIER_URL": live.base_url, "ATELIER_KEY": key}
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "deployments", "mcp"], env=environment, cwd=str(ROOT)
    )
    async with Client(command) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == {"generate", "upscale", "list_loras"}
        listed = await client.call_tool("list_loras", {})
        assert "Neon" in str(listed.content)
        asked = {"prompt": "a boat", "loras": {"neon": 0.5}, "width": 768, "height": 512, "seed": 7}
        seen: list[float] = []

        async def follow(progress: float, total: float | None, message: str | None) -> None:
            seen.append(progress / (total or 1))

        png, words = drawn((await client.call_tool("generate", asked, progress_callback=follow)).content)
        assert seen[-1] == 1
        assert png.startswith(b"\x89PNG")
        found = re.fullmatch(r"(img_[a-z2-7]{26}), seed 7: (http\S+)", words)
        assert found
        assert found[2].startswith(live.base_url)
        larger, words = drawn((await client.call_tool("upscale", {"image_id": found[1], "scale_factor": 2})).content)
        assert "1536 × 1024" in words
        assert larger.startswith(b"\x89PNG")
        refused = await client.call_tool("generate", asked | {"loras": {"nothing": 1.0}})
        assert refused.is_error
        assert "Neon" in str(refused.content), "it says which there are"
        live.outcome = "leave"
        given_up = asyncio.create_task(client.call_tool("generate", {"prompt": "given up"}))
        await wait_until(lambda: newest_is(JobState.QUEUED, live, account))
        given_up.cancel()
        await wait_until(lambda: newest_is(JobState.CANCELED, live, account))
        left = asyncio.create_task(client.call_tool("upscale", {"image_id": found[1]}))
        await wait_until(lambda: newest_is(JobState.QUEUED, live, account))
    await asyncio.gather(given_up, left, return_exceptions=True)
    await wait_until(lambda: newest_is(JobState.CANCELED, live, account))
    requests = [job.request for job in live.run(live.resources.job_history.list(account.id))]
    *_, request = (each for each in requests if isinstance(each, GenerationRequest))
    assert (request.loras, request.width, request.seed) == ((LoraUse(adapter_id("neon"), 0.5),), 768, 7)
