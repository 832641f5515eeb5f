"""Variant B's OpenAPI document: every operation, field, state, status and header, closed and with examples that work."""

from typing import Any

from serve_app.api import openapi
from serve_app.api.openapi import TIME, closed, reference
from serve_app.api.variant_b.fields import GenerationBody

_RUN = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"


def document(facts: openapi.Facts) -> dict[str, Any]:
    return openapi.document(
        facts=facts,
        title="Atelier, interface B",
        description=_description(facts),
        security={"apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        paths={
            "/v1/generate": {"post": _generate(facts.adapter_id)},
            "/v1/generations/{run_id}": {"get": _poll()},
            "/v1/models": {"get": _models(facts.adapter_id)},
        },
        schemas=_schemas(),
        codes={**openapi.CODES, 400: (*openapi.CODES[400], "ambiguous_credentials")},
    )


def _description(facts: openapi.Facts) -> str:
    return f"""\
Generate an image from a prompt with one of your account's models. Creating a run answers at once with a `run_id`; ask for the
run until its status is `completed` or `failed`.

Send your key as `X-API-Key: <API_KEY>`. Plans, in requests: {facts.plan_text}. Asking for a run does not count.
{facts.keeping_text}

Every error has the body `{{"error": {{"code", "message"}}}}`, errors of routing (404, and 405 with `Allow`) included."""


def _generate(model_id: str) -> dict[str, Any]:
    short = {"positive_prompt": "a lighthouse at dawn", "model_id": model_id}
    full = {
        **short,
        "negative_prompt": "fog",
        "lora_weight": 1.2,
        "guidance": 6.5,
        "width": 640,
        "height": 384,
        "seed": 7,
    }
    link = {"operationId": "getRun", "parameters": {"run_id": "$response.body#/run_id"}}
    return {
        "operationId": "generate",
        "summary": "Generate an image",
        "parameters": [reference("parameters", "IdempotencyKey")],
        "requestBody": openapi.request_body("GenerationRequest", {"Shortest": short, "Everything": full}),
        "responses": {
            "200": openapi.answer(
                "Accepted: the run is durable and will end in `completed` or `failed`.",
                "Acknowledgement",
                {"Accepted": {"run_id": _RUN, "status": "queued", "estimated_time": 9}},
                headers=("Location", "Retry-After", "Idempotency-Replayed"),
                links={"Run": link},
            ),
            **openapi.refusals(400, 401, 403, 409, 413, 415, 429),
        },
    }


def _poll() -> dict[str, Any]:
    parameter = {
        "name": "run_id",
        "in": "path",
        "required": True,
        "description": "The identifier that creating the run returned.",
        "schema": openapi.job_id("gen"),
    }
    error = {"code": "timeout", "message": "The images could not be made in time."}
    examples = {
        "Queued": {"run_id": _RUN, "status": "queued", "progress": 0},
        "Processing": {"run_id": _RUN, "status": "processing", "progress": 43},
        "Completed": {
            "run_id": _RUN,
            "status": "completed",
            "progress": 100,
            "image_url": "https://images.example/lighthouse.png",
        },
        "Failed": {"run_id": _RUN, "status": "failed", "progress": 43, "error": error},
    }
    return {
        "operationId": "getRun",
        "summary": "Retrieve a run",
        "parameters": [parameter],
        "responses": {
            "200": openapi.answer("The run.", "Run", examples, polled=True),
            **openapi.refusals(401, 404),
        },
    }


def _models(model_id: str) -> dict[str, Any]:
    model = {
        "id": model_id,
        "name": "Outline",
        "description": "Thin ink outlines.",
        "created_at": "2026-11-21T00:00:00Z",
    }
    return {
        "operationId": "listModels",
        "summary": "List the models your account may use",
        "responses": {
            "200": openapi.answer("The models.", "Models", {"Models": {"models": [model]}}),
            **openapi.refusals(401, 429),
        },
    }


def _schemas() -> dict[str, Any]:
    run_id = openapi.job_id("gen")
    failure = closed({"code": {"type": "string", "enum": openapi.FAILURE_CODES}, "message": {"type": "string"}})
    unfinished = {**openapi.PROGRESS, "maximum": 99}
    model = closed(
        {
            "id": {"type": "string", "minLength": 1, "maxLength": 128, "description": "Send it as `model_id`."},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "created_at": TIME,
        }
    )
    return {
        "GenerationRequest": openapi.body_schema(GenerationBody),
        "Acknowledgement": closed(
            {
                "run_id": run_id,
                "status": {"const": "queued"},
                "estimated_time": {"type": "integer", "minimum": 1, "description": "Seconds until completion."},
            }
        ),
        "Run": {
            "oneOf": [
                reference("schemas", name) for name in ("QueuedRun", "ProcessingRun", "CompletedRun", "FailedRun")
            ]
        },
        "QueuedRun": closed({"run_id": run_id, "status": {"const": "queued"}, "progress": unfinished}),
        "ProcessingRun": closed({"run_id": run_id, "status": {"const": "processing"}, "progress": unfinished}),
        "CompletedRun": closed(
            {
                "run_id": run_id,
                "status": {"const": "completed"},
                "progress": {"const": 100},
                "image_url": {"type": "string", "format": "uri", "description": "The PNG; opens without the key."},
            }
        ),
        "FailedRun": closed(
            {"run_id": run_id, "status": {"const": "failed"}, "progress": unfinished, "error": failure}
        ),
        "Models": closed({"models": {"type": "array", "items": reference("schemas", "Model")}}),
        "Model": model,
    }
