"""A request of the playground as code: curl, Python and JavaScript, with a place for the key."""

import json
import shlex
from typing import Any, NamedTuple

from serve_app.domain.requests import GenerationRequest

PLACEHOLDER = "YOUR_API_KEY"


class Snippet(NamedTuple):
    name: str
    code: str


class _Call(NamedTuple):
    """How an interface is called and polled."""

    header: str
    value: str
    body: dict[str, Any]
    id_field: str
    poll_path: str


def snippets_of(request: GenerationRequest, base_url: str) -> list[Snippet]:
    """Code that makes the same images: over the bearer interface, or over X-API-Key where there is a negative prompt."""
    call = _call_b(request) if request.negative_prompt else _call_a(request)
    return [
        Snippet("curl", _curl(call, base_url)),
        Snippet("Python", _python(call, base_url)),
        Snippet("JavaScript", _javascript(call, base_url)),
    ]


def _call_a(request: GenerationRequest) -> _Call:
    body = {
        "prompt": request.prompt,
        "lora_id": request.lora_id,
        "lora_weight": request.lora_weight,
        "width": request.width,
        "height": request.height,
        "guidance_scale": request.guidance_scale,
        "steps": request.steps,
        "num_images": request.num_images,
        "seed": request.seeds[0],
    }
    return _Call("Authorization", f"Bearer {PLACEHOLDER}", body, "request_id", "generate")


def _call_b(request: GenerationRequest) -> _Call:
    """One image, of 30 steps: the interface has no fields for these."""
    body = {
        "positive_prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "model_id": request.lora_id,
        "lora_weight": request.lora_weight,
        "guidance": request.guidance_scale,
        "width": request.width,
        "height": request.height,
        "seed": request.seeds[0],
    }
    return _Call("X-API-Key", PLACEHOLDER, body, "run_id", "generations")


def _curl(call: _Call, base_url: str) -> str:
    body = shlex.quote(json.dumps(call.body, ensure_ascii=False))
    return (
        f"curl {base_url}/v1/generate \\\n  -H '{call.header}: {call.value}' \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d {body}"
    )


def _python(call: _Call, base_url: str) -> str:
    return f"""import time, requests

headers = {{"{call.header}": "{call.value}"}}
body = {json.dumps(call.body, indent=4)}
answer = requests.post("{base_url}/v1/generate", json=body, headers=headers)
answer.raise_for_status()
job_id = answer.json()["{call.id_field}"]
while True:
    job = requests.get(f"{base_url}/v1/{call.poll_path}/{{job_id}}", headers=headers).json()
    if job["status"] in ("completed", "failed"):
        break
    time.sleep(5)
print(job)"""


def _javascript(call: _Call, base_url: str) -> str:
    body = json.dumps(call.body, indent=2).replace("\n", "\n  ")
    return f"""const headers = {{ "{call.header}": "{call.value}", "Content-Type": "application/json" }};
const answer = await fetch("{base_url}/v1/generate", {{
  method: "POST", headers,
  body: JSON.stringify({body}),
}});
const {{ {call.id_field}: id }} = await answer.json();
let job;
do {{
  await new Promise((done) => setTimeout(done, 5000));
  job = await (await fetch(`{base_url}/v1/{call.poll_path}/${{id}}`, {{ headers }})).json();
}} while (!["completed", "failed"].includes(job.status));
console.log(job);"""
