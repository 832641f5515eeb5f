"""OpenAI's own client against the running service: images, models, streams, errors, hang-ups and retries."""

import asyncio
import base64
import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from io import BytesIO
from itertools import count
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from PIL import Image

from serve_app.api import attended
from serve_app.api.openai import routes
from serve_app.domain.jobs import Claim, Job, JobState
from serve_app.domain.requests import GenerationRequest, ImageFormat, LoraUse
from serve_app.jobs.deletion import remove_listed_objects
from serve_app.jobs.previews import Preview
from serve_app.jobs.queue import new_nonce
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from tests.api.app import LORA
from tests.live import Live, live_service
from tests.support import adapter_id, plain_redis, png_of, store_image, wait_until

PNG = b"\x89PNG"
BEFORE = (
    "Wish(prompt='a boat', seed=None, num_images=1, loras=(), base_model=None, negative_prompt='', width=None, "
    "height=None, steps=None, guidance_scale=None, sampler=None, prompt_weights=False, image_id=None, strength=None, "
    "mask_image_id=None, output_format=<ImageFormat.PNG: 'png'>, metadata={}, priority=<Priority.NORMAL: 'normal'>, "
    "start_within=540)"
)
"""What versions up to aec29b3e digested of a boat."""
_names = count(1)


class Caller:
    """OpenAI's client with a key of an account of its own, and what became of the account's jobs."""

    def __init__(self, live: Live, **plans: str) -> None:
        self.live = live
        self.account, key = live.member(f"caller {next(_names)}", **plans)
        self.openai = OpenAI(base_url=f"{live.base_url}/openai/v1", api_key=key, max_retries=0)
        self.api = httpx.Client(base_url=live.base_url, headers={"Authorization": f"Bearer {key}"})

    def jobs(self) -> list[Job]:
        return list(self.live.run(self.live.resources.job_history.list(self.account.id)))

    def pictures(self) -> list[str]:
        return [image["id"] for image in self.api.get("/v1/images").json()["images"]]

    def objects(self) -> list[str]:
        images, lease = self.live.resources.images, timedelta(hours=1)
        self.live.run(remove_listed_objects(self.live.resources.deletions, images, lease=lease))
        return self.live.run(images.names(images.account_folder(self.account.id)))

    def states(self) -> list[JobState]:
        return [job.state for job in self.jobs()]

    def request(self) -> GenerationRequest:
        (job,) = self.jobs()
        assert isinstance(job.request, GenerationRequest)
        return job.request

    def claim(self) -> Claim:
        """Take the account's waiting job, as a worker does."""
        queue = self.live.resources.queue
        claims = self.live.run(queue.claim("tests", pool="generation", nonce=new_nonce(), limit=16))
        return next(claim for claim in claims if claim.account_id == self.account.id)

    async def all_are(self, *states: JobState) -> None:
        await wait_until(lambda: self.states() == list(states))


@pytest.fixture
def caller(live: Live) -> Iterator[Caller]:
    caller = Caller(live, plan_a="unlimited")
    with caller.openai, caller.api:
        yield caller
    live.outcome = "complete"


def test_images_are_drawn_by_a_lora_s_name_as_base64(caller: Caller) -> None:
    answer = caller.openai.images.generate(
        model="Outline",
        prompt="a boat",
        n=2,
        size="256x320",  # pyright: ignore[reportArgumentType] # any size of the base model
        response_format="b64_json",
        output_format="webp",
        background="opaque",
        quality="high",
        style="vivid",
        moderation="low",
        user="someone",
        output_compression=20,
        extra_body={
            "safety_identifier": "someone",
            "seed": 7,
            "negative_prompt": "fog",
            "loras": [{"id": "neon", "weight": 0.5}],
            "steps": 9,
        },
    )
    images = [base64.b64decode(image.b64_json or "") for image in answer.data or []]
    assert [image[:4] for image in images] == [b"RIFF"] * 2
    assert ({image.url for image in answer.data or []}, answer.size) == ({None}, "256x320")
    request = caller.request()
    assert (request.loras, request.num_images) == ((LoraUse(LORA, 0.75), LoraUse(adapter_id("neon"), 0.5)), 2)
    assert (request.width, request.height, request.output_format, request.quality) == (256, 320, ImageFormat.WEBP, 20)
    assert (request.seeds, request.negative_prompt, request.steps) == ((7, 8), "fog", 9)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (6, 640, 646)
    assert usage.model_extra == {"megapixel_steps": 2 * 9 * 256 * 320 / 1e6}


