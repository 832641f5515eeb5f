"""Texts of the landing page, and of `robots.txt` and `llms.txt`."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from serve_app.api.site.samples import SAMPLE_PROMPT

ROBOTS = """User-agent: *
Disallow: /console/
Disallow: /operators/
Disallow: /files/
Disallow: /v1/
"""


class InterfaceRow(NamedTuple):
    """A property of both interfaces."""

    name: str
    a: str
    b: str


INTERFACE_ROWS = (
    InterfaceRow(
        "Take it for",
        "up to four images a request, of 20 to 50 steps, and upscaling them",
        "one image of any size from 256 to 1024, with a negative prompt",
    ),
    InterfaceRow("Your key goes in", "Authorization: Bearer", "X-API-Key"),
)


def landing_curl(base_url: str, lora_id: str) -> str:
    """Return a first request in curl, with a place for the key."""
    body = json.dumps({"prompt": SAMPLE_PROMPT, "lora_id": lora_id})
    return (
        f"curl {base_url}/v1/generate -H 'Authorization: Bearer YOUR_API_KEY' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def llms_text(base_url: str, titles: Mapping[str, str]) -> str:
    """Return what a language model needs to write a client: https://llmstxt.org."""
    documents = "\n".join(
        f"- [{title}]({base_url}/openapi/{name}.json): OpenAPI document" for name, title in titles.items()
    )
    return f"""# Atelier

> A self-hosted service that generates images from prompts with LoRA models, as jobs that are polled.

Programs send an API key and get the id of a job; they poll it every 5 seconds until its status is completed or failed.
Two interfaces share `POST {base_url}/v1/generate`. The header that carries the key decides which one answers:
`Authorization: Bearer` is interface A (one to four images, upscaling), `X-API-Key` is interface B (one image, negative prompt).
Every error is JSON: `{{"error": {{"code": "...", "message": "..."}}}}`.

## Documents

{documents}
- [Documentation]({base_url}/docs): the operations of all three, with a curl line for each
"""
