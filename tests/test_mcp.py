"""The MCP SDK's own client talks to `atelier mcp`, which draws with the running service."""

import base64
import re
import sys
from collections.abc import Sequence

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import ImageContent, TextContent

from serve_app.domain.requests import GenerationRequest, LoraUse
from tests.live import Live
from tests.support import ROOT, adapter_id


def drawn(content: Sequence[object]) -> tuple[bytes, str]:
    """Return the picture and the words of a result."""
    assert len(content) == 2, content
    picture, words = content
    assert isinstance(picture, ImageContent)
    assert isinstance(words, TextContent)
    return base64.b64decode(picture.data), words.text


@pytest.mark.slow
async def test_an_assistant_draws_enlarges_and_lists(live: Live) -> None:
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
        png, words = drawn((await client.call_tool("generate", asked)).content)
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
    requests = [job.request for job in live.run(live.resources.job_history.list(account.id))]
    (request,) = (each for each in requests if isinstance(each, GenerationRequest))
    assert (request.loras, request.width, request.seed) == ((LoraUse(adapter_id("neon"), 0.5),), 768, 7)
