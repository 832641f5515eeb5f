"""A job from the prompt to the image, through both clients, with a key of either interface."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from serve_app.api.jobs.schemas import GenerationWish, UpscaleWish
from serve_app.client import (
    AsyncClient,
    Client,
    Conflict,
    GenerationOptions,
    InvalidRequest,
    JobCanceled,
    JobFailed,
    JobOptions,
    NotFound,
    WaitTimeout,
)
from serve_app.domain.jobs import JobKind
from serve_app.settings import Settings
from tests.client.conftest import LORA, PROMPT, LossyTransport, RecordingTransport
from tests.live import Live, live_service
from tests.support import adapter_id, wait_until


@pytest.mark.parametrize("interface", ["a", "b"])
def test_words_that_the_model_has_never_read_are_named(live: Live, key: str, interface: Literal["a", "b"]) -> None:
    with Client(live.base_url, key, interface=interface) as client:
        job = client.generate("a red dragon, naïve", lora_id=LORA)
        assert job.unknown_words == ("dragon", "naïve")
        assert job.wait(timeout=20).unknown_words == ("dragon", "naïve")


def test_generate_wait_and_open_the_image(live: Live, client: Client) -> None:
    percentages: list[int] = []
    live.outcome = "leave"
    job = client.generate(PROMPT, lora_id=LORA, seed=7, width=768, num_images=2)
    assert (job.id[:4], job.status, job.images, job.unknown_words) == ("job_", "queued", [], ())
    live.outcome = "complete"
    live.run(live.hint(JobKind.GENERATION, ""))
    job.wait(timeout=20, on_progress=percentages.append)
    assert (job.status, job.progress, job.done) == ("completed", 100, True)
    assert percentages == sorted(percentages)
    assert percentages[-1] == 100
    assert [(image.width, image.height) for image in job.images] == [(768, 512)] * 2
    assert job.images[1].pil().size == (768, 512)
    assert job.images[0].image_id.startswith("img_")
    assert job.completed_at is not None


async def test_the_async_client_does_the_same(live: Live, key: str, tmp_path: Path) -> None:
    percentages: list[int] = []
    live.outcome = "leave"
    async with AsyncClient(live.base_url, key) as client:
        job = await client.generate(PROMPT, lora_id=LORA, seed=7, width=768, num_images=2)
        live.outcome = "complete"
        await asyncio.to_thread(live.run, live.hint(JobKind.GENERATION, ""))
        await job.wait(timeout=20, on_progress=percentages.append)
        assert percentages[-1] == 100
        picture = await job.images[1].pil()
        assert picture.size == (768, 512)
        png = await job.images[0].download(tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes() == png
        again = await client.run(job.id)
        assert [image.image_id for image in again.images] == [image.image_id for image in job.images]
        await job.delete()
        with pytest.raises(NotFound):
            await client.run(job.id)


@pytest.mark.parametrize("interface", ["a", "b"])
def test_every_option_is_asked_for_with_a_key_of_either_interface(
    live: Live, key: str, interface: Literal["a", "b"]
) -> None:
    options: GenerationOptions = {
        "base_model": "pocket", "negative_prompt": "boats", "sampler": "dpm++2m-karras", "steps": 9,
        "guidance_scale": 3.0, "guidance_start": 0.25, "guidance_end": 0.5, "width": 320, "height": 256, "num_images": 2, "seed": 7, "prompt_weights": True, "embed_settings": True,
        "output_format": "jpeg", "priority": "low", "start_within": 60, "metadata": {"order": "4711"},
    }  # fmt: skip
    with Client(live.base_url, key, interface=interface) as client:
        job = client.generate(PROMPT, loras={"neon": 0.8, adapter_id("outline"): -0.4}, **options)
    asked: dict[str, Any] = {**options, "prompt": PROMPT, "seeds": ["7", "8"]}
    del asked["seed"]
    asked["loras"] = [{"id": LORA, "weight": 0.8}, {"id": adapter_id("outline"), "weight": -0.4}]
    assert job.request == asked


def test_an_image_is_begun_from_another_and_base_models_say_what_they_take(client: Client) -> None:
    (pocket,) = client.base_models()
    assert (pocket.id, pocket.usual_side, pocket.steps, pocket.mask) == ("pocket", 512, 30, True)
    assert (pocket.guidance_start, pocket.guidance_end) == (0, 1)
    image_id = client.generate(PROMPT).images[0].image_id
    begun: GenerationOptions = {"image_id": image_id, "strength": 0.5, "mask_image_id": image_id}
    request = client.generate(PROMPT, **begun).request
    assert {name: request[name] for name in begun} == begun
    with pytest.raises(InvalidRequest, match="strength: needs an image_id"):
        client.generate(PROMPT, strength=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["a", "b"])
def test_an_image_of_any_job_is_enlarged_in_any_format(live: Live, key: str, interface: Literal["a", "b"]) -> None:
    with Client(live.base_url, key) as other, Client(live.base_url, key, interface=interface) as client:
        image = other.generate(PROMPT, width=256, height=256).images[0]
        larger = client.upscale(image.image_id, 4, output_format="webp").wait(timeout=20).images[0]
        assert (larger.suffix, larger.pil().size, larger.pil().format) == (".webp", (1024, 1024), "WEBP")
        assert client.upscale(image.image_id).wait(timeout=20).images[0].width == 512
        with pytest.raises(TypeError, match=r"upscale\(\) got an unexpected keyword argument 'steps'"):
            image.upscale(steps=3)  # pyright: ignore[reportCallIssue]


def test_loras_are_those_the_account_may_use(client: Client) -> None:
    names = {lora.name for lora in client.loras.list()}
    assert "Outline" in names
    assert "Private" not in names


def test_all_that_jobs_can_be_asked_for_are_options() -> None:
    given_by_itself = {"kind", "prompt", "loras", "image_id", "scale_factor"}
    assert GenerationOptions.__annotations__.keys() - {"lora_weight"} == (
        GenerationWish.model_fields.keys() - given_by_itself | {"image_id"}
    )
    assert JobOptions.__annotations__.keys() == UpscaleWish.model_fields.keys() - given_by_itself


@pytest.mark.parametrize("interface", ["a", "b"])
def test_a_failed_job_raises_with_its_code(live: Live, key: str, interface: Literal["a", "b"]) -> None:
    live.outcome = "fail"
    with Client(live.base_url, key, interface=interface) as client:
        job = client.generate(PROMPT, lora_id=LORA)
        with pytest.raises(JobFailed, match="has no images: the brush broke") as failed:
            job.wait(timeout=20)
    assert (failed.value.job_id, failed.value.code) == (job.id, "generation_failed")
    assert (job.status, job.error_code, job.error) == ("failed", "generation_failed", "the brush broke")


async def test_waiting_without_progress_is_one_long_poll(live: Live, key: str) -> None:
    live.outcome = "leave"
    async with AsyncClient(live.base_url, key) as client:
        job = await client.generate(PROMPT, lora_id=LORA)
        waiting = asyncio.create_task(job.wait(timeout=20))
        await wait_until(lambda: live.resources.waits.count == 1)
        await asyncio.to_thread(live.run, live.resources.queue.cancel(job.id, account_id=None))
        with pytest.raises(JobCanceled):
            await waiting


def test_waiting_times_out_and_the_job_goes_on(live: Live, client: Client) -> None:
    live.outcome = "leave"
    job = client.generate(PROMPT, lora_id=LORA)
    with pytest.raises(WaitTimeout, match=job.id):
        job.wait(timeout=0.5)
    assert job.refresh().status == "queued"
    assert job.estimated_completion_time is not None
    with pytest.raises(WaitTimeout, match=r"still queued after 0\.3 s"):
        client.generate(PROMPT, timeout=0.3)


def test_the_key_is_never_sent_to_the_image_host(live: Live, key: str) -> None:
    transport = RecordingTransport()
    with Client(live.base_url, key, transport=transport) as client:
        client.generate(PROMPT, lora_id=LORA).wait(timeout=20).images[0].download()
    downloads = [request for request in transport.requests if request.url.path.startswith("/files/")]
    assert len(downloads) == 1
    sent = [*downloads[0].headers.values(), str(downloads[0].url)]  # not str(headers): httpx masks credentials there
    assert not [text for text in sent if key in text]


@pytest.mark.slow
async def test_an_expired_url_is_signed_again(settings: Settings, redis_db: object) -> None:
    with live_service(settings.model_copy(update={"image_url_life": timedelta(seconds=2)})) as live:
        _, key = live.member()
        async with AsyncClient(live.base_url, key) as client, httpx.AsyncClient() as browser:
            job = await (await client.generate(PROMPT, lora_id=LORA)).wait(timeout=20)
            image = job.images[0]

            async def has_expired() -> bool:
                return (await browser.get(image.url)).status_code != 200

            await wait_until(has_expired)
            assert (await image.pil()).size == (512, 512)


def test_an_unfinished_job_is_not_deleted(live: Live, key: str) -> None:
    live.outcome = "leave"
    with Client(live.base_url, key, interface="b") as client:
        job = client.generate(PROMPT, lora_id=LORA)
        with pytest.raises(Conflict, match="cancel it first"):
            job.delete()
        assert job.refresh().status == "queued"


def test_a_deletion_whose_answer_was_lost_is_no_error(live: Live, key: str) -> None:
    with Client(live.base_url, key, transport=LossyTransport(1, "DELETE")) as client:
        job = client.generate(PROMPT, lora_id=LORA).wait(timeout=20)
        job.delete()
        for call in (lambda: client.run(job.id), lambda: client.delete(job.id)):
            with pytest.raises(NotFound):
                call()
