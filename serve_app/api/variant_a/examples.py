"""Examples of variant A's document."""

from typing import Any

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, named

_GENERATION_ID = "gen_c4zq2e7wvbbxm5l3r6yhtajd2i"
_UPSCALE_ID = "up_7gk5m2xqhw4rbn3vtzcylsjd6e"
_IMAGE_ID = "img_nq6w3s5kfrzp2xvd7bmtch4ylu"
_ETA, _ENDED = "2026-11-21T12:00:09Z", "2026-11-21T12:00:08Z"

_SHORTEST = {"prompt": "purple mountains under a black sky with a yellow moon", "lora_id": EXAMPLE_ADAPTER_ID}
_EVERYTHING: dict[str, Any] = {
    **_SHORTEST,
    "lora_weight": 0.8,
    "width": 768,
    "height": 512,
    "num_images": 2,
    "guidance_scale": 6.5,
    "steps": 25,
    "seed": 7,
}
_IMAGE = {"image_id": _IMAGE_ID, "url": "https://images.example/mountains.png", "width": 768, "height": 512}
_RECORDS: dict[str, dict[str, Any]] = {
    "Processing": {"status": "processing", "progress": 43, "estimated_completion_time": _ETA},
    "Completed": {"status": "completed", "images": [_IMAGE], "completed_at": _ENDED},
    "Failed": {"status": "failed", "error": {"code": "timeout", "message": "The images could not be made in time."}},
}


def _accepted(request_id: str) -> dict[str, Any]:
    return {"Accepted": {"request_id": request_id, "status": "processing", "estimated_completion_time": _ETA}}


GENERATION = named({"Shortest": _SHORTEST, "Everything": _EVERYTHING})
UPSCALE = named({"Twice": {"image_id": _IMAGE_ID, "scale_factor": 2}})
GENERATION_ACCEPTED = _accepted(_GENERATION_ID)
UPSCALE_ACCEPTED = _accepted(_UPSCALE_ID)
RECORDS = {name: {"request_id": _GENERATION_ID, **record} for name, record in _RECORDS.items()}
