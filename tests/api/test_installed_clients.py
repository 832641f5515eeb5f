"""Clients that others publish draw, edit and list against the running service, and send what is recorded of them.

They are installed at their first use, beside the environment's packages, as the generators of clients are: no test of
`make test` asks a registry. OpenAI's package of Python and the MCP SDK's client are tested there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.app import LORA
from tests.api.test_generated_clients import NODE, NPM, PIP, WHEEL, install, kept, run
from tests.api.test_openai import CLIENTS
from tests.live import Live
from tests.support import adapter_id

OF_NPM = (
    "ai@7.0.173", "@ai-sdk/openai@4.0.118", "openai@7.59.0", "@langchain/core@1.2.13", "@langchain/openai@1.6.0",
    "@modelcontextprotocol/inspector@2.12.0",
)  # fmt: skip
OF_PYPI = ("langchain-community==0.4.2", "langchain-core==1.8.3")
"""What else these two need, the environment has."""
RECORDED = """
const [baseURL, apiKey, lora] = process.argv.slice(2), sent = [], fetched = globalThis.fetch;
globalThis.fetch = (url, init) => {
  if (typeof init?.body === "string") sent.push(JSON.parse(init.body));
  return fetched(url, init);
};
"""
AI_SDK = """
import { generateImage } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
const model = createOpenAI({ baseURL, apiKey }).image("pocket");
const { images } = await generateImage({ model, prompt: "a boat", n: 2, size: "512x512" });
const prompt = { text: "a ship", images: [images[0].uint8Array] };
const edited = await generateImage({ model, prompt, size: "256x256" });
console.log(JSON.stringify([sent, images.length, edited.image.mediaType, edited.usage.outputTokens]));
"""
OPENAI = """
import OpenAI, { toFile } from "openai";
const { images, models } = new OpenAI({ baseURL, apiKey });
const boat = { model: "Outline", prompt: "a boat" };
const { data } = await images.generate({ ...boat, n: 2, output_format: "webp", response_format: "b64_json" });
const image = await toFile(Buffer.from(data[0].b64_json, "base64"), "boat.webp", { type: "image/webp" });
const edited = await images.edit({ image, prompt: "a ship", size: "256x256" });
const events = [];
for await (const event of await images.generate({ ...boat, stream: true })) events.push(event.type);
const { status, param, code } = await images.generate({ ...boat, size: "300x300" }).catch((error) => error);
const named = (await models.list()).data.map((model) => model.id);
console.log(JSON.stringify([edited.data.length, events, status, param, code, named.includes(lora)]));
"""
LANGCHAIN_JS = """
import { DallEAPIWrapper } from "@langchain/openai";
const url = await new DallEAPIWrapper({ baseUrl: baseURL, apiKey }).invoke("a boat");
console.log(JSON.stringify([sent, (await fetch(url)).headers.get("content-type")]));
"""
LANGCHAIN = """
import json, sys, httpx, httpx2
from langchain_community.utilities.dalle_image_generator import DallEAPIWrapper
sent, send = [], httpx2.Client.send
httpx2.Client.send = lambda http, asked, **how: (sent.append(json.loads(asked.content)), send(http, asked, **how))[1]
url = DallEAPIWrapper(base_url=sys.argv[1], api_key=sys.argv[2]).run("a boat")
print(json.dumps([sent, httpx.get(url).headers["content-type"]]))
"""
SENT = {name: {"prompt": "a boat", **body} for name, (body, _) in CLIENTS.items()}
PROGRAMS: dict[str, tuple[str, list[Any]]] = {
    "AI SDK": (AI_SDK, [[SENT["AI SDK"]] * 2, 2, "image/png", 256]),
    "openai": (OPENAI, [1, ["image_generation.completed"], 400, "size", "invalid_parameter", True]),
    "LangChain.js": (LANGCHAIN_JS, [[SENT["LangChain.js"]], "image/png"]),
    "LangChain": (LANGCHAIN, [[SENT["LangChain"]], "image/png"]),
}
"""Each client's program, and what it prints."""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.xdist_group("generated clients")]
pytestmark.append(pytest.mark.skipif(WHEEL is None, reason="no node: it comes with pyright[nodejs]"))


@pytest.fixture(scope="module")
def key(live: Live) -> str:
    return live.member("clients", plan_a="unlimited")[1]


@pytest.fixture(scope="module")
def modules() -> Path:
    """A folder in which Node and Python find the packages."""
    home = kept("clients", " ".join((*OF_NPM, *OF_PYPI)))
    if not (home / "langchain_core").exists():
        npm = (*NPM, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--before", "2026-11-28")
        install(*npm, "--prefix", str(home), *OF_NPM)
        install(*PIP, "--target", str(home), *OF_PYPI)
    return home


@pytest.mark.parametrize(("name", "printed"), [(name, printed) for name, (_, printed) in PROGRAMS.items()])
def test_a_client_draws_and_sends_what_is_recorded(
    live: Live, key: str, modules: Path, name: str, printed: list[Any]
) -> None:
    source = PROGRAMS[name][0]
    program, by = (modules / "x.py", sys.executable) if name == "LangChain" else (modules / "x.mjs", str(NODE))
    program.write_text(source if name == "LangChain" else RECORDED + source)
    out = run(by, str(program), f"{live.base_url}/openai/v1", key, LORA, PYTHONPATH=str(modules))
    assert json.loads(out) == printed


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_mcp_inspector_lists_draws_and_reads(live: Live, key: str, modules: Path, tmp_path: Path, era: str) -> None:
    inspector = modules / "node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js"
    server = (f"{live.base_url}/mcp", "--header", f"Authorization: Bearer {key}", "--protocol-era", era)

    def call(method: str, *options: str) -> Any:
        command = (str(NODE), str(inspector), "--cli", *server, "--format", "json", "--quiet", "--method", method)
        return json.loads(run(*command, *options, HOME=str(tmp_path)))["result"]

    assert [tool["name"] for tool in call("tools/list", "--strict")["tools"]] == ["generate", "upscale", "list_loras"]
    generate = ("tools/call", "--tool-name", "generate", "--tool-arg", "prompt=a boat")
    drawn = call(*generate, "seed=7", 'loras=[{"id": "neon", "weight": 0.5}]')
    assert [part["type"] for part in drawn["content"]] == ["image", "resource_link", "text"]
    assert drawn["structuredContent"]["request"]["seeds"] == ["7"]
    with pytest.raises(AssertionError, match="num_imges: unknown field; did you mean num_images"):
        call(*generate, "num_imges=2")
    listed = {each["name"]: each["uri"] for each in call("resources/list")["resources"]}
    (read,) = call("resources/read", "--uri", listed["Neon"])["contents"]
    assert json.loads(read["text"])["id"] == adapter_id("neon")
