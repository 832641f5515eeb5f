"""The MCP SDK's own client talks to the running service's `/mcp`, and to `atelier mcp`, which passes it on."""

import asyncio
import base64
import json
import re
import sys
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import ImageContent, ResourceLink, TextContent
from PIL import Image

from serve_app.api.mcp import tools
from serve_app.domain.accounts import Account, Scope
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.settings import Settings
from tests.live import Live, live_service
from tests.support import ROOT, adapter_id, wait_until

KINDS = ["HTTP", "HTTP of 2025", "standard input"]
BOTH = {"Accept": "application/json, text/event-stream"}


def connect(live: Live, key: str, kind: str) -> Client:
    """Return a client: of the newest protocol, of the one before, which begins by a handshake, or by `atelier mcp`."""
    if kind == "standard input":
        environment, arguments = {"ATELIER_URL": live.base_url, "ATELIER_KEY": key}, ["-m", "deployments", "mcp"]
        return Client(StdioServerParameters(command=sys.executable, args=arguments, env=environment, cwd=str(ROOT)))
    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30)
    transport = streamable_http_client(f"{live.base_url}/mcp", http_client=http)
    return Client(transport, mode="legacy" if kind == "HTTP of 2025" else "auto")


def drawn(content: Sequence[object]) -> tuple[bytes, ResourceLink, str]:
    """Return the small picture, the link and the words of a result of one image."""
    picture, link, words = content
    assert isinstance(picture, ImageContent)
    assert isinstance(link, ResourceLink)
    assert isinstance(words, TextContent)
    return base64.b64decode(picture.data), link, words.text


def newest_is(state: JobState, live: Live, account: Account) -> bool:
    return next(iter(live.run(live.resources.job_history.list(account.id)))).state is state


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_an_assistant_draws_enlarges_lists_and_cancels_what_it_gives_up(live: Live, kind: str) -> None:
    live.outcome = "complete"
    account, key = live.member(f"of {kind}", plan_a="unlimited")
    async with connect(live, key, kind) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["generate", "upscale", "list_loras"]
        assert "kind" not in tools["upscale"].input_schema["properties"]
        assert "Neon" in str((await client.call_tool("list_loras", {})).content)
        asked = {"prompt": "a boat", "loras": [{"id": "neon", "weight": 0.5}], "width": 768, "seed": 7, "steps": None}
        seen: list[float] = []

        async def follow(progress: float, total: float | None, message: str | None) -> None:
            seen.append(progress / (total or 1))

        result = await client.call_tool("generate", asked, progress_callback=follow)
        small, link, words = drawn(result.content)
        assert seen[-1] == 1
        assert max(Image.open(BytesIO(small)).size) <= 320
        found = re.fullmatch(r"(img_[a-z2-7]{26}), 768 × 512 pixels, seed 7: (http\S+)", words)
        assert found
        assert (link.name, link.uri, link.mime_type) == (found[1], found[2], "image/png")
        assert (await asyncio.to_thread(httpx.get, link.uri)).content.startswith(b"\x89PNG")
        assert result.structured_content["images"][0]["image_id"] == found[1]
        larger = await client.call_tool("upscale", {"image_id": found[1], "scale_factor": 2})
        assert "1536 × 1024" in drawn(larger.content)[2]

        resources = {each.name: str(each.uri) for each in (await client.list_resources()).resources}
        read = [(await client.read_resource(resources[name])).contents[0] for name in ("pocket", "Neon")]
        base, lora = (json.loads(each.text) for each in read)  # pyright: ignore[reportAttributeAccessIssue]
        assert (base["usual_side"], lora["id"]) == (512, adapter_id("neon"))
        with pytest.raises(MCPError, match="no such base model"):
            await client.read_resource("atelier://loras/nothing")

        live.outcome = "leave"
        given_up = asyncio.create_task(client.call_tool("generate", {"prompt": "given up"}))
        await wait_until(lambda: newest_is(JobState.QUEUED, live, account))
        given_up.cancel()
        if kind != "HTTP of 2025":  # whose client says so in another message, which belongs to none
            await wait_until(lambda: newest_is(JobState.CANCELED, live, account))
        left = asyncio.create_task(client.call_tool("upscale", {"image_id": found[1]}))
        await wait_until(lambda: newest_is(JobState.QUEUED, live, account))
    await asyncio.gather(given_up, left, return_exceptions=True)
    await wait_until(lambda: newest_is(JobState.CANCELED, live, account))
    requests = [job.request for job in live.run(live.resources.job_history.list(account.id))]
    *_, request = (each for each in requests if isinstance(each, GenerationRequest))
    assert (request.loras, request.width, request.seed) == ((LoraUse(adapter_id("neon"), 0.5),), 768, 7)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another service's name": ({"n": 4}, "n: is called `num_images` here"),
    "a slip": ({"num_imges": 4, "step": 2}, "num_imges: unknown field; did you mean num_images?; step: unknown field"),
    "of a LoRA": ({"loras": [{"id": "neon", "wight": 1}]}, "loras[0].wight: unknown field; did you mean weight?"),
    "an unknown LoRA": (
        {"loras": [{"id": "nothing"}]},
        "loras[0].id: must be the id or name of a LoRA that you may use",
    ),
    "another kind": ({"kind": "upscale"}, "kind: must be generation"),
    "an inner webhook": ({"webhook_url": "https://127.0.0.1/"}, "webhook_url: "),
    "the base model's": ({"width": 4000}, "width: must be a multiple of 8 between 256 and 2048"),
}


