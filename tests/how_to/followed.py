"""What a copy of the tree can do in which docs/contribute's pages have been followed; `test_pages.py` runs it there."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from serve_app.client.options import GenerationOptions, given_options
from serve_app.domain.families import abilities_of
from serve_app.engine import Engine, EngineOptions
from serve_app.model_folder import index_of
from serve_app.settings import Settings
from serve_app.web.console.playground_form import SAMPLERS
from serve_app.worker.generation import GenerationExecutor
from tests.api.app import Member, TestService, error_of, open_service
from tests.how_to.pages import run
from tests.made_jobs import fail_all
from tests.support import POCKET, ROOT
from tests.worker.test_generation import images_of

CIRCLE: dict[str, Any] = {"prompt": "a red circle", "width": 256, "height": 256}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket model, as a checkpoint of the family that the page adds."""
    folder = shutil.copytree(POCKET, tmp_path_factory.mktemp("models") / "mirror")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusionPipeline", "StableDiffusionPAGPipeline"))
    return folder


@pytest.fixture(scope="module")
def engine(mirror: Path) -> Iterator[Engine]:
    with Engine.load({"mirror": mirror, "pocket": POCKET}, EngineOptions(exact=False)) as engine:
        yield engine


def draw(engine: Engine, **asked: Any) -> np.ndarray:
    fields: dict[str, Any] = {**CIRCLE, "steps": 2, "seeds": [7]} | asked
    return np.asarray(engine.generate(**fields)[0]).astype(int)


def test_the_family_draws(engine: Engine, mirror: Path) -> None:
    assert type(engine.model("mirror").family).__module__ == "serve_app.engine.families.mirror"
    assert abilities_of(index_of(mirror)["_class_name"]).longest_side == 768
    drawn, plain = (draw(engine, base_model=name) for name in ("mirror", "pocket"))
    assert drawn.shape == plain.shape
    assert np.abs(drawn - plain).mean() > 1, "it draws as Stable Diffusion does"


def test_the_sampler_is_offered_and_draws(engine: Engine) -> None:
    assert "dpm++3m" in abilities_of(index_of(POCKET)["_class_name"]).samplers
    assert "dpm++3m" in SAMPLERS, "of the playground"
    second, third = (draw(engine, base_model="pocket", steps=6, sampler=f"dpm++{order}m-karras") for order in (2, 3))
    assert np.abs(third - second).mean() > 0.1, "it draws as DPM++ 2M does"


async def test_the_metric_is_counted_from_zero_and_shown(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        job_id = await service.submit(await service.member())
        await fail_all(service.resources)

        async def is_shown(count: int) -> bool:
            page = (await service.client.get("/metrics", headers=service.operator)).text
            return f"\natelier_dead_jobs_requeued_total {float(count)}\n" in page

        assert await is_shown(0)
        assert await service.resources.dead_letters.requeue(job_id)
        assert not await service.resources.dead_letters.requeue(job_id)
        assert await is_shown(1)


async def test_the_command_is_one_of_the_program(settings: Settings, redis_db: redis.Redis) -> None:
    words = ["accounts", "show", "nobody", "--data-dir", str(settings.data_dir), "--redis-url", settings.redis_url]
    said = run(["python", "-m", "deployments", *words], ROOT, exit_code=1)
    assert said == "atelier: no account 'nobody' (see: atelier accounts list)\n"


async def test_the_field_is_asked_for_by_the_application_and_the_sdk_and_acts(tmp_path: Path, engine: Engine) -> None:
    async with open_service(tmp_path) as service:
        member = await service.member()
        assert given_options("generate", GenerationOptions, {"mirror": True})
        refused = await create(service, member, mirror="yes")
        assert error_of(refused)["message"] == "mirror: must be true or false"
        image_id = await service.completed_image(member)
        refused = await create(service, member, mirror=True, image_id=image_id, mask_image_id=image_id)
        assert error_of(refused)["message"] == "mirror: takes no mask_image_id"
        plain, mirrored = [await drawn(service, member, engine, mirror=asked) for asked in (False, True)]
    assert np.array_equal(mirrored, plain[:, ::-1])
    assert not np.array_equal(mirrored, plain)


async def create(service: TestService, member: Member, **asked: Any) -> httpx.Response:
    body = {**CIRCLE, "steps": 1, "seed": 7, **asked}
    return await service.client.post("/v1/jobs", json=body, headers=member.a)


async def drawn(service: TestService, member: Member, engine: Engine, *, mirror: bool) -> np.ndarray:
    """Have an image drawn from the record of its job, as a worker does."""
    job = (await create(service, member, mirror=mirror)).json()
    assert job["request"]["mirror"] is mirror
    await service.lease(job["id"])
    resources = service.resources
    executor = GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)
    request: Any = service.claims[job["id"]].request
    (image,) = await images_of(executor, request)
    return image