@pytest.mark.parametrize(("model", "form"), [("pocket", "url"), (LORA, openai.omit)])
def test_an_image_of_an_id_has_an_address(caller: Caller, model: str, form: Any) -> None:
    answer = caller.openai.images.generate(model=model, prompt="a boat", size="auto", response_format=form)
    (image,) = answer.data or []
    assert httpx.get(image.url or "").content[:4] == PNG
    assert bool(image.b64_json) == (form is openai.omit), "a client that says nothing may look for either"
    assert (caller.request().lora_id, caller.request().base_model) == (LORA if model == LORA else "", "pocket")


CLIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "Open WebUI": ({"model": "outline", "n": 2, "size": "512x512", "response_format": "b64_json"}, "b64_json"),
    "Open WebUI, gpt-image": ({"model": "gpt-image-1", "n": 1, "size": "512x512"}, "b64_json"),
    "LibreChat": (
        {"model": "gpt-image-1", "n": 10, "background": "auto", "output_format": "webp", "output_compression": 100,
         "quality": "auto", "size": "auto"},
        "b64_json",
    ),
    "LibreChat, DALL-E": (
        {"model": "dall-e-3", "quality": "standard", "style": "vivid", "size": "1024x1024", "n": 1}, "url",
    ),
    "SillyTavern": (
        {"model": "dall-e-3", "size": "1024x1024", "n": 1, "quality": "standard", "style": "vivid",
         "response_format": "b64_json"},
        "b64_json",
    ),
    "SillyTavern, gpt-image": (
        {"model": "gpt-image-1", "size": "1024x1024", "n": 1, "quality": "auto", "moderation": "low"}, "b64_json",
    ),
    "AI SDK": ({"model": "pocket", "n": 1, "size": "512x512", "response_format": "b64_json"}, "b64_json"),
    "LangChain": ({"model": "dall-e-2", "n": 1, "size": "1024x1024"}, "url"),
    "LangChain.js": (
        {"model": "dall-e-3", "n": 1, "size": "1024x1024", "response_format": "url", "style": "vivid",
         "quality": "standard"},
        "url",
    ),
}  # fmt: skip
"""What each client sends besides the prompt, and what it looks for, in November 2026.

`make soak` sees the AI SDK and LangChain's wrappers send it (`test_installed_clients.py`); the others' was read in the
source of Open WebUI 0.12.4, SillyTavern 1.19 (which has OpenAI's address built in) and LibreChat.
"""


@pytest.mark.parametrize(("body", "wanted"), CLIENTS.values(), ids=CLIENTS.keys())
def test_the_bodies_of_other_clients_are_drawn(caller: Caller, body: dict[str, Any], wanted: str) -> None:
    answer = caller.api.post("/openai/v1/images/generations", json={"prompt": "a boat", **body})
    assert answer.status_code == 200, answer.text
    rows, is_known = answer.json()["data"], body["model"] in caller.live.resources.settings.openai_models
    assert len(rows) == body["n"]
    files = [base64.b64decode(row[wanted]) if wanted == "b64_json" else httpx.get(row[wanted]).content for row in rows]
    asked = ("512x512" if body["size"] == "auto" else body["size"], body.get("output_format", "png").upper())
    for picture in (Image.open(BytesIO(file)) for file in files):
        assert ("{}x{}".format(*picture.size), picture.format) == asked
    if wanted == "b64_json":  # Open WebUI takes an address first, and opens none that is private
        assert "url" not in rows[0]
    assert caller.request().base_model == "pocket"
    assert caller.request().lora_id == ("" if is_known or body["model"] == "pocket" else LORA)


def png(mode: str, *pixels: Any) -> bytes:
    """Encode a picture whose left and right halves have these colors."""
    picture, out = Image.new(mode, (64, 64), pixels[0]), BytesIO()
    picture.paste(pixels[-1], (32, 0, 64, 64))
    picture.save(out, "png")
    return out.getvalue()


