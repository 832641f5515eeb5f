"""Seeded nonsense at every door: whatever comes in, what goes out is an answer of the contract and never a 5xx."""

import json
import random
from typing import Any

import httpx
import pytest

from serve_app.domain.requests import Variant
from tests.api.house import BODY_A, BODY_B, House, Member, error_of

A, B = Variant.A, Variant.B
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/generate": [
        BODY_A | {"lora_weight": 0.5, "width": 768, "num_images": 2, "guidance_scale": 7.5, "steps": 25, "seed": 7},
        BODY_B
        | {"negative_prompt": "fog", "lora_weight": 1.5, "guidance": 7.5, "width": 640, "height": 256, "seed": -1},
    ],
    "/v1/upscale": [{"image_id": "img_" + "a" * 26, "scale_factor": 4}],
}
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**53 + 1, -(2**63), 10**400, 0.1, -0.0, 1e308, 5e-324, "", " ", "0", "null", "\0", "\ud800",
    "\U0001f600", "\u202e", "x" * 5000, [], [[]], [None], {}, {"": {}}, {"prompt": "x"}, [1] * 200, "../../etc/passwd", "'; --",
]  # fmt: skip
ODD_TOKENS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e-400", b"01", b"+1", b".5", b"0x1", b"1e", b"--1", b"'x'", b"undefined", b"//", b"/**/",
    b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b'"\\ud800"', b'"\\u0000"', b'"\\x"', b'"', b"{", b"}", b"[" * 900, b"9" * 4400,
    b'{"a":1,"a":2}', b",", b":", b"\\", b"\x7f", b"\xe2\x80\xa8",
]  # fmt: skip
ODD_HEADERS = [
    ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", ";"), ("Content-Encoding", "gzip"),
    ("Idempotency-Key", "x" * 300), ("Idempotency-Key", "k"), ("X-Request-Id", "\t"), ("Accept", "nothing/*"), ("Expect", "x"), ("Range", "bytes=0-1"),
    ("If-None-Match", "*"), ("Transfer-Encoding", "identity"), ("X-Forwarded-Host", "evil"), ("Host", "a b"), ("Host", ""), ("Cookie", "x=" + "y" * 4000),
]  # fmt: skip


def nonsense(dice: random.Random, body: dict[str, Any]) -> bytes:
    """A valid body with one to four things wrong with it, or right."""
    fields = dict(body)
    for _ in range(dice.randrange(3)):
        name = dice.choice([*fields, "extra", "", "\ud83d", "Prompt", "__class__"])
        fields[name] = dice.choice(ODD_VALUES)
    if dice.random() < 0.2 and fields:
        del fields[dice.choice(list(fields))]
    raw = bytearray(json.dumps(fields, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass"))
    for _ in range(dice.choice((0, 0, 1, 2))):
        place = dice.randrange(len(raw) + 1)
        match dice.randrange(4):
            case 0:
                raw[place:place] = dice.choice(ODD_TOKENS)
            case 1:
                del raw[place : place + dice.randrange(9)]
            case 2:
                raw[place : place + 1] = bytes([dice.randrange(256)])
            case _:
                raw[place:place] = raw[: dice.randrange(40)]
    return bytes(raw)


async def check(house: House, member: Member, dice: random.Random) -> None:
    path = dice.choice(list(BODIES))
    content = nonsense(dice, dice.choice(BODIES[path]))
    headers = [*member.headers(dice.choice((A, B)) if path == "/v1/generate" else A).items()]
    headers += dice.sample(ODD_HEADERS, dice.choice((0, 0, 0, 1, 2)))
    answer = await house.client.post(path, content=content, headers=headers)
    described = (path, headers, content[:300], answer.status_code, answer.text[:300])
    assert answer.status_code in (200, 202, 400, 403, 404, 409, 413, 415), described
    assert "x-ratelimit-limit" in answer.headers, described
    if answer.status_code >= 400:
        assert error_of(answer), described
        assert len(answer.content) < 4000, described


@pytest.mark.parametrize("seed", range(20))
async def test_two_thousand_bodies_of_nonsense_get_no_5xx(house: House, seed: int) -> None:
    member, dice = await house.member(), random.Random(seed)
    for _ in range(100):
        await check(house, member, dice)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_bodies_of_nonsense_get_no_5xx(house: House) -> None:
    member, dice = await house.member(), random.Random(1)
    for _ in range(100_000):
        await check(house, member, dice)


METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW")
PARTS = ("v1", "generate", "generations", "upscale", "models", "jobs", "files", "docs", "openapi", "console", "cancel", "a.json", "gen_" + "a" * 26, "..", "%2e%2e", "%00", "%ff", "", "*", "x" * 300, "a;b", "%F0%9F%98%80")  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
async def test_a_thousand_odd_paths_get_no_5xx(house: House, seed: int) -> None:
    member, dice = await house.member(), random.Random(1000 + seed)
    for _ in range(100):
        path = "/" + "/".join(dice.choice(PARTS) for _ in range(dice.randrange(1, 5)))
        query = dice.choice(("", "?x=1", "?limit=%ff", "?exp=1&kid=local&sig=%00", "?cursor=" + "9" * 30, "?&&=&"))
        headers = dice.choice(({}, member.a, member.b, member.a | member.b))
        url = httpx.URL(f"http://house.test{path}{query}")
        answer = await house.client.request(dice.choice(METHODS), url, headers=headers)
        assert answer.status_code < 500, (path, query, answer.text[:300])
        assert "x-request-id" in answer.headers
