"""The credential header of each path, and the answer to every other combination."""

from datetime import timedelta

import httpx
import pytest

from serve_app.domain.requests import Variant
from serve_app.store.keys import redis_key
from tests.api.app import ALL, BODY_A, BODY_B, UNKNOWN_JOB, Member, TestService, error_of, refused
from tests.support import plain_redis

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_JOB
A_PATHS = [("GET", f"/v1/generate/{UNKNOWN}"), ("POST", "/v1/upscale"), ("GET", f"/v1/upscale/{UNKNOWN}")]
B_PATHS = [("GET", f"/v1/generations/{UNKNOWN}"), ("GET", "/v1/models")]
EITHER_PATHS = [
    ("GET", "/v1/jobs"),
    ("GET", "/v1/usage"),
    ("GET", f"/v1/jobs/{UNKNOWN}"),
    ("POST", f"/v1/jobs/{UNKNOWN}/cancel"),
    ("DELETE", f"/v1/jobs/{UNKNOWN}"),
    ("DELETE", f"/v1/jobs/{UNKNOWN}/images/img_x"),
]
SHARED = ("POST", "/v1/generate")
EVERY_PATH = [SHARED, *A_PATHS, *B_PATHS, *EITHER_PATHS]


async def call(service: TestService, way: tuple[str, str], headers: object, body: object = None) -> httpx.Response:
    return await service.client.request(*way, headers=headers, json=body)  # pyright: ignore[reportArgumentType]


def unauthorized(answer: httpx.Response) -> None:
    refused(answer, 401, "unauthorized")
    assert answer.headers["www-authenticate"]


@pytest.mark.parametrize("way", EVERY_PATH, ids=" ".join)
async def test_without_a_credential_every_path_is_closed(service: TestService, way: tuple[str, str]) -> None:
    unauthorized(await call(service, way, {}, BODY_A))


OTHERS = {
    A: [{"X-API-Key": text} for text in ("nonsense", "{key}", "")],
    B: [{"Authorization": text} for text in ("Bearer nonsense", "Bearer {key}", "Basic eDp5", "")],
}


@pytest.mark.parametrize(("variant", "way"), [*((A, way) for way in A_PATHS), *((B, way) for way in B_PATHS)], ids=str)
async def test_a_path_of_one_interface_asks_for_its_own_header_and_ignores_the_other(
    service: TestService, regular: Member, variant: Variant, way: tuple[str, str]
) -> None:
    answer = await call(service, way, regular.headers(B if variant is A else A))
    unauthorized(answer)
    assert answer.headers["www-authenticate"].startswith("Bearer " if variant is A else "ApiKey ")
    for other in OTHERS[variant]:
        beside = {name: text.format(key=regular.key) for name, text in other.items()}
        answer = await call(service, way, regular.headers(variant) | beside, {"image_id": "img_x"})
        assert answer.status_code == (200 if way[1] == "/v1/models" else 404), answer.text


@pytest.mark.parametrize("name", ["Authorization", "authorization", "AuthorizatioN"])
async def test_neither_case_nor_spaces_around_the_key_matter(service: TestService, regular: Member, name: str) -> None:
    for text in ("bearer {}", "BEARER {}", "bEaReR {}", "Bearer {} ", "Bearer  {} ", "Bearer    {} "):
        assert (await call(service, SHARED, {name: text.format(regular.key)}, BODY_A)).status_code == 202, text


@pytest.mark.parametrize(
    "authorization", ["Basic eDp5", "Digest username=x", "Token abc", "Bearerx abc", "Negotiate", ""]
)
async def test_another_scheme_beside_an_api_key_is_b(service: TestService, regular: Member, authorization: str) -> None:
    answer = await call(service, SHARED, regular.b | {"Authorization": authorization}, BODY_B)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("way", [SHARED, *EITHER_PATHS], ids=" ".join)
async def test_both_credentials_are_ambiguous(service: TestService, regular: Member, way: tuple[str, str]) -> None:
    key = regular.key
    for bearer, api_key in ((key, key), ("nonsense", key), (key, "nonsense"), ("", key), (key, "")):
        answer = await call(service, way, {"Authorization": f"Bearer {bearer}", "X-API-Key": api_key}, BODY_A)
        refused(answer, 400, "ambiguous_credentials")


BROKEN_BEARERS = [
    "",
    "Bearer",
    "Bearer ",
    "Bearer\tkey",
    "Basic eDp5",
    "{key}",
    "Bearer: {key}",
    "Bearer {key}, Bearer {key}",
    "Bearer {key} {key}",
    "Bearer <{key}>",
    "Bearer {key}x",
    "Bearer " + "x" * 8192,
    "Bearer " + "0" * 42,
    "Bearer atl_" + "0" * 38,
]


