"""Examples of variant B's document."""

from typing import Any

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, named

_RUN_ID = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"

_SHORTEST = {"positive_prompt": "purple mountains under a black sky with a yellow moon", "model_id": EXAMPLE_ADAPTER_ID}
_EVERYTHING: dict[str, Any] = {
    "positive_prompt": "a yellow flower with a red middle on a blue background",
    "negative_prompt": "green",
    "model_id": EXAMPLE_ADAPTER_ID,
    "lora_weight": 0.8,
    "guidance": 6.5,
    "width": 640,
    "height": 512,
    "seed": 7,
}
_RECORDS: dict[str, dict[str, Any]] = {
    "Queued": {"status": "queued", "progress": 0},
    "Processing": {"status": "processing", "progress": 43},
    "Completed": {"status": "completed", "progress": 100, "image_url": "https://images.example/mountains.png"},
    "Failed": {
        "status": "failed",
        "progress": 43,
        "error": {"code": "timeout", "message": "The images could not be made in time."},
    },
}
_MODEL = {
    "id": EXAMPLE_ADAPTER_ID,
    "name": "Neon",
    "description": "Glowing coloured tubes on a dark wall.",
    "created_at": "2026-11-21T00:00:00Z",
}

GENERATION = named({"Shortest": _SHORTEST, "Everything": _EVERYTHING})
ACCEPTED = {"Accepted": {"run_id": _RUN_ID, "status": "queued", "estimated_time": 9}}
RECORDS = {name: {"run_id": _RUN_ID, **record} for name, record in _RECORDS.items()}
MODELS = {"Models": {"models": [_MODEL]}}
