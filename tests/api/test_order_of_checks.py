"""Requests that are wrong in two ways: the check that comes first in the contract answers."""

import json
from typing import Any

import pytest

from serve_app.domain.requests import Variant
from tests.api.app import BODIES, BODY_A, BODY_B, LORA_FIELD, Member, TestService, refused
from tests.support import PRIVATE_ADAPTER

A, B = Variant.A, Variant.B
LARGE = b" " * 70_000
BAD_KEY = {A: {"Authorization": "Bearer nonsense"}, B: {"X-API-Key": "nonsense"}}
OUT_OF_RANGE: dict[Variant, dict[str, Any]] = {A: BODY_A | {"guidance_scale": 99}, B: BODY_B | {"guidance": 99}}
PLAIN = {"Content-Type": "text/plain"}


async def expect(
    service: TestService,
    headers: dict[str, str],
    content: bytes | str,
    status: int,
    code: str,
    path: str = "/v1/generate",
) -> None:
    answer = await service.client.post(path, content=content, headers=headers)
    refused(answer, status, code)


@pytest.fixture(scope="session")
async def over_limit(service: TestService) -> Member:
    """An account over its plan on both interfaces."""
    member = await service.member(plan_a="single", plan_b="single")
    await service.client.post("/v1/generate", content="{", headers=member.a)
    await service.client.get("/v1/models", headers=member.b)
    return member


@pytest.mark.parametrize("headers", [{}, BAD_KEY[A], BAD_KEY[B], BAD_KEY[A] | BAD_KEY[B]], ids=str)
async def test_routing_comes_before_credentials(service: TestService, headers: dict[str, str]) -> None:
    missing = await service.client.post("/v1/nothing", content=LARGE, headers=headers)
    assert missing.status_code == 404
    for method, path in (("DELETE", "/v1/generate"), ("POST", "/v1/models"), ("PUT", "/v1/upscale")):
        answer = await service.client.request(method, path, content=LARGE, headers=headers)
        assert answer.status_code == 405


async def test_ambiguity_comes_before_the_key(service: TestService) -> None:
    await expect(service, BAD_KEY[A] | BAD_KEY[B] | PLAIN, LARGE, 400, "ambiguous_credentials")


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("content", [LARGE, b"{", b"\xff"], ids=["large", "not JSON", "not UTF-8"])
async def test_the_key_and_the_limit_come_before_the_body(
    service: TestService, over_limit: Member, variant: Variant, content: bytes
) -> None:
    await expect(service, BAD_KEY[variant] | PLAIN, content, 401, "unauthorized")
    await expect(service, over_limit.headers(variant) | PLAIN, content, 429, "rate_limit_exceeded")


async def test_the_limit_comes_before_an_upscale_s_body(service: TestService, over_limit: Member) -> None:
    await expect(service, over_limit.a | PLAIN, LARGE, 429, "rate_limit_exceeded", "/v1/upscale")


async def test_a_bad_key_is_unauthorized_whatever_the_limits_are(service: TestService, over_limit: Member) -> None:
    await expect(service, {"X-API-Key": over_limit.key + "x"}, b"{}", 401, "unauthorized")


TWO_FAULTS = {
    "size before media type": (PLAIN, LARGE, 413, "payload_too_large"),
    "size before JSON": ({}, b"{" * 70_000, 413, "payload_too_large"),
    "media type before JSON": (PLAIN, b"{", 415, "unsupported_media_type"),
    "media type before UTF-8": (PLAIN, b"\xff", 415, "unsupported_media_type"),
    "media type before nothing": (PLAIN, b"", 415, "unsupported_media_type"),
    "JSON before fields": ({}, json.dumps({"prompt": 1, "positive_prompt": 1}) + "x", 400, "invalid_json"),
}


@pytest.mark.parametrize(("headers", "content", "status", "code"), TWO_FAULTS.values(), ids=TWO_FAULTS.keys())
@pytest.mark.parametrize("variant", Variant)
async def test_of_two_faults_in_a_body_the_first_is_answered(
    service: TestService,
    regular: Member,
    variant: Variant,
    headers: dict[str, str],
    content: bytes | str,
    status: int,
    code: str,
) -> None:
    await expect(service, regular.headers(variant) | headers, content, status, code)


@pytest.mark.parametrize("lora", [PRIVATE_ADAPTER, "model_nothing"])
@pytest.mark.parametrize("variant", Variant)
async def test_fields_come_before_permission(
    service: TestService, regular: Member, variant: Variant, lora: str
) -> None:
    content = json.dumps(OUT_OF_RANGE[variant] | {LORA_FIELD[variant]: lora})
    await expect(service, regular.headers(variant), content, 400, "invalid_parameter")


async def test_fields_come_before_the_image(service: TestService, regular: Member) -> None:
    content = json.dumps({"image_id": "img_" + "a" * 26, "scale_factor": 3})
    await expect(service, regular.a, content, 400, "invalid_parameter", "/v1/upscale")


@pytest.mark.parametrize("variant", Variant)
async def test_the_idempotency_key_is_checked_before_permission(
    service: TestService, regular: Member, variant: Variant
) -> None:
    content = json.dumps(BODIES[variant] | {LORA_FIELD[variant]: "model_nothing"})
    headers = regular.headers(variant) | {"Idempotency-Key": "a b"}
    await expect(service, headers, content, 400, "invalid_parameter")


async def test_the_credential_comes_before_the_record(service: TestService) -> None:
    for path in ("/v1/generate/nonsense", "/v1/generations/nonsense", "/v1/jobs/nonsense"):
        answer = await service.client.get(path)
        assert answer.status_code == 401
