"""Requests as code in curl, Python and JavaScript, which read the key from the environment.

A job's request, to be made again: as a shell command, as the playground's query.
"""

import json
import shlex
from typing import Any, NamedTuple
from urllib.parse import urlencode

from serve_app.api.variant_a import schemas as variant_a
from serve_app.api.variant_b import schemas as variant_b
from serve_app.domain.accounts import ApiKey
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, UpscaleRequest, Variant
from serve_app.web.console.navigation import API, API_KEYS
from serve_app.web.console.playground_form import values_of

KEY_VARIABLE = "ATELIER_KEY"


class Snippet(NamedTuple):
    name: str
    code: str


class _Call(NamedTuple):
    """How an interface is called and polled."""

    header: str
    scheme: str
    body: dict[str, Any]
    id_field: str
    poll_path: str


def snippets_of(request: GenerationRequest, base_url: str, key: ApiKey | None = None) -> list[Snippet]:
    """Code that makes the same images; `key` is named in a comment, without its secret."""
    call, comment = _call(request), key_comment(key)
    return [
        Snippet("curl", f"# {comment}\n{_curl(call, base_url)}"),
        Snippet("Python", f"# {comment}\n{_python(call, base_url)}"),
        Snippet("JavaScript", f"// {comment}\n{_javascript(call, base_url)}"),
    ]


def variant_of(request: GenerationRequest) -> Variant:
    """The interface that the code calls: the bearer one, or X-API-Key where there is a negative prompt."""
    return Variant.B if request.negative_prompt else Variant.A


def key_comment(key: ApiKey | None) -> str:
    """What `$ATELIER_KEY` has to hold, in one line."""
    if key is None:
        return f"{KEY_VARIABLE}: an API key of yours"
    name = f'"{" ".join(key.name.split())}", ' if key.name.strip() else ""
    return f"{KEY_VARIABLE}: your key {name}{key.hint}"


def _call(request: GenerationRequest) -> _Call:
    if variant_of(request) is Variant.B:
        return _Call("X-API-Key", "", variant_b.GenerationRequest.fields_of(request), "run_id", "generations")
    return _Call("Authorization", "Bearer ", variant_a.GenerationRequest.fields_of(request), "request_id", "generate")


def _curl(call: _Call, base_url: str) -> str:
    body = shlex.quote(json.dumps(call.body, ensure_ascii=False))
    return (
        f'curl {base_url}/v1/generate \\\n  -H "{call.header}: {call.scheme}${KEY_VARIABLE}" \\\n'
        f"  -H 'Content-Type: application/json' \\\n  -d {body}"
    )


def _python(call: _Call, base_url: str) -> str:
    return f"""import os, time, requests

headers = {{"{call.header}": {f'"{call.scheme}" + ' if call.scheme else ""}os.environ["{KEY_VARIABLE}"]}}
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
    return f"""const headers = {{ "{call.header}": `{call.scheme}${{process.env.{KEY_VARIABLE}}}`, "Content-Type": "application/json" }};
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


def curl_command(job: Job, address: str, key: ApiKey | None = None) -> str:
    """Write the request as a shell command; '' for a request that cannot be read."""
    if job.request is None:
        return ""
    page = API if job.variant is Variant.A else API_KEYS
    operation = "upscale" if isinstance(job.request, UpscaleRequest) else "generate"
    body = json.dumps(_fields(job), ensure_ascii=False)
    rest = shlex.join(["-H", "Content-Type: application/json", "-d", body])
    header = f'-H "{page.header} ${KEY_VARIABLE}"'
    return f"# {key_comment(key)}\ncurl {shlex.quote(f'{address}/v1/{operation}')} {header} {rest}"


def playground_query(job: Job) -> str:
    """Write the request as the playground's query; '' for a request that the playground does not make."""
    request = job.request
    if not isinstance(request, GenerationRequest):
        return ""
    return urlencode({name: value for name, value in values_of(request).items() if value})


def _fields(job: Job) -> dict[str, Any]:
    request = job.request
    if isinstance(request, UpscaleRequest):
        return {"image_id": request.image_id, "scale_factor": request.scale_factor}
    assert request is not None, "checked by the caller"
    body = variant_b.GenerationRequest if job.variant is Variant.B else variant_a.GenerationRequest
    return body.fields_of(request)
