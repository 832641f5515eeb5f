"""A retried POST: the same key and body answer with the first job; another body is a conflict."""

import hashlib
import json
from typing import Any

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.app import ACCEPTED, BODIES, BODY_A, ID_FIELD, LORA, PROMPT_FIELD, Member, TestService, refused
from tests.api.test_creation import SHORTEST, upload
from tests.made_jobs import generation_of

A, B = Variant.A, Variant.B


async def post(
    service: TestService, member: Member, variant: Variant, key: str, body: Any = None, path: str = "/v1/generate"
) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body or BODIES[variant])
    headers = member.headers(variant) | {"Idempotency-Key": key}
    return await service.client.post(path, content=content, headers=headers)


@pytest.mark.parametrize("variant", Variant)
async def test_a_retry_gets_the_first_job_also_after_its_end_and_another_body_is_a_conflict(
    service: TestService, member: Member, variant: Variant
) -> None:
    first = await post(service, member, variant, "k1")
    assert "idempotency-replayed" not in first.headers
    for is_over in (False, True):
        if is_over:
            await service.complete(first.json()[ID_FIELD[variant]])
        again = await post(service, member, variant, "k1")
        assert first.status_code == again.status_code == ACCEPTED[variant]
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
        assert set(again.json()) == set(first.json())
        assert (again.json()["status"], again.json().get("estimated_time", 1) >= 1) == (first.json()["status"], True)
        assert again.json()[ID_FIELD[variant]] == first.json()[ID_FIELD[variant]]
        other = await post(service, member, variant, "k1", BODIES[variant] | {"seed": 1})
        refused(other, 409, "idempotency_conflict")
    assert len(await service.resources.job_history.list(member.account.id)) == 1


@pytest.mark.parametrize("variant", Variant)
async def test_the_same_body_spelled_otherwise_is_the_same_body(
    service: TestService, member: Member, variant: Variant
) -> None:
    body = BODIES[variant] | {"width": 512, "seed": 7}
    first = await post(service, member, variant, "k1", body)
    turned = dict(reversed(body.items()))
    spelled = json.dumps(turned, indent=3).replace("512", "512.0").replace(": 7", ": 70e-1")
    again = await post(service, member, variant, "k1", spelled)
    assert again.headers.get("idempotency-replayed") == "true", again.text
    assert again.json()[ID_FIELD[variant]] == first.json()[ID_FIELD[variant]]


WRITTEN_OUT: dict[Variant, dict[str, Any]] = {
    A: {"lora_weight": 0.75, "width": 512, "height": 512, "num_images": 1, "guidance_scale": 7.5, "steps": 30},
    B: {"negative_prompt": " ", "lora_weight": 0.75, "guidance": 7.5, "width": 512, "height": 512},
}


@pytest.mark.parametrize("seed", [{}, {"seed": 7}], ids=["no seed", "a seed"])
@pytest.mark.parametrize("variant", Variant)
async def test_what_asks_for_the_same_is_the_same_request(
    service: TestService, member: Member, variant: Variant, seed: dict[str, int]
) -> None:
    """Defaults that are written out and white space around a prompt ask for nothing else."""
    body = BODIES[variant] | seed
    prompt = PROMPT_FIELD[variant]
    first = await post(service, member, variant, "k1", body)
    spaced = body | WRITTEN_OUT[variant] | {prompt: f"\n {body[prompt]} "}
    again = await post(service, member, variant, "k1", spaced)
    assert again.headers.get("idempotency-replayed") == "true", again.text
    assert again.json()[ID_FIELD[variant]] == first.json()[ID_FIELD[variant]]


async def test_no_seed_is_another_request_than_the_seed_that_was_drawn(service: TestService, member: Member) -> None:
    first = await post(service, member, A, "k1")
    drawn = (await generation_of(service.resources, first.json()["request_id"])).seeds[0]
    assert (await post(service, member, A, "k1", BODY_A | {"seed": drawn})).status_code == 409


async def test_an_upscale_can_be_retried_and_is_not_a_generation(service: TestService, member: Member) -> None:
    image_id = await service.completed_image(member)
    first = await post(service, member, A, "k1", {"image_id": image_id}, "/v1/upscale")
    again = await post(service, member, A, "k1", {"image_id": image_id, "scale_factor": 2}, "/v1/upscale")
    larger = await post(service, member, A, "k1", {"image_id": image_id, "scale_factor": 4}, "/v1/upscale")
    assert larger.status_code == 409
    assert again.json()["request_id"] == first.json()["request_id"]
    assert again.headers["idempotency-replayed"] == "true"
    assert (await post(service, member, A, "k1")).status_code == 409