BROKEN_KEYS = ["", " ", "nonsense", "Bearer {key}", "{key}x", "{key},{key}", "{key} {key}", "x" * 8192]
BROKEN_KEYS.append("atl_" + "0" * 38)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((way, "Authorization") for way in (SHARED, *A_PATHS, EITHER_PATHS[0])),
        *((way, "X-API-Key") for way in (SHARED, *B_PATHS, EITHER_PATHS[0])),
    ],
)
async def test_a_broken_bearer_header_or_api_key_is_unauthorized(
    service: TestService, regular: Member, way: tuple[str, str], name: str
) -> None:
    is_bearer = name == "Authorization"
    for text in BROKEN_BEARERS if is_bearer else BROKEN_KEYS:
        answer = await call(service, way, {name: text.format(key=regular.key)}, BODY_A if is_bearer else BODY_B)
        assert answer.status_code == 401, text
        unauthorized(answer)


@pytest.mark.parametrize("way", EVERY_PATH, ids=" ".join)
async def test_key_bytes_beyond_ascii_are_unauthorized_not_a_crash(service: TestService, way: tuple[str, str]) -> None:
    for sent in (b"\xff\xfe", "schlüssel".encode(), "ключ".encode(), b"\x80" * 42, b"atl_" + b"\xe9" * 38):
        unauthorized(await call(service, way, [(b"authorization", b"Bearer " + sent)]))
        unauthorized(await call(service, way, [(b"x-api-key", sent)]))


@pytest.mark.parametrize("way", [SHARED, *A_PATHS, *B_PATHS, EITHER_PATHS[0]], ids=" ".join)
async def test_a_header_sent_twice_is_unauthorized(service: TestService, regular: Member, way: tuple[str, str]) -> None:
    bearer, basic, api_key = f"Bearer {regular.key}", ("Authorization", "Basic eDp5"), ("X-API-Key", regular.key)
    if way not in B_PATHS:
        unauthorized(await call(service, way, [("Authorization", bearer)] * 2, BODY_A))
        unauthorized(await call(service, way, [("Authorization", bearer), basic], BODY_A))
        unauthorized(await call(service, way, [basic, basic, api_key], BODY_B))
    if way not in A_PATHS:
        unauthorized(await call(service, way, [api_key] * 2, BODY_B))


@pytest.mark.parametrize("way", [SHARED, A_PATHS[0], EITHER_PATHS[0]], ids=" ".join)
async def test_every_kind_of_bad_key_gets_the_same_answer(
    service: TestService, member: Member, way: tuple[str, str]
) -> None:
    """A key for the other interface is one of them, once it is revoked or its account disabled."""
    api_keys = service.resources.api_keys
    (revoked, secret), (rolled, old), (expired, late) = [
        await api_keys.create(member.account.id, interfaces=ALL) for _ in range(3)
    ]
    await api_keys.revoke(revoked.id)
    await api_keys.roll(rolled.id, grace=timedelta())
    with plain_redis(service.resources.redis_url) as server:
        server.hset(redis_key("key", expired.id), "expires", 1)
    revoked_b, only_b = await api_keys.create(member.account.id, interfaces=frozenset({B}))
    await api_keys.revoke(revoked_b.id)
    disabled, disabled_b = await service.member(), await service.member(interfaces=frozenset({B}))
    for each in (disabled, disabled_b):
        await service.resources.accounts.set_disabled(each.account.id, True)
    answers = [
        await call(service, way, {"Authorization": f"Bearer {key}"}, BODY_A)
        for key in (secret, old, late, only_b, disabled.key, disabled_b.key, "atl_" + "0" * 38, "nonsense")
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.content for answer in answers}) == 1
    assert (await call(service, ("GET", "/v1/jobs"), member.a)).status_code == 200, "the account's other key goes on"
    varying = {"x-request-id", "x-ratelimit-reset", "ratelimit", "content-length"}
    assert len({str(sorted((k, v) for k, v in answer.headers.items() if k not in varying)) for answer in answers}) == 1


@pytest.mark.parametrize(("interface", "way", "named"), [
    *((B, way, "X-API-Key") for way in [SHARED, *A_PATHS, *EITHER_PATHS]),
    *((A, way, "Authorization: Bearer") for way in [SHARED, *B_PATHS, *EITHER_PATHS]),
])  # fmt: skip
async def test_a_key_of_the_other_interface_is_unauthorized_and_its_holder_learns_why(
    service: TestService, member: Member, interface: Variant, way: tuple[str, str], named: str
) -> None:
    """Nothing but the message differs from the answer to an unknown key."""
    key = await service.key(member.account, frozenset({interface}))

    async def use(text: str) -> httpx.Response:
        header = {"X-API-Key": text} if interface is A else {"Authorization": f"Bearer {text}"}
        return await call(service, way, header, BODY_A)

    answer, unknown = await use(key), await use("atl_" + "0" * 38)
    unauthorized(answer)
    own = Member(member.account, key).headers(interface)
    assert (await call(service, ("GET", "/v1/jobs"), own)).status_code == 200
    assert named in error_of(answer)["message"]
    assert "not valid" in error_of(unknown)["message"]
    for name in ("www-authenticate", "x-ratelimit-limit", "x-ratelimit-remaining"):
        assert answer.headers[name] == unknown.headers[name]