def test_an_image_is_edited_where_the_mask_is_transparent(caller: Caller) -> None:
    image, mask = png("RGB", (255, 0, 0)), png("RGBA", (0, 0, 255, 255), (9, 9, 9, 0))
    edit: Any = caller.openai.images.edit
    asked: dict[str, Any] = {"image": image, "mask": mask, "prompt": "a boat", "n": 2, "size": "512x512"}
    asked["input_fidelity"] = "high"
    first, again = (edit(**asked, extra_headers={"Idempotency-Key": "one"}) for _ in range(2))
    assert len(first.data or []) == 2
    assert first.data == again.data
    request, images = caller.request(), caller.live.resources.images
    assert (request.image is not None, request.mask is not None, request.num_images) == (True, True, 2)
    stored = [caller.live.run(images.get(each.uri)) for each in (request.image, request.mask) if each]
    pixels = [[Image.open(BytesIO(each)).getpixel((x, 9)) for x in (0, 63)] for each in stored]
    assert pixels == [[(255, 0, 0)] * 2, [0, 255]]
    wrong: list[Any] = [({"mask": image}, "mask"), ({"mask": b""}, "mask"), ({"image": b"GIF"}, None), ({"n": 11}, "n")]
    wrong += [({"image": png_of((64, 640))}, "image"), ({"extra_body": {"n": "9" * 5000}}, "n")]
    for fields, param in (*wrong, ({"image": [image] * 2}, "image")):
        with pytest.raises(openai.APIStatusError) as error:
            edit(**{"image": [image], "prompt": "a boat", **fields})
        assert error.value.param == param or (param is None and error.value.status_code == 415)
    both = {"image": image, "image[]": png("RGB", (1, 2, 3))}
    refused = caller.api.post("/openai/v1/images/edits", data={"prompt": "a boat"}, files=both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "image")
    events = edit(**asked, stream=True)
    assert [event.type for event in events] == ["image_edit.completed"] * 2


def test_an_edit_s_picture_is_stored_once_and_goes_with_its_jobs(caller: Caller) -> None:
    edit: Any = caller.openai.images.edit
    asked = {"image": png("RGB", (1, 2, 3), (3, 2, 1)), "prompt": "a boat"}
    wrong = [{"size": "300x300"}, {"model": "gpt-image-2"}, {"mask": b"GIF"}, {"size": "256x2048"}]
    for fields in wrong:
        with pytest.raises(openai.APIStatusError) as error:
            edit(**asked, **fields)
        assert error.value.response.headers["x-should-retry"] == "false", fields
    assert (caller.pictures(), caller.objects()) == ([], []), "a refusal leaves nothing"
    for _ in range(3):
        edit(**asked)
    (picture,) = caller.pictures()
    for number, job in enumerate(caller.jobs()):
        assert caller.pictures() == [picture], number
        assert caller.api.delete(f"/v1/jobs/{job.id}").status_code == 204
    assert caller.pictures() == []
    edit(**asked)
    on_purpose = caller.api.post("/v1/images", files={"file": asked["image"]}).json()["id"]
    assert caller.pictures() == [on_purpose]
    caller.api.delete(f"/v1/jobs/{caller.jobs()[0].id}")
    assert caller.pictures() == [on_purpose]


@pytest.mark.parametrize(("plans", "wait"), [({"plan_a": "single"}, 3600), ({"plan_a": "unlimited"}, 0)])
def test_what_no_retry_cures_is_sent_once(live: Live, plans: dict[str, str], wait: int) -> None:
    """The second call is over the plan's limit for an hour, or has another body."""
    caller, sent = Caller(live, **plans), list[str]()
    http = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: sent.append(request.url.path)]})
    with caller.openai.with_options(max_retries=2, http_client=http) as client:
        key = {"Idempotency-Key": "one"}
        client.images.generate(prompt="a boat", extra_headers=key)
        with pytest.raises(openai.APIStatusError) as error:
            client.images.generate(prompt="a ship", extra_headers=key)
    assert len(sent) == 2
    headers = error.value.response.headers
    assert (headers["x-should-retry"], int(headers.get("retry-after", 0)) > 60) == ("false", wait > 0)


def test_models_are_loras_and_base_models(caller: Caller) -> None:
    models = {model.id: getattr(model, "name", "") for model in caller.openai.models.list()}
    assert (models["pocket"], models[LORA]) == ("", "Outline")
    assert [caller.openai.models.retrieve(name).id for name in ("pocket", LORA, "outline")] == ["pocket", LORA, LORA]
    with pytest.raises(openai.NotFoundError):
        caller.openai.models.retrieve("Private")


