"""Examples of the jobs document."""

from typing import Any

from serve_app.api.openapi import EXAMPLE_ADAPTER_ID

_JOB: dict[str, Any] = {
    "id": "gen_c4zq2e7wvbbxm5l3r6yhtajd2i",
    "kind": "generation",
    "interface": "a",
    "attempt": 1,
    "created_at": "2026-11-21T12:00:00Z",
    "request": {
        "prompt": "purple mountains under a black sky with a yellow moon",
        "negative_prompt": "",
        "lora_id": EXAMPLE_ADAPTER_ID,
        "lora_weight": 0.75,
        "width": 768,
        "height": 512,
        "guidance_scale": 7.5,
        "steps": 30,
        "num_images": 1,
    },
    "started_at": "2026-11-21T12:00:01Z",
}
_COMPLETED: dict[str, Any] = {
    **_JOB,
    "status": "completed",
    "progress": 100,
    "finished_at": "2026-11-21T12:00:08Z",
    "images": [
        {
            "image_id": "img_nq6w3s5kfrzp2xvd7bmtch4ylu",
            "url": "https://images.example/mountains.png",
            "width": 768,
            "height": 512,
            "size_bytes": 401221,
            "sha256": "9f" * 32,
            "seed": "7",
        }
    ],
}
_CANCELED: dict[str, Any] = {
    **_JOB,
    "status": "canceled",
    "progress": 43,
    "finished_at": "2026-11-21T12:00:08Z",
    "error": {"code": "canceled", "message": "The request was canceled."},
}
_RUNNING: dict[str, Any] = {
    **_JOB,
    "status": "running",
    "progress": 43,
    "estimated_completion_time": "2026-11-21T12:00:09Z",
}

JOB = {"Running": _RUNNING, "Completed": _COMPLETED}
CANCELED = {"Canceled": _CANCELED}
JOBS = {"Jobs": {"jobs": [_COMPLETED, _CANCELED]}}