@pytest.mark.parametrize(("fields", "words"), WRONG.values(), ids=WRONG.keys())
async def test_nothing_that_an_assistant_asks_for_is_swallowed(live: Live, fields: dict[str, Any], words: str) -> None:
    account, key = live.member(f"wrong {words}", plan_a="unlimited")
    async with connect(live, key, "HTTP") as client:
        refused = await client.call_tool("generate", {"prompt": "a boat", **fields})
        assert refused.is_error
        assert words in refused.content[0].text  # pyright: ignore[reportAttributeAccessIssue]
    assert not list(live.run(live.resources.job_history.list(account.id)))


def post(
    live: Live, key: str, method: str, params: Any = None, headers: Any = None, path: str = "/mcp"
) -> httpx.Response:
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
    given = {"Authorization": f"Bearer {key}", **BOTH, **(headers or {})}
    return httpx.post(f"{live.base_url}{path}", json=message, headers=given)


def test_pages_and_strangers_are_kept_out(live: Live) -> None:
    _, key = live.member("kept out", plan_a="unlimited")
    refused = [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "rebound.example"}, 403),
        ({"Origin": "https://page.example"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://[page]"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ]
    for headers, status in refused:
        assert post(live, key, "tools/list", headers=headers).status_code == status, headers
    for headers in ({"Origin": live.base_url}, {"Host": "gpu-box"}, {"Host": "[::1]:8000"}):
        assert post(live, key, "tools/list", headers=headers).status_code == 200, headers
    assert post(live, key, "tools/list", path="/mcp/").status_code == 200, "as many write it"
    assert httpx.get(f"{live.base_url}/mcp").headers["allow"] == "POST"
    large = httpx.post(f"{live.base_url}/mcp", content=b" " * 70_000, headers={"Authorization": f"Bearer {key}"})
    assert (large.status_code, large.json()["error"]["data"]) == (413, {"code": "payload_too_large"})


async def test_an_assistant_is_told_what_is_wrong_with_its_key(live: Live) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(MCPError, match="API key is not valid"), flatten_subgroups=True):
        async with connect(live, "atl_wrong", "standard input") as client:
            await client.list_tools()


def test_names_that_the_operator_lists_are_let_in(settings: Settings) -> None:
    named = {"mcp_hosts": ("Atelier.example",), "public_url": "https://images.example"}
    with live_service(settings.model_copy(update=named)) as live:
        _, key = live.member()
        for name in ("atelier.example", "images.example:443"):
            assert (
                post(live, key, "tools/list", headers={"Host": name, "Origin": named["public_url"]}).status_code == 200
            )


def test_calls_are_counted_and_a_key_that_only_reads_draws_nothing(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = live.member("counted", plan_a="single")
    assert [post(live, key, "tools/list").headers["x-ratelimit-remaining"] for _ in range(3)] == ["1"] * 3
    for words in ("Neon", "Your plan allows 1 requests per hour"):
        assert words in post(live, key, "tools/call", {"name": "list_loras"}).text
    asked = {"name": "generate", "arguments": {"prompt": "a boat"}}
    account, _ = live.member("reading", plan_a="unlimited")
    keys, reads = live.resources.api_keys, frozenset({Scope.READ})
    _, reader = live.run(keys.create(account.id, interfaces=frozenset(Variant), scopes=reads))
    assert "lacks the scope 'generate'" in post(live, reader, "tools/call", asked).text
    found = post(live, reader, "tools/call", {"name": "list_loras", "arguments": {"q": "model_ NEON"}}).text
    assert ("Neon" in found, "Outline" in found, '"left_out":0' in found) == (True, False, True)
    monkeypatch.setattr(tools, "PAGE", 1)
    assert '"left_out":0' not in post(live, reader, "tools/call", {"name": "list_loras"}).text
