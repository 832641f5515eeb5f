"""Keys that may do less than their account: read or generate alone, some LoRAs alone."""

from typing import Any

import httpx
import pytest

from serve_app.accounts.api_keys import MAX_ADAPTERS
from serve_app.domain.accounts import ALL_SCOPES, Scope
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from tests.api.app import ALL, BODIES, BODY_A, LORA, LORA_FIELD, UNKNOWN_JOB, Member, TestService, error_of, refused
from tests.support import PRIVATE_ADAPTER, adapter_id

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_JOB
POLL_PATHS = [(A, "/v1/generate/"), (A, "/v1/upscale/"), (B, "/v1/generations/"), (A, "/v1/jobs/"), (B, "/v1/jobs/")]
WAYS: dict[Scope, list[tuple[Variant, str, str]]] = {
    Scope.READ: [
        *((variant, "GET", path + UNKNOWN) for variant, path in POLL_PATHS),
        (A, "GET", "/v1/jobs"),
        (B, "GET", "/v1/usage"),
        (A, "GET", "/v1/loras"),
        (B, "GET", f"/v1/loras/{LORA}"),
        (B, "GET", "/v1/models"),
        (A, "GET", "/v1/images"),
        (A, "GET", "/v1/images/img_x"),
    ],
    Scope.GENERATE: [
        (A, "POST", "/v1/generate"),
        (B, "POST", "/v1/generate"),
        (A, "POST", "/v1/upscale"),
        (A, "POST", f"/v1/jobs/{UNKNOWN}/cancel"),
        (B, "POST", f"/v1/jobs/{UNKNOWN}/cancel"),
        (A, "DELETE", f"/v1/jobs/{UNKNOWN}"),
        (B, "DELETE", f"/v1/jobs/{UNKNOWN}/images/img_x"),
        (B, "POST", "/v1/images"),
        (A, "DELETE", "/v1/images/img_x"),
    ],
    Scope.LORAS: [
        (A, "POST", "/v1/loras"),
        (B, "PATCH", "/v1/loras/model_x"),
        (A, "DELETE", "/v1/loras/model_x"),
        (B, "POST", "/v1/loras/model_x/grants"),
        (A, "DELETE", "/v1/loras/model_x/grants/acme"),
    ],
}


async def key(service: TestService, member: Member, **options: Any) -> Member:
    """The same account with a key that may do less."""
    _, secret = await service.resources.api_keys.create(member.account.id, interfaces=ALL, **options)
    return Member(member.account, secret)


async def use(service: TestService, who: Member, way: tuple[Variant, str, str], body: object = None) -> httpx.Response:
    variant, method, path = way
    return await service.client.request(method, path, headers=who.headers(variant), json=body)


@pytest.mark.parametrize(("scope", "way"), [(scope, way) for scope, ways in WAYS.items() for way in ways], ids=str)
async def test_each_way_takes_its_scope_before_a_body_is_read(
    service: TestService, member: Member, scope: Scope, way: tuple[Variant, str, str]
) -> None:
    own, others = [await key(service, member, scopes=scopes) for scopes in (frozenset({scope}), ALL_SCOPES - {scope})]
    assert (await use(service, own, way, BODIES[way[0]])).status_code in (200, 202, 400, 404, 415)
    for body in (BODIES[way[0]], [], None):
        _refused(await use(service, others, way, body), scope)


async def test_a_key_for_some_loras_sees_and_changes_these_alone_and_adds_none(
    service: TestService, member: Member
) -> None:
    kept = await key(service, member, adapters=frozenset({LORA}))
    listed = (await service.client.get("/v1/loras", headers=kept.a)).json()["loras"]
    assert [lora["id"] for lora in listed] == [LORA]
    assert (await service.client.get(f"/v1/loras/{adapter_id('neon')}", headers=kept.a)).status_code == 404
    assert (await service.client.post("/v1/loras", headers=kept.a)).status_code == 403


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "{job}/cancel"), ("DELETE", "{job}"), ("DELETE", "{job}/images/{image}")]
)
async def test_a_key_for_some_loras_changes_jobs_of_these_and_its_own_alone(
    service: TestService, member: Member, method: str, path: str
) -> None:
    kept = await key(service, member, adapters=frozenset({LORA}))
    of_another = await service.complete(await service.submit(member, lora_id=adapter_id("neon")))
    mine = await service.complete(await service.submit(member))
    enlarged = [
        await service.client.post("/v1/upscale", json={"image_id": of_another.images[0].image_id}, headers=who.a)
        for who in (member, kept)
    ]
    others, own = [await service.complete(answer.json()["request_id"]) for answer in enlarged]
    statuses: list[int] = []
    for job in (of_another, others, mine, own):
        way = (A, method, "/v1/jobs/" + path.format(job=job.id, image=job.images[0].image_id))
        statuses.append((await use(service, kept, way)).status_code)
    assert statuses[:2] == [403, 403]
    assert set(statuses[2:]) <= {200, 204}
    assert (
        await use(service, kept, (A, method, "/v1/jobs/" + path.format(job=UNKNOWN, image="img_x")))
    ).is_client_error
    for job in (of_another, others):
        assert (await use(service, kept, (A, "GET", f"/v1/jobs/{job.id}"))).status_code == 200