TOLD = "https://1.1.1.1/told"
_JOB = "output_format=<ImageFormat.PNG: 'png'>, metadata={}, priority=<Priority.NORMAL: 'normal'>, start_within=None"
_LORAS, _LORAS_BEFORE = f'"loras": [{{"id": "{LORA}"}}]', f"loras=(LoraUse(id='{LORA}', weight=0.75),)"
_IMAGES = (
    f"GenerationRequest({_JOB}, prompt='a lighthouse', {_LORAS_BEFORE}, base_model='', negative_prompt='', width=512, "
    "height=512, guidance_scale=7.5, steps=30, sampler='', seeds=SEEDS, prompt_weights=False, image=None, "
    "strength=0.8, mask=None)"
)
_WISH = {"prompt": "a lighthouse", "loras": [{"id": LORA}], "seed": 7, "webhook_url": TOLD}
DIGESTED: dict[str, tuple[Variant, str, dict[str, Any], str, str]] = {
    "A": (
        A, "/v1/generate", BODY_A,
        f'{{{_LORAS}, "prompt": "a lighthouse", "seeds": 1}}', f"1 {_IMAGES}".replace("SEEDS", "()"),
    ),
    "B": (
        B, "/v1/generate", BODIES[B] | {"seed": 7},
        f'{{{_LORAS}, "prompt": "a lighthouse", "seeds": [7]}}', _IMAGES.replace("SEEDS", "(7,)"),
    ),
    "upscale": (
        A, "/v1/upscale", {"scale_factor": 4},
        '{"image_id": "IMAGE", "scale_factor": 4}',
        f"UpscaleRequest({_JOB}, image_id='IMAGE', scale_factor=4, source_uri='URI', "
        "source_width=WIDTH, source_height=HEIGHT)",
    ),
    "wish": (
        A, "/v1/jobs", _WISH,
        f'{{{_LORAS}, "prompt": "a lighthouse", "seed": 7}}',
        f"Wish(prompt='a lighthouse', seed=7, num_images=1, {_LORAS_BEFORE}, base_model=None, negative_prompt='', "
        "width=None, height=None, steps=None, guidance_scale=None, sampler=None, prompt_weights=False, image_id=None, "
        f"strength=None, mask_image_id=None, {_JOB})",
    ),
}  # fmt: skip
"""What is digested of each kind of request, and what versions up to aec29b3e digested. No field that is added
or renamed may change either: the repeat of a job that was accepted before an upgrade would be a conflict after it."""


OTHERWISE = {"/v1/generate": {"seed": 9}, "/v1/upscale": {"scale_factor": 2}, "/v1/jobs": {"start_within": 9}}


@pytest.mark.parametrize("kind", DIGESTED)
async def test_a_repeat_stays_one_whichever_version_accepted_the_job(
    service: TestService, member: Member, kind: str
) -> None:
    variant, path, body, given, before = DIGESTED[kind]
    if kind == "upscale":
        image = (await service.complete(await service.submit(member))).images[0]
        body = body | {"image_id": image.image_id}
        given, before = (text.replace("IMAGE", image.image_id) for text in (given, before))
        before = before.replace("URI", image.image_uri)
        before = before.replace("WIDTH", str(image.width)).replace("HEIGHT", str(image.height))
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (given, before)]
    if kind == "wish":
        digests = [hashlib.sha256(f"{digest} {TOLD}".encode()).hexdigest() for digest in digests]
    first, written = await post(service, member, variant, "k1", body, path), list[dict[str, str]]()
    for _ in ("by this version", "by the one before"):
        again = await post(service, member, variant, "k1", body, path)
        assert (again.headers.get("idempotency-replayed"), again.headers["location"]) == (
            "true", first.headers["location"],
        ), again.text  # fmt: skip
        other = await post(service, member, variant, "k1", body | OTHERWISE[path], path)
        assert other.status_code == 409
        written += await service.keep_digests_of_before(member)
    assert [written[0]["given"], written[0]["body"]] == digests


@pytest.mark.parametrize("asked", [SHORTEST, {"kind": "upscale"}], ids=["generation", "upscale"])
async def test_a_repeat_gets_its_job_though_the_picture_was_deleted(
    service: TestService, member: Member, asked: dict[str, str]
) -> None:
    body = asked | {"image_id": await upload(service, member, 64, 64)}
    first = await post(service, member, A, "k1", body, "/v1/jobs")
    await service.complete(first.json()["id"])
    deleted = await service.client.delete(f"/v1/images/{body['image_id']}", headers=member.a)
    assert deleted.status_code == 204
    again = await post(service, member, A, "k1", body, "/v1/jobs")
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert again.headers["idempotency-replayed"] == "true"
    refused(await post(service, member, A, "k1", body | {"priority": "low"}, "/v1/jobs"), 409, "idempotency_conflict")
    refused(await post(service, member, A, "k2", body, "/v1/jobs"), 404, "not_found")
    await service.keep_digests_of_before(member)
    of_before = await post(service, member, A, "k1", body, "/v1/jobs")  # which digested where an upscale's picture was
    assert of_before.status_code == (404 if "kind" in asked else 202)


async def test_keys_are_the_account_s_own(service: TestService, member: Member) -> None:
    other = await service.member()
    first, second = await post(service, member, A, "k1"), await post(service, other, A, "k1")
    assert first.json()["request_id"] != second.json()["request_id"]


async def test_a_refused_request_does_not_use_up_its_key(service: TestService, member: Member) -> None:
    assert (await post(service, member, A, "k1", BODY_A | {"steps": 1})).status_code == 400
    assert (await post(service, member, A, "k1", BODY_A | {"lora_id": "nothing"})).status_code == 403
    answer = await post(service, member, A, "k1")
    assert answer.status_code == 202
    assert "idempotency-replayed" not in answer.headers


@pytest.mark.parametrize("key", ["x", "x" * 255, '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "!~"])
async def test_any_visible_ascii_is_a_key(service: TestService, member: Member, key: str) -> None:
    assert (await post(service, member, A, key)).status_code == 202


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"a b", b"a\tb", b"\xff", "é".encode(), b"\x7f"])
@pytest.mark.parametrize("variant", Variant)
async def test_anything_else_is_not_a_key(service: TestService, member: Member, variant: Variant, key: bytes) -> None:
    headers = [(b"idempotency-key", key), *((n.encode(), v.encode()) for n, v in member.headers(variant).items())]
    answer = await service.client.post("/v1/generate", json=BODIES[variant], headers=headers)
    refused(answer, 400, "invalid_parameter", "Idempotency-Key: ")


async def test_two_keys_are_refused(service: TestService, member: Member) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b"), *member.a.items()]
    assert (await service.client.post("/v1/generate", json=BODY_A, headers=headers)).status_code == 400
