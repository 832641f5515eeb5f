"""Another account's and another interface's jobs, images and adapters are not found."""

from urllib.parse import unquote

import httpx
import pytest

from serve_app.api.dependencies import valid_job_id
from serve_app.domain.requests import Variant
from tests.api.app import (
    ACCEPTED,
    LORA_FIELD,
    UNKNOWN_JOB,
    UNKNOWN_NAME,
    Member,
    TestService,
    error_of,
    refused,
)
from tests.support import PRIVATE_ADAPTER, adapter_id

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_NAME
PATHS = [(A, "/v1/generate/"), (A, "/v1/upscale/"), (B, "/v1/generations/"), (A, "/v1/jobs/"), (B, "/v1/jobs/")]
MALFORMED = [
    "x",
    "gen_",
    "gen_" + "a" * 25,
    "gen_" + "a" * 27,
    "gen_" + "A" * 26,
    "gen_" + "1" * 26,
    "GEN_" + UNKNOWN,
    "img_" + UNKNOWN,
    "gen-" + UNKNOWN,
    "up_gen_" + UNKNOWN,
    "%00",
    "gen_" + UNKNOWN + "%00",
    "gen_" + UNKNOWN + "%0a",
    "%ff%fe",
    "..%2f..%2fetc%2fpasswd",
    "*",
    "%7Bjob:0%7D:job:x",
    "-1",
    "gen_%C3%A9" + "a" * 25,
    "x" * 60_000,
    "%20gen_" + UNKNOWN,
]


@pytest.fixture
async def other(service: TestService) -> Member:
    return await service.member()


def same_not_found(*answers: httpx.Response) -> None:
    assert [answer.status_code for answer in answers] == [404] * len(answers)
    assert {error_of(answer)["code"] for answer in answers} == {"not_found"}
    assert len({answer.content for answer in answers}) == 1


OTHERS_PATHS = {A: "/v1/generations/", B: "/v1/generate/"}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(("variant", "path"), PATHS)
async def test_a_job_of_another_account_or_of_the_other_interface_is_not_found(
    service: TestService, member: Member, other: Member, variant: Variant, path: str, finished: bool
) -> None:
    job_id = await service.submit(member, variant)
    if finished:
        await service.complete(job_id)
    elsewhere = OTHERS_PATHS[variant]
    for place, headers in ((path, other.headers(variant)), (elsewhere, member.headers(B if variant is A else A))):
        same_not_found(
            await service.client.get(place + job_id, headers=headers),
            await service.client.get(place + UNKNOWN_JOB, headers=headers),
        )
    assert (await service.client.get(path + job_id, headers=member.headers(variant))).status_code == 200


async def test_an_upscale_is_no_run_of_b(service: TestService, member: Member) -> None:
    image_id = await service.completed_image(member)
    answer = await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=member.a)
    assert (await service.poll(member, B, answer.json()["request_id"])).status_code == 404


@pytest.mark.parametrize(("variant", "path"), PATHS)
async def test_a_malformed_id_is_not_found(service: TestService, regular: Member, variant: Variant, path: str) -> None:
    for job_id in MALFORMED:
        answer = await service.client.get(path + job_id, headers=regular.headers(variant))
        assert answer.status_code == 404, job_id[:80]
        refused(answer, 404, "not_found")


def test_what_cannot_be_an_id_is_no_part_of_a_key() -> None:
    assert [text for text in MALFORMED if valid_job_id(unquote(text), "gen", "up") != ""] == []
    assert valid_job_id("up_" + UNKNOWN, "gen") == ""
    assert valid_job_id("up_" + UNKNOWN, "gen", "up") == "up_" + UNKNOWN


@pytest.mark.parametrize("variant", Variant)
async def test_another_account_s_adapter_and_an_unknown_one_get_the_same_403(
    service: TestService, member: Member, variant: Variant
) -> None:
    answers = [
        await service.generate(member, variant, **{LORA_FIELD[variant]: lora})
        for lora in (PRIVATE_ADAPTER, "model_" + UNKNOWN, "nothing", "x" * 128, "../../x", "\u00e9")
    ]
    assert {answer.status_code for answer in answers} == {403}
    assert {error_of(answer)["code"] for answer in answers} == {"forbidden"}
    assert len({answer.content for answer in answers}) == 1


@pytest.mark.parametrize("variant", Variant)
async def test_a_name_in_place_of_an_id_is_answered_with_the_id(
    service: TestService, member: Member, variant: Variant
) -> None:
    """The id is told only of an adapter that the account may use; any other name is answered as an unknown one."""

    async def message(lora: str) -> str:
        answer = await service.generate(member, variant, **{LORA_FIELD[variant]: lora})
        assert answer.status_code == 403
        return error_of(answer)["message"]

    for name in ("Outline", "outline", "OUTLINE"):
        assert f"{LORA_FIELD[variant]}: must be an id" in await message(name)
        assert adapter_id("outline") in await message(name)
    assert await message("Private") == await message("nothing") == await message("model_" + UNKNOWN)
    await service.resources.adapter_grants.grant(PRIVATE_ADAPTER, member.account.id)
    assert PRIVATE_ADAPTER in await message("private")
    await service.resources.adapter_grants.revoke(adapter_id("outline"), member.account.id)
    assert await message("Outline") == await message("nothing")


@pytest.mark.parametrize("variant", Variant)
async def test_a_grant_opens_an_adapter_and_its_revocation_closes_it(
    service: TestService, member: Member, other: Member, variant: Variant
) -> None:
    async def ask(who: Member) -> int:
        return (await service.generate(who, variant, **{LORA_FIELD[variant]: PRIVATE_ADAPTER})).status_code

    async def listed(who: Member) -> set[str]:
        answer = await service.client.get("/v1/models", headers=who.b)
        return {model["id"] for model in answer.json()["models"]}

    accepted, grants, everyone = ACCEPTED[variant], service.resources.adapter_grants, await listed(other)
    assert (await ask(member), PRIVATE_ADAPTER in everyone) == (403, False)
    await grants.grant(PRIVATE_ADAPTER, member.account.id)
    await grants.revoke(adapter_id("neon"), member.account.id)
    assert (await ask(member), await ask(other)) == (accepted, 403)
    assert await listed(member) == (everyone | {PRIVATE_ADAPTER}) - {adapter_id("neon")}
    await grants.revoke(PRIVATE_ADAPTER, member.account.id)
    assert await ask(member) == 403


async def test_the_account_named_in_the_catalog_may_use_its_adapter(service: TestService) -> None:
    owner = await service.member(name="owner")
    await service.submit(owner, A, lora_id=PRIVATE_ADAPTER)
    await service.submit(owner, B, model_id=PRIVATE_ADAPTER)


async def test_an_image_that_is_not_the_caller_s_or_is_gone_is_not_found(
    service: TestService, member: Member, other: Member
) -> None:
    mine = await service.completed_image(member)
    b_job = await service.complete(await service.submit(other, B))
    waiting = await service.submit(other)
    gone = await service.complete(await service.submit(other))
    await service.resources.images.delete(gone.images[0].image_uri)

    async def upscale(image_id: str) -> httpx.Response:
        return await service.client.post("/v1/upscale", json={"image_id": image_id}, headers=other.a)

    same_not_found(
        await upscale(mine),
        await upscale("img_" + UNKNOWN),
        await upscale("nonsense"),
        await upscale("x" * 128),
        await upscale(b_job.images[0].image_id),
        await upscale(waiting),
        await upscale(gone.images[0].image_id),
    )
