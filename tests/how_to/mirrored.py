"""Asks for the field that docs/contribute/add-a-field.md adds, by the application, the SDK's options and the engine."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from serve_app.client.protocol import GenerationOptions, given_options
from serve_app.engine import Engine, EngineOptions
from serve_app.worker.generation import GenerationExecutor
from tests.api.app import Member, TestService, error_of, open_service
from tests.support import POCKET
from tests.worker.test_generation import images_of

BODY: dict[str, Any] = {"prompt": "a red circle", "width": 256, "height": 256, "steps": 1, "seed": 7}


async def main(folder: Path) -> None:
    async with open_service(folder) as service:
        member = await service.member()
        assert given_options("generate", GenerationOptions, {"mirror": True})
        refused = await create(service, member, mirror="yes")
        assert error_of(refused)["message"] == "mirror: must be true or false"
        image_id = await service.completed_image(member)
        refused = await create(service, member, mirror=True, image_id=image_id, mask_image_id=image_id)
        assert error_of(refused)["message"] == "mirror: takes no mask_image_id"
        with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine:
            plain, mirrored = [await draw(service, member, engine, mirror=asked) for asked in (False, True)]
    assert np.array_equal(mirrored, plain[:, ::-1])
    assert not np.array_equal(mirrored, plain)


async def create(service: TestService, member: Member, **asked: Any) -> httpx.Response:
    return await service.client.post("/v1/jobs", json=BODY | asked, headers=member.a)


async def draw(service: TestService, member: Member, engine: Engine, *, mirror: bool) -> np.ndarray:
    """Have an image drawn from the record of its job, as a worker does."""
    job = (await create(service, member, mirror=mirror)).json()
    assert job["request"]["mirror"] is mirror
    await service.lease(job["id"])
    resources = service.resources
    executor = GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)
    request: Any = service.claims[job["id"]].request
    (image,) = await images_of(executor, request)
    return image