REFUSED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = {
    "a size that is none": ({"size": "big"}, openai.BadRequestError, "size"),
    "no multiple of eight": ({"size": "300x300"}, openai.BadRequestError, "size"),
    "too large": ({"size": "256x2048"}, openai.BadRequestError, "size"),
    "too many": ({"n": 11}, openai.BadRequestError, "n"),
    "a PNG that loses something": ({"output_compression": 50}, openai.BadRequestError, "output_compression"),
    "an unknown LoRA": ({"extra_body": {"loras": [{"id": "x"}]}}, openai.BadRequestError, "loras"),
    "LoRAs that are none": ({"extra_body": {"loras": "x"}}, openai.BadRequestError, "loras"),
    "a LoRA's weight": ({"extra_body": {"loras": [{"id": "x", "weight": "1"}]}}, openai.BadRequestError, "loras"),
    "a background that is none": ({"background": "transparent"}, openai.BadRequestError, "background"),
    "an unknown field": ({"extra_body": {"negative": "x"}}, openai.BadRequestError, "negative"),
    "an unknown model": ({"model": "gpt-image-2"}, openai.NotFoundError, "model"),
    "a LoRA of others": ({"model": "Private"}, openai.NotFoundError, "model"),
}


@pytest.mark.parametrize(("fields", "kind", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_an_error_names_its_parameter(
    caller: Caller, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str | None
) -> None:
    generate: Any = caller.openai.images.generate
    with pytest.raises(kind) as error:
        generate(**{"prompt": "a boat", **fields})
    assert (error.value.param, error.value.type) == (
        param, "not_found_error" if kind is openai.NotFoundError else "invalid_request_error",
    )  # fmt: skip
    if "background" in fields:
        assert "transparent is not drawn here" in str(error.value)
    assert not caller.jobs()


def test_a_wrong_key_is_refused_before_the_body(live: Live) -> None:
    with OpenAI(base_url=f"{live.base_url}/openai/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.images.generate(prompt="", n=99)
        assert error.value.code == "unauthorized"
        with pytest.raises(openai.NotFoundError):
            client.files.list()


@pytest.mark.parametrize("base", ["", "/v1", "/openai"])
def test_another_address_is_answered_with_the_right_one(live: Live, base: str) -> None:
    client = OpenAI(base_url=f"{live.base_url}{base}", api_key="any")
    with client, pytest.raises(openai.APIStatusError, match="images API is below /openai/v1"):
        client.images.generate(prompt="a boat")


def test_a_failed_job_is_told_once(caller: Caller) -> None:
    caller.live.outcome = "fail"
    with pytest.raises(openai.InternalServerError) as error:
        caller.openai.with_options(max_retries=2).images.generate(prompt="a boat")
    assert (error.value.code, caller.states()) == ("generation_failed", [JobState.FAILED])
    with pytest.raises(openai.APIError, match="the brush broke"):
        list(caller.openai.images.generate(prompt="a boat", stream=True))


def test_a_stream_shows_previews_and_then_the_image(caller: Caller) -> None:
    caller.live.outcome = "leave"
    live, resources = caller.live, caller.live.resources
    stream = caller.openai.images.generate(prompt="a boat", stream=True, partial_images=2)
    claim = caller.claim()
    for index, progress in enumerate((40, 70)):
        live.run(resources.previews.put(claim.lease.job_id, {0: Preview(index, b"preview %d" % index)}))
        live.run(resources.queue.heartbeat(claim.lease, progress=progress))
        event = next(stream)
        assert event.type == "image_generation.partial_image"
        assert (event.partial_image_index, base64.b64decode(event.b64_json)) == (index, b"preview %d" % index)
    assert live.run(resources.previews.is_watched(claim.lease.job_id))
    image = live.run(store_image(resources.images, claim))
    live.run(resources.queue.finish(claim.lease, [image], seconds=0.5))
    (event,) = stream
    assert event.type == "image_generation.completed"
    assert (base64.b64decode(event.b64_json)[:4], event.size) == (PNG, "512x512")


async def test_a_caller_that_hangs_up_cancels_its_job(caller: Caller) -> None:
    caller.live.outcome = "leave"
    caller.openai.images.generate(prompt="a boat", stream=True).close()
    await caller.all_are(JobState.CANCELED)
    with pytest.raises(openai.APITimeoutError):  # it tries again once, with no idempotency key
        caller.openai.with_options(timeout=0.5, max_retries=1).images.generate(prompt="a boat")
    await caller.all_are(*[JobState.CANCELED] * 3)


async def test_a_retry_by_an_idempotency_key_draws_once(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    caller.live.outcome = "leave"
    key = {"Idempotency-Key": "order-4711"}
    with pytest.raises(openai.APITimeoutError):
        caller.openai.with_options(timeout=0.5).images.generate(prompt="a boat", extra_headers=key)
    await caller.all_are(JobState.CANCELED)
    caller.live.outcome = "complete"
    first = caller.openai.images.generate(prompt="a boat", extra_headers=key)
    monkeypatch.setattr(attended, "LONGEST_START_S", 600)  # a number of ours, which the caller has not given
    assert caller.openai.images.generate(prompt="a boat", extra_headers=key).data == first.data
    assert caller.states() == [JobState.COMPLETED, JobState.CANCELED]
    with pytest.raises(openai.ConflictError):
        caller.openai.images.generate(prompt="a ship", extra_headers=key)
    with plain_redis(caller.live.resources.redis_url) as redis:  # a version up to aec29b3e compares its own text alone
        names = redis.keys(redis_key("idempotency", caller.account.id, "*"))
        assert {redis.hget(name, "body") for name in names} == {hashlib.sha256(BEFORE.encode()).hexdigest()}


@pytest.mark.parametrize("leaver", ["first", "second"])
async def test_a_job_goes_on_while_anybody_waits_for_it(caller: Caller, leaver: str) -> None:
    caller.live.outcome = "leave"
    live, generate = caller.live, caller.openai.images.generate
    key, callers = {"Idempotency-Key": "order-4713"}, redis_key("shared_waiters", caller.account.id, "*")
    digest = hashlib.sha256(b"order-4713").hexdigest()
    with plain_redis(live.resources.redis_url) as redis:  # a version beside this one counts callers there
        redis.mset({redis_key("shared_calls", caller.account.id, variant, digest): 1 for variant in "ab"})

    def counted() -> list[int]:
        with plain_redis(live.resources.redis_url) as redis:
            return [redis.scard(name) for name in redis.keys(callers)]

    def leaving() -> Any:
        return generate(prompt="a boat", stream=True, extra_headers=key)

    stream = leaving() if leaver == "first" else None
    staying = asyncio.create_task(asyncio.to_thread(generate, prompt="a boat", extra_headers=key))
    await wait_until(lambda: counted() == [1 + (leaver == "first")])
    stream = stream or leaving()
    stream.close()
    await wait_until(lambda: counted() == [1])
    claim = caller.claim()
    image = live.run(store_image(live.resources.images, claim))
    live.run(live.resources.queue.finish(claim.lease, [image], seconds=0.5))
    assert (len((await staying).data or []), caller.states()) == (1, [JobState.COMPLETED])
    await wait_until(lambda: not counted())


@pytest.mark.parametrize("key", ["order-4712", ""])
@pytest.mark.parametrize("end", ["drain", "time"])
async def test_a_wait_that_ends_before_the_job_is_to_be_repeated(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, key: str, end: str
) -> None:
    """With an idempotency key the repeat goes on with the same job; without one the first is canceled."""
    if end == "time":
        monkeypatch.setattr(routes, "LONGEST_WAIT_S", 0.6)
    live, headers = caller.live, {"Idempotency-Key": key} if key else {}
    live.outcome = "leave"
    generate = partial(caller.openai.images.generate, prompt="a boat", extra_headers=headers)
    waiting = asyncio.create_task(asyncio.to_thread(generate))
    await wait_until(caller.jobs)
    with live.ingress_down() if end == "drain" else nullcontext(), pytest.raises(openai.InternalServerError) as error:
        await waiting
    told = error.value.response.headers
    assert (error.value.status_code, error.value.code, told["retry-after"]) == (503, "unavailable", "5")
    assert ("x-should-retry" in told, "goes on with the same job" in error.value.message) == (False, True)
    if not key:
        await caller.all_are(JobState.CANCELED)
        return
    claim = caller.claim()
    image = live.run(store_image(live.resources.images, claim))
    live.run(live.resources.queue.finish(claim.lease, [image], seconds=0.5))
    answer = await asyncio.to_thread(generate)
    assert (len(answer.data or []), caller.states()) == (1, [JobState.COMPLETED])


async def test_a_caller_for_whom_there_is_no_place_to_wait_leaves_no_job(settings: Settings) -> None:
    with live_service(settings.model_copy(update={"waiting_polls": 0})) as live:
        live.outcome = "leave"
        caller = Caller(live)
        generate = partial(caller.openai.images.generate, prompt="a boat")
        with pytest.raises(openai.InternalServerError, match="The service is overloaded") as error:
            generate()
        assert (error.value.code, error.value.status_code) == ("overloaded", 503)
        assert "x-should-retry" not in error.value.response.headers
        with caller.openai, pytest.raises(openai.APIError, match="The service is overloaded"):
            list(generate(stream=True))
        await caller.all_are(*[JobState.CANCELED] * 2)
