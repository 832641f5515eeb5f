"""Requests as code in curl, Python and JavaScript, which read the key from the environment."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import Request as HttpRequest
from pydantic import ValidationError

from serve_app.api import variant_a, variant_b
from serve_app.api.dependencies import loras_of
from serve_app.api.jobs.schemas import GenerationWish, UpscaleWish, request_record
from serve_app.domain.accounts import ApiKey
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, Request, Variant

KEY_VARIABLE = "ATELIER_KEY"


class Snippet(NamedTuple):
    name: str
    code: str


class _Call(NamedTuple):
    """How a request is sent, by default to `/v1/jobs`, and its job polled."""

    header: str
    scheme: str
    body: Mapping[str, Any]
    path: str = "jobs"
    id_field: str = "id"
    poll_path: str = "jobs"
    ends: Sequence[str] = ("completed", "failed", "canceled", "expired")


_HEADERS = {Variant.A: ("Authorization", "Bearer "), Variant.B: ("X-API-Key", "")}
_BODIES = {Variant.A: variant_a.GenerationRequest, Variant.B: variant_b.GenerationRequest}
_POLLS = {Variant.A: ("request_id", "generate"), Variant.B: ("run_id", "generations")}


async def as_asked(request: HttpRequest, asked: Request | None) -> Request | None:
    """Return a job's request, without the base model where that is its LoRAs' own: interfaces A and B name none."""
    if not isinstance(asked, GenerationRequest) or not asked.loras:
        return asked
    adapters = [await loras_of(request).catalog.adapter(lora.id) for lora in asked.loras]
    is_own = all(adapter is None or adapter.base_model == asked.base_model for adapter in adapters)
    return replace(asked, base_model="") if is_own else asked


def snippets_of(request: GenerationRequest, base_url: str, key: ApiKey | None = None) -> list[Snippet]:
    """Return code that makes the same images; `key` is named in a comment, without its secret."""
    interface = interface_of(request, *Variant)
    header = Variant.B if key is not None and Variant.A not in key.interfaces else Variant.A
    call, comment = _call(request, interface, interface or header), _key_comment(key)
    return [
        Snippet("curl", f"# {comment}\n{_curl(call, base_url)}"),
        Snippet("Python", f"# {comment}\n{_python(call, base_url)}"),
        Snippet("JavaScript", f"// {comment}\n{_javascript(call, base_url)}"),
    ]


def curl_command(job: Job, base_url: str, key: ApiKey | None = None) -> str:
    """Write the job's request as a shell command; '' for a request that this version cannot read."""
    if job.request is None:
        return ""
    call = _call(job.request, interface_of(job.request, job.variant), job.variant)
    return f"# {_key_comment(key)}\n{_curl(call, base_url)}"


def interface_of(request: Request, *tried: Variant) -> Variant | None:
    """Return the first of these interfaces that can ask for all of a request; None where only `/v1/jobs` can."""
    return next((each for each in tried if _fits(request, each)), None)


def _fits(request: Request, interface: Variant) -> bool:
    if not isinstance(request, GenerationRequest) or not request.loras:
        return False
    body = _BODIES[interface]
    try:
        asked = body.model_validate(body.fields_of(request)).to_domain()
    except ValidationError:
        return False
    return GenerationRequest.made_of(asked, request.seed) == request


def _call(request: Request, interface: Variant | None, header: Variant) -> _Call:
    if interface is None or not isinstance(request, GenerationRequest):
        return _Call(*_HEADERS[header], _wish(request))
    body = _BODIES[interface].fields_of(request)
    return _Call(*_HEADERS[interface], body, "generate", *_POLLS[interface], ("completed", "failed"))


def _wish(request: Request) -> Mapping[str, Any]:
    """Return the body of `POST /v1/jobs`, without the fields that are as they are by default."""
    fields: Mapping[str, Any] = request_record(request)
    kind, wish = {"kind": "upscale"}, UpscaleWish.model_fields
    if isinstance(request, GenerationRequest):
        fields = {**fields, "seed": request.seed}
        kind, wish = {}, GenerationWish.model_fields
    usual = {name: each.get_default(call_default_factory=True) for name, each in wish.items()}
    given = {name: fields[name] for name in wish if fields.get(name) not in ("", None, usual[name])}
    return kind | json.loads(json.dumps(given))


def _key_comment(key: ApiKey | None) -> str:
    """Say in one line what `$ATELIER_KEY` has to hold."""
    if key is None:
        return f"{KEY_VARIABLE}: an API key of yours"
    name = f'"{" ".join(key.name.split())}", ' if key.name.strip() else ""
    return f"{KEY_VARIABLE}: your key {name}{key.hint}"


def _curl(call: _Call, base_url: str) -> str:
    return (
        f'curl {shlex.quote(f"{base_url}/v1/{call.path}")} \\\n  -H "{call.header}: {call.scheme}${KEY_VARIABLE}" \\\n'
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(call.body, ensure_ascii=False))}"
    )


def _python(call: _Call, base_url: str) -> str:
    body = "".join(f'    "{name}": {value!r},\n' for name, value in call.body.items())
    return f"""import os, time, requests

headers = {{"{call.header}": {f'"{call.scheme}" + ' if call.scheme else ""}os.environ["{KEY_VARIABLE}"]}}
body = {{
{body}}}
answer = requests.post("{base_url}/v1/{call.path}", json=body, headers=headers)
answer.raise_for_status()
job_id = answer.json()["{call.id_field}"]
while True:
    job = requests.get(f"{base_url}/v1/{call.poll_path}/{{job_id}}", headers=headers).json()
    if job["status"] in {json.dumps(call.ends)}:
        break
    time.sleep(5)
print(job)"""


def _javascript(call: _Call, base_url: str) -> str:
    text = json.dumps(call.body, indent=2).replace("\n", "\n  ")
    key = f"`{call.scheme}${{process.env.{KEY_VARIABLE}}}`"
    return f"""const headers = {{ "{call.header}": {key}, "Content-Type": "application/json" }};
const answer = await fetch("{base_url}/v1/{call.path}", {{
  method: "POST", headers,
  body: JSON.stringify({text}),
}});
const {{ {call.id_field}: id }} = await answer.json();
let job;
do {{
  await new Promise((done) => setTimeout(done, 5000));
  job = await (await fetch(`{base_url}/v1/{call.poll_path}/${{id}}`, {{ headers }})).json();
}} while (!{json.dumps(call.ends)}.includes(job.status));
console.log(job);"""