@pytest.mark.parametrize(("variant", "path"), POLL_PATHS)
async def test_a_job_that_exists_and_one_that_does_not_are_refused_alike(
    service: TestService, member: Member, variant: Variant, path: str
) -> None:
    generator = await key(service, member, scopes=frozenset({Scope.GENERATE}))
    job_id = await service.submit(generator, variant)
    answers = [await use(service, generator, (variant, "GET", path + each)) for each in (job_id, UNKNOWN, "nonsense")]
    assert len({answer.content for answer in answers}) == 1
    _refused(answers[0], "read")
    assert (await use(service, member, (variant, "GET", path + job_id))).status_code == 200


@pytest.mark.parametrize("variant", Variant)
async def test_a_key_for_one_lora_generates_with_no_other(
    service: TestService, member: Member, variant: Variant
) -> None:
    """A LoRA that the key may not use is refused alike, whether it exists or not."""
    limited = await key(service, member, adapters=frozenset({LORA}))
    way = (variant, "POST", "/v1/generate")
    assert (await use(service, limited, way, BODIES[variant])).status_code in (200, 202)
    others = [adapter_id("neon"), PRIVATE_ADAPTER, "nothing", "Outline"]
    answers = [await use(service, limited, way, BODIES[variant] | {LORA_FIELD[variant]: other}) for other in others]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1
    assert LORA in error_of(answers[0])["message"]
    assert (await use(service, limited, (variant, "POST", "/v1/jobs"), {"prompt": "x"})).status_code == 202, "with none"


async def test_a_key_for_a_lora_that_its_account_may_not_use_is_refused_all_the_same(
    service: TestService, member: Member
) -> None:
    limited = await key(service, member, adapters=frozenset({PRIVATE_ADAPTER}))
    answer = await use(service, limited, (A, "POST", "/v1/generate"), BODY_A | {"lora_id": PRIVATE_ADAPTER})
    assert answer.status_code == 403
    assert (await use(service, limited, (B, "GET", "/v1/models"))).json() == {"models": []}


async def test_a_record_without_scopes_may_do_everything_and_one_with_unknown_scopes_nothing(
    service: TestService, member: Member
) -> None:
    made, secret = await service.resources.api_keys.create(member.account.id, interfaces=ALL)
    who, client = Member(member.account, secret), connect(service.resources.redis_url)
    assert await client.hget(redis_key("key", made.id), "scopes") is None
    generate, read = (WAYS[scope][0] for scope in (Scope.GENERATE, Scope.READ))
    assert (await use(service, who, generate, BODY_A)).status_code == 202
    await client.hset(redis_key("key", made.id), "scopes", "delete")
    _refused(await use(service, who, generate, BODY_A), "generate")
    _refused(await use(service, who, read), "read")
    await client.aclose()


async def test_a_key_that_could_do_nothing_is_not_made(service: TestService, member: Member) -> None:
    many = frozenset(f"model_{number}" for number in range(MAX_ADAPTERS + 1))
    for options in ({"scopes": frozenset[Scope]()}, {"adapters": frozenset[str]()}, {"adapters": many}):
        with pytest.raises(InvalidParameter):
            await key(service, member, **options)


def _refused(answer: httpx.Response, scope: str) -> None:
    refused(answer, 403, "forbidden", f"'{scope}'")
    assert answer.headers["x-ratelimit-limit"]
