"""The OpenAPI document of `/v1/jobs`."""

from typing import Any

from serve_app.api import openapi
from serve_app.api.openapi import TIME, closed, reference
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import Variant

_JOB = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"
_IMAGE = "img_nq6w3s5kfrzp2xvd7bmtch4ylu"

_CURSOR = {"type": "string", "pattern": "^[0-9]{1,14}-(?:gen|up)_[a-z2-7]{26}$"}

_DESCRIPTION = """\
Every request of interface A and every run of interface B is a job. Here you list, look at and cancel your account's jobs,
with either credential: `Authorization: Bearer <API_KEY>` or `X-API-Key: <API_KEY>`.

Unlike the two interfaces, a job shows its real state (`queued`, `running`, `completed`, `failed`, `canceled`, `expired`),
its fields with defaults filled in, and the seed of each image. Looking at a job does not count against your plan."""


def document(facts: openapi.Facts) -> dict[str, Any]:
    return openapi.document(
        facts=facts,
        title="Atelier, jobs",
        description=_DESCRIPTION,
        security={
            "bearer": {"type": "http", "scheme": "bearer"},
            "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        },
        paths={
            "/v1/jobs": {"get": _list(facts.adapter_id)},
            "/v1/jobs/{job_id}": {"get": _show(facts.adapter_id)},
            "/v1/jobs/{job_id}/cancel": {"post": _cancel(facts.adapter_id)},
        },
        schemas=_schemas(),
        codes={**openapi.CODES, 400: ("invalid_parameter", "ambiguous_credentials"), 429: ("rate_limit_exceeded",)},
    )


def _list(lora_id: str) -> dict[str, Any]:
    limit = {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}
    return {
        "operationId": "listJobs",
        "summary": "List jobs, newest first",
        "parameters": [
            {"name": "limit", "in": "query", "description": "How many to list.", "schema": limit},
            {"name": "cursor", "in": "query", "description": "`next_cursor` of the page before.", "schema": _CURSOR},
        ],
        "responses": {
            "200": openapi.answer("A page of jobs.", "Jobs", {"Jobs": {"jobs": [_completed(lora_id)]}}),
            **openapi.refusals(400, 401, 429),
        },
    }


def _show(lora_id: str) -> dict[str, Any]:
    return {
        "operationId": "getJob",
        "summary": "Look at a job",
        "parameters": [_job_id()],
        "responses": {
            "200": openapi.answer("The job.", "Job", {"Completed": _completed(lora_id)}, polled=True),
            **openapi.refusals(400, 401, 404),
        },
    }


def _cancel(lora_id: str) -> dict[str, Any]:
    canceled = {
        **{name: value for name, value in _completed(lora_id).items() if name != "images"},
        "status": "canceled",
        "progress": 43,
        "error": {"code": "canceled", "message": "The request was canceled."},
    }
    return {
        "operationId": "cancelJob",
        "summary": "Cancel a job: at once when it waits, within a step when it runs",
        "parameters": [_job_id()],
        "responses": {
            "200": openapi.answer(
                "The job as it is now; one that had ended is unchanged.", "Job", {"Canceled": canceled}
            ),
            **openapi.refusals(400, 401, 404, 429),
        },
    }


def _job_id() -> dict[str, Any]:
    return {
        "name": "job_id",
        "in": "path",
        "required": True,
        "description": "A `request_id` of interface A or a `run_id` of interface B.",
        "schema": openapi.job_id("gen", "up"),
    }


def _completed(lora_id: str) -> dict[str, Any]:
    return {
        "id": _JOB,
        "kind": "generation",
        "interface": "a",
        "status": "completed",
        "progress": 100,
        "attempt": 1,
        "created_at": "2026-11-21T12:00:00Z",
        "request": {
            "prompt": "a lighthouse at dawn",
            "negative_prompt": "",
            "lora_id": lora_id,
            "lora_weight": 0.75,
            "width": 512,
            "height": 768,
            "guidance_scale": 7.5,
            "steps": 30,
            "num_images": 1,
        },
        "started_at": "2026-11-21T12:00:01Z",
        "finished_at": "2026-11-21T12:00:08Z",
        "images": [
            {
                "image_id": _IMAGE,
                "url": "https://images.example/lighthouse.png",
                "width": 512,
                "height": 768,
                "size_bytes": 401221,
                "sha256": "9f" * 32,
                "seed": "7",
            }
        ],
    }


def _schemas() -> dict[str, Any]:
    text, number = {"type": "string"}, {"type": "number"}
    whole = {"type": "integer", "minimum": 0}
    generation = closed(
        {
            "prompt": text,
            "negative_prompt": text,
            "lora_id": text,
            "lora_weight": number,
            "width": whole,
            "height": whole,
            "guidance_scale": number,
            "steps": whole,
            "num_images": whole,
        }
    )
    image = closed(
        {
            "image_id": {"type": "string", "pattern": "^img_[a-z2-7]{26}$"},
            "url": {"type": "string", "format": "uri"},
            "width": whole,
            "height": whole,
            "size_bytes": whole,
            "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "seed": {"type": "string", "pattern": "^[0-9]+$", "description": "Decimal text; absent for an upscale."},
        }
    )
    image["required"].remove("seed")
    error = closed({"code": {"type": "string", "enum": openapi.FAILURE_CODES}, "message": text})
    always = {
        "id": openapi.job_id("gen", "up"),
        "kind": {"enum": list(JobKind)},
        "interface": {"enum": list(Variant)},
        "status": {"enum": list(JobState)},
        "progress": openapi.PROGRESS,
        "attempt": {**whole, "description": "How often a worker has begun it."},
        "created_at": TIME,
        "request": {"oneOf": [generation, closed({"image_id": text, "scale_factor": {"enum": [2, 4]}})]},
    }
    sometimes = {
        "started_at": {**TIME, "description": "Once a worker has begun."},
        "finished_at": {**TIME, "description": "Once it has ended."},
        "estimated_completion_time": {**TIME, "description": "Of a single job that has not ended."},
        "images": {"type": "array", "items": reference("schemas", "Image"), "description": "When completed."},
        "error": {**error, "description": "When it ended without images."},
    }
    job = closed({**always, **sometimes})
    job["required"] = list(always)
    page = closed({"jobs": {"type": "array", "items": reference("schemas", "Job")}, "next_cursor": _CURSOR})
    page["required"] = ["jobs"]
    return {"Job": job, "Image": image, "Jobs": page}
