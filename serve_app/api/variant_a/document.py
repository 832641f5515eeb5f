"""Variant A's OpenAPI document: every operation, field, state, status and header, closed and with examples that work."""

from typing import Any

from serve_app.api import openapi
from serve_app.api.openapi import TIME, closed, reference
from serve_app.api.variant_a.fields import GenerationBody, UpscaleBody

_REQUEST = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"
_UPSCALE = "up_7gk5m2xqhw4rbn3vtzcylsjd6e"
_IMAGE = "img_nq6w3s5kfrzp2xvd7bmtch4ylu"
_ETA, _ENDED = "2026-11-21T12:00:09Z", "2026-11-21T12:00:08Z"


def document(facts: openapi.Facts) -> dict[str, Any]:
    return openapi.document(
        facts=facts,
        title="Atelier, interface A",
        description=_description(facts),
        security={"bearer": {"type": "http", "scheme": "bearer"}},
        paths={
            "/v1/generate": {"post": _generate(facts.adapter_id)},
            "/v1/generate/{request_id}": {"get": _poll("getRequest", "Poll a request")},
            "/v1/upscale": {"post": _upscale()},
            "/v1/upscale/{request_id}": {
                "get": _poll("getUpscale", "Poll a request: the same record under another path")
            },
        },
        schemas=_schemas(),
        codes={**openapi.CODES, 400: (*openapi.CODES[400], "ambiguous_credentials")},
    )


def _description(facts: openapi.Facts) -> str:
    return f"""\
Generate images from a text prompt with a LoRA model, and enlarge them. Creating calls answer at once with a `request_id`;
poll it every 5 seconds until its status is `completed` or `failed`.

Send your key as `Authorization: Bearer <API_KEY>`. Plans, in requests: {facts.plan_text}. Polling does not count.
{facts.keeping_text}

Every error has the body `{{"error": {{"code", "message"}}}}`, errors of routing (404, and 405 with `Allow`) included."""


def _generate(lora_id: str) -> dict[str, Any]:
    short = {"prompt": "a lighthouse at dawn", "lora_id": lora_id}
    full = {
        **short,
        "lora_weight": 0.8,
        "width": 512,
        "height": 768,
        "num_images": 2,
        "guidance_scale": 6.5,
        "steps": 25,
        "seed": 7,
    }
    return {
        "operationId": "generate",
        "summary": "Generate images",
        "parameters": [reference("parameters", "IdempotencyKey")],
        "requestBody": openapi.request_body("GenerationRequest", {"Shortest": short, "Everything": full}),
        "responses": {"202": _acknowledged(_REQUEST), **openapi.refusals(400, 401, 403, 409, 413, 415, 429)},
    }


def _upscale() -> dict[str, Any]:
    return {
        "operationId": "upscale",
        "summary": "Enlarge an image",
        "parameters": [reference("parameters", "IdempotencyKey")],
        "requestBody": openapi.request_body("UpscaleRequest", {"Twice": {"image_id": _IMAGE, "scale_factor": 2}}),
        "responses": {"202": _acknowledged(_UPSCALE), **openapi.refusals(400, 401, 404, 409, 413, 415, 429)},
    }


def _acknowledged(request_id: str) -> dict[str, Any]:
    example = {"request_id": request_id, "status": "processing", "estimated_completion_time": _ETA}
    link = {"operationId": "getRequest", "parameters": {"request_id": "$response.body#/request_id"}}
    return openapi.answer(
        "Accepted: the request is durable and will end in `completed` or `failed`.",
        "Acknowledgement",
        {"Accepted": example},
        headers=("Location", "Retry-After", "Idempotency-Replayed"),
        links={"Poll": link},
    )


def _poll(operation: str, summary: str) -> dict[str, Any]:
    running = {"request_id": _REQUEST, "status": "processing", "progress": 43, "estimated_completion_time": _ETA}
    image = {"image_id": _IMAGE, "url": "https://images.example/lighthouse.png", "width": 512, "height": 768}
    completed = {"request_id": _REQUEST, "status": "completed", "images": [image], "completed_at": _ENDED}
    error = {"code": "timeout", "message": "The images could not be made in time."}
    failed = {"request_id": _REQUEST, "status": "failed", "error": error}
    parameter = {
        "name": "request_id",
        "in": "path",
        "required": True,
        "description": "The identifier that the creating call returned.",
        "schema": openapi.job_id("gen", "up"),
    }
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [parameter],
        "responses": {
            "200": openapi.answer(
                "The request's record.",
                "StatusRecord",
                {"Processing": running, "Completed": completed, "Failed": failed},
                polled=True,
                links={
                    "Upscale": {
                        "operationId": "upscale",
                        "requestBody": {"image_id": "$response.body#/images/0/image_id"},
                    }
                },
            ),
            **openapi.refusals(401, 404),
        },
    }


def _schemas() -> dict[str, Any]:
    image = closed(
        {
            "image_id": {"type": "string", "pattern": "^img_[a-z2-7]{26}$"},
            "url": {"type": "string", "format": "uri", "description": "The PNG; opens without the key."},
            "width": {"type": "integer", "minimum": 1, "description": "Pixels."},
            "height": {"type": "integer", "minimum": 1, "description": "Pixels."},
        }
    )
    failure = closed({"code": {"type": "string", "enum": openapi.FAILURE_CODES}, "message": {"type": "string"}})
    request_id = openapi.job_id("gen", "up")
    return {
        "GenerationRequest": openapi.body_schema(GenerationBody),
        "UpscaleRequest": openapi.body_schema(UpscaleBody),
        "Acknowledgement": closed(
            {"request_id": request_id, "status": {"const": "processing"}, "estimated_completion_time": TIME}
        ),
        "StatusRecord": {
            "oneOf": [reference("schemas", name) for name in ("ProcessingRecord", "CompletedRecord", "FailedRecord")]
        },
        "ProcessingRecord": closed(
            {
                "request_id": request_id,
                "status": {"const": "processing"},
                "progress": {**openapi.PROGRESS, "maximum": 99},
                "estimated_completion_time": TIME,
            }
        ),
        "CompletedRecord": closed(
            {
                "request_id": request_id,
                "status": {"const": "completed"},
                "images": {"type": "array", "items": reference("schemas", "Image"), "minItems": 1, "maxItems": 4},
                "completed_at": TIME,
            }
        ),
        "FailedRecord": closed({"request_id": request_id, "status": {"const": "failed"}, "error": failure}),
        "Image": image,
    }
