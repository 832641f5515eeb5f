"""Requests as code in curl, Python and JavaScript, which read the key from the environment."""

import json
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from serve_app.api.variant_a import schemas as variant_a
from serve_app.api.variant_b import schemas as variant_b
from serve_app.client.protocol import FEWEST_STEPS
from serve_app.domain.accounts import ApiKey
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, Request, UpscaleRequest, Variant

KEY_VARIABLE = "ATELIER_KEY"

Body = Mapping[str, Any]


class Snippet(NamedTuple):
    name: str
    code: str


class _Call(NamedTuple):
    """How an interface is called and polled."""

    header: str
    scheme: str
    id_field: str
    poll_path: str


_CALLS: Mapping[Variant, _Call] = {
    Variant.A: _Call("Authorization", "Bearer ", "request_id", "generate"),
    Variant.B: _Call("X-API-Key", "", "run_id", "generations"),
}


def snippets_of(request: GenerationRequest, base_url: str, key: ApiKey | None = None) -> list[Snippet]:
    """Return code that makes the same images; `key` is named in a comment, without its secret."""
    variant = variant_of(request)
    call, body, comment = _CALLS[variant], _body(request, variant), _key_comment(key)
    return [
        Snippet("curl", f"# {comment}\n{_curl(call, 'generate', body, base_url)}"),
        Snippet("Python", f"# {comment}\n{_python(call, body, base_url)}"),
        Snippet("JavaScript", f"// {comment}\n{_javascript(call, body, base_url)}"),
    ]


def curl_command(job: Job, base_url: str, key: ApiKey | None = None) -> str:
    """Write the job's request as a shell command; '' for a request that this version cannot read."""
    if job.request is None:
        return ""
    operation = "upscale" if isinstance(job.request, UpscaleRequest) else "generate"
    command = _curl(_CALLS[job.variant], operation, _body(job.request, job.variant), base_url)
    return f"# {_key_comment(key)}\n{command}"


def variant_of(request: GenerationRequest) -> Variant:
    """Return the interface that the code calls: the bearer one, or X-API-Key where there is a negative prompt."""
    return Variant.B if request.negative_prompt else Variant.A


def _key_comment(key: ApiKey | None) -> str:
    """Say in one line what `$ATELIER_KEY` has to hold."""
    if key is None:
        return f"{KEY_VARIABLE}: an API key of yours"
    name = f'"{" ".join(key.name.split())}", ' if key.name.strip() else ""
    return f"{KEY_VARIABLE}: your key {name}{key.hint}"


def _body(request: Request, variant: Variant) -> Body:
    """Return the request as the interface takes it: A takes no fewer than 20 steps, B has no field for them nor for the
    number of images.
    """
    if isinstance(request, UpscaleRequest):
        return {"image_id": request.image_id, "scale_factor": request.scale_factor}
    body = variant_b.GenerationRequest if variant is Variant.B else variant_a.GenerationRequest
    fields = body.fields_of(request)
    return fields if "steps" not in fields else {**fields, "steps": max(FEWEST_STEPS, request.steps)}


def _curl(call: _Call, operation: str, body: Body, base_url: str) -> str:
    return (
        f'curl {shlex.quote(f"{base_url}/v1/{operation}")} \\\n  -H "{call.header}: {call.scheme}${KEY_VARIABLE}" \\\n'
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def _python(call: _Call, body: Body, base_url: str) -> str:
    return f"""import os, time, requests

headers = {{"{call.header}": {f'"{call.scheme}" + ' if call.scheme else ""}os.environ["{KEY_VARIABLE}"]}}
body = {json.dumps(body, indent=4)}
answer = requests.post("{base_url}/v1/generate", json=body, headers=headers)
answer.raise_for_status()
job_id = answer.json()["{call.id_field}"]
while True:
    job = requests.get(f"{base_url}/v1/{call.poll_path}/{{job_id}}", headers=headers).json()
    if job["status"] in ("completed", "failed"):
        break
    time.sleep(5)
print(job)"""


def _javascript(call: _Call, body: Body, base_url: str) -> str:
    text = json.dumps(body, indent=2).replace("\n", "\n  ")
    key = f"`{call.scheme}${{process.env.{KEY_VARIABLE}}}`"
    return f"""const headers = {{ "{call.header}": {key}, "Content-Type": "application/json" }};
const answer = await fetch("{base_url}/v1/generate", {{
  method: "POST", headers,
  body: JSON.stringify({text}),
}});
const {{ {call.id_field}: id }} = await answer.json();
let job;
do {{
  await new Promise((done) => setTimeout(done, 5000));
  job = await (await fetch(`{base_url}/v1/{call.poll_path}/${{id}}`, {{ headers }})).json();
}} while (!["completed", "failed"].includes(job.status));
console.log(job);"""
