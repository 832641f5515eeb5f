"""A job's request, to be made again: as a shell command, as the playground's query."""

import json
import shlex
from typing import Any
from urllib.parse import urlencode

from serve_app.api.console.key_page import API, API_KEYS
from serve_app.api.console.snippets import KEY_VARIABLE, key_comment
from serve_app.domain.accounts import ApiKey
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest, UpscaleRequest, Variant


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
    fields = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "lora_id": request.lora_id,
        "lora_weight": f"{request.lora_weight:g}",
        "width": request.width,
        "height": request.height,
        "steps": request.steps,
        "guidance_scale": f"{request.guidance_scale:g}",
        "num_images": request.num_images,
        "seed": request.seeds[0],
    }
    return urlencode({name: value for name, value in fields.items() if value != ""})


def _fields(job: Job) -> dict[str, Any]:
    request = job.request
    if isinstance(request, UpscaleRequest):
        return {"image_id": request.image_id, "scale_factor": request.scale_factor}
    assert request is not None, "checked by the caller"
    shared = {"lora_weight": request.lora_weight, "width": request.width, "height": request.height}
    seed = {"seed": request.seeds[0]}
    if job.variant is Variant.B:
        prompts = {"positive_prompt": request.prompt, "negative_prompt": request.negative_prompt}
        return {**prompts, "model_id": request.lora_id, **shared, "guidance": request.guidance_scale, **seed}
    return {
        "prompt": request.prompt,
        "lora_id": request.lora_id,
        **shared,
        "num_images": request.num_images,
        "guidance_scale": request.guidance_scale,
        "steps": request.steps,
        **seed,
    }
