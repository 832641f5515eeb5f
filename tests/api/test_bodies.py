"""Request bodies before their fields are read: size, media type, strict JSON."""

import json
from collections.abc import AsyncIterator

import pytest

from serve_app.api.body import MAX_BODY_BYTES
from serve_app.domain.requests import Variant
from tests.api.app import BODIES, BODY_A, Member, TestService, error_of, refused

A, B = Variant.A, Variant.B
OPERATIONS = [(A, "/v1/generate"), (A, "/v1/upscale"), (B, "/v1/generate")]


def around(text: str) -> bytes:
    """A body whose prompt is the JSON token `text`."""
    return json.dumps(BODY_A | {"prompt": "@"}).replace('"@"', text).encode()


INVALID_JSON = {
    "empty": b"",
    "white space": b" \n\t ",
    "not JSON": b"prompt=a",
    "cut short": b'{"prompt": "a"',
    "unclosed text": b'{"prompt": "a',
    "trailing comma": b'{"prompt": "a",}',
    "trailing data": b'{"prompt": "a"} {}',
    "trailing word": b'{"prompt": "a"}x',
    "two lines of JSON": b'{"prompt": "a"}\n{"prompt": "b"}',
    "line comment": b'// hello\n{"prompt": "a"}',
    "block comment": b'{"prompt": /* hello */ "a"}',
    "single quotes": b"{'prompt': 'a'}",
    "bare key": b'{prompt: "a"}',
    "a raw line break in text": around('"a\nb"'),
    "a raw NUL in text": around('"a\0b"'),
    "an escaped NUL in text": around('"a\\u0000b"'),
    "an escaped NUL in a key": b'{"pro\\u0000mpt": "a"}',
    "a high surrogate alone": around('"\\ud800"'),
    "a low surrogate alone": around('"\\udc00"'),
    "surrogates in the wrong order": around('"\\udc00\\ud800"'),
    "a lone surrogate in a key": b'{"\\ud83d": 1}',
    "a lone surrogate deep inside": around('[[[{"x": ["\\ud800"]}]]]'),
    "nan in lower case": around("nan"),
    "1e400": around("1e400"),
    "-1e400": around("-1e400"),
    "1e999999999": around("1e999999999"),
    "an integer of 4301 digits": around("1" * 4301),
    "a negative integer of 4301 digits": around("-" + "1" * 4301),
    "an integer of 60000 digits": around("9" * 60000),
    "a fraction of 5000 digits": around("0." + "1" * 5000),
    "a leading zero": around("01"),
    "a plus sign": around("+1"),
    "hexadecimal": around("0x10"),
    "a point without digits": around("1."),
    "the same key twice": b'{"prompt": "a", "prompt": "a"}',
    "the same key twice, once escaped": b'{"prompt": "a", "\\u0070rompt": "b"}',
    "the same key twice, deep inside": around('[{"x": 1, "x": 2}]'),
    **{f"{depth} arrays in a field": around("[" * depth + "]" * depth) for depth in (100, *range(900, 1000, 7))},
    "60000 opening brackets": b"[" * 60000,
    "30000 nested arrays": b"[" * 30000 + b"]" * 30000,
    "10000 nested objects": b'{"a":' * 10000 + b"1" + b"}" * 10000,
    "UTF-16": json.dumps(BODY_A).encode("utf-16"),
    "UTF-16 without a mark": json.dumps(BODY_A).encode("utf-16-le"),
    "UTF-32": json.dumps(BODY_A).encode("utf-32"),
    "Latin-1": around('"é"').decode().encode("latin-1"),
    "a byte that is not UTF-8": around('"@"').replace(b"@", b"\xff"),
    "an overlong encoding": around('"@"').replace(b"@", b"\xc0\x80"),
    "a surrogate in UTF-8 bytes": around('"@"').replace(b"@", b"\xed\xa0\x80"),
    "two byte order marks": b"\xef\xbb\xbf\xef\xbb\xbf" + json.dumps(BODY_A).encode(),
}


@pytest.mark.parametrize(("variant", "path"), OPERATIONS)
async def test_what_is_not_json_to_the_letter_is_refused(
    service: TestService, regular: Member, variant: Variant, path: str
) -> None:
    headers = regular.headers(variant)
    answers = {
        name: await service.client.post(path, content=body, headers=headers) for name, body in INVALID_JSON.items()
    }
    assert {name: answer.text for name, answer in answers.items() if answer.status_code != 400} == {}
    assert {name for name, answer in answers.items() if error_of(answer)["code"] != "invalid_json"} == set()


NOT_NUMBERS = {
    (Variant.A, "guidance_scale"): "must be between 1 and 20",
    (Variant.A, "lora_weight"): "must be between 0.1 and 1",
    (Variant.A, "steps"): "must be an integer between 20 and 50",
    (Variant.A, "width"): "must be 512 or 768",
    (Variant.A, "seed"): "must be an integer",
    (Variant.A, "prompt"): "must be a string",
    (Variant.B, "guidance"): "must be between 1 and 20",
    (Variant.B, "width"): "must be an integer, a multiple of 8 between 256 and 1024",
}


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(("field", "range_text"), NOT_NUMBERS.items(), ids=str)
async def test_what_is_no_number_is_refused_with_the_field_and_its_range(
    service: TestService, regular: Member, field: tuple[Variant, str], range_text: str, token: str
) -> None:
    variant, name = field
    content = json.dumps({**BODIES[variant], name: "@"}).replace('"@"', token)
    answer = await service.client.post("/v1/generate", content=content, headers=regular.headers(variant))
    refused(answer, 400, "invalid_parameter", range_text.removeprefix("must be an integer "))
    assert error_of(answer)["message"].startswith(f"{name}: ")


@pytest.mark.parametrize("body", [b"[]", b"null", b"true", b"1", b'"text"', b'[{"prompt": "a"}]'])
@pytest.mark.parametrize(("variant", "path"), OPERATIONS)
async def test_json_that_is_not_an_object_is_refused(
    service: TestService, regular: Member, variant: Variant, path: str, body: bytes
) -> None:
    answer = await service.client.post(path, content=body, headers=regular.headers(variant))
    assert answer.status_code == 400
    assert error_of(answer) == {"code": "invalid_parameter", "message": "body: must be a JSON object"}


VALID_JSON = {
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(BODY_A).encode(),
    "white space around": b" \r\n\t" + json.dumps(BODY_A).encode() + b"\n\n",
    "a pair of surrogates": around('"\\ud83d\\ude00"'),
    "an escaped solidus": around('"a\\/b"'),
    "text beyond the basic plane": around('"\U0001f600"'),
    "escaped line breaks": around('"a\\r\\n\\tb"'),
    "a noncharacter": around('"\\uffff"'),
    "DEL": around('"\\u007f"'),
}


@pytest.mark.parametrize("body", VALID_JSON.values(), ids=VALID_JSON.keys())
async def test_unusual_json_is_still_json(service: TestService, regular: Member, body: bytes) -> None:
    answer = await service.client.post("/v1/generate", content=body, headers=regular.a)
    assert answer.status_code == 202, answer.text


MEDIA_TYPES = [
    None,
    "",
    "application/json",
    "application/json; charset=utf-8",
    'application/json; profile="https://example.com/x"; q=1',
    "application/json ; x=y",
    "application/problem+json",
    "application/ld+JSON",
]


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
@pytest.mark.parametrize("variant", Variant)
async def test_json_is_read_under_any_of_its_names_or_none(
    service: TestService, regular: Member, variant: Variant, media_type: str | None
) -> None:
    headers = regular.headers(variant) | ({} if media_type is None else {"Content-Type": media_type})
    answer = await service.client.post("/v1/generate", content=json.dumps(BODIES[variant]), headers=headers)
    assert answer.status_code in (200, 202), answer.text


@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonl",
        "application/json+xml",
        "json",
        "application/",
        "*/*",
        "+json",
    ],
)
@pytest.mark.parametrize(("variant", "path"), OPERATIONS)
async def test_another_media_type_is_refused(
    service: TestService, regular: Member, variant: Variant, path: str, media_type: str
) -> None:
    headers = regular.headers(variant) | {"Content-Type": media_type}
    answer = await service.client.post(path, content=json.dumps(BODIES[variant]), headers=headers)
    refused(answer, 415, "unsupported_media_type")


def padded(variant: Variant, size: int) -> bytes:
    body = json.dumps(BODIES[variant]).encode()
    return body + b" " * (size - len(body))


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_64_kib_is_read(service: TestService, regular: Member, variant: Variant, chunked: bool) -> None:
    body = padded(variant, MAX_BODY_BYTES)
    content = in_chunks(body) if chunked else body
    answer = await service.client.post("/v1/generate", content=content, headers=regular.headers(variant))
    assert answer.status_code in (200, 202), answer.text


@pytest.mark.parametrize(("variant", "path"), OPERATIONS)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_one_byte_over_64_kib_is_refused(
    service: TestService, regular: Member, variant: Variant, path: str, chunked: bool
) -> None:
    body = padded(variant, MAX_BODY_BYTES + 1)
    content = in_chunks(body) if chunked else body
    answer = await service.client.post(path, content=content, headers=regular.headers(variant))
    refused(answer, 413, "payload_too_large")


async def test_no_more_than_64_kib_of_an_endless_body_are_read(service: TestService, regular: Member) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1024
            yield b" " * 1024

    answer = await _raw_post(service, regular.a, endless())
    assert answer == 413
    assert read <= MAX_BODY_BYTES + 2048


@pytest.mark.parametrize("length", ["nonsense", "-1", "1" * 30, "١٢"])
async def test_an_odd_content_length_is_no_crash(service: TestService, regular: Member, length: str) -> None:
    answer = await service.client.post(
        "/v1/generate",
        content=json.dumps(BODY_A),
        headers=[*regular.a.items(), ("content-length", length.encode())],  # pyright: ignore[reportArgumentType]
    )
    assert answer.status_code < 500


UNREAD = {
    "nobody": ({}, 401),
    "an unknown bearer key": ({"Authorization": "Bearer atl_nonsense"}, 401),
    "an unknown API key": ({"X-API-Key": "nonsense"}, 401),
    "a caller over the limit": ({"X-API-Key": "{over_limit}"}, 429),
    "another type": ({"Authorization": "{known}", "Content-Type": "text/plain"}, 415),
    "an encoding": ({"Authorization": "{known}", "Content-Encoding": "gzip"}, 415),
    "too large a length": ({"Authorization": "{known}", "Content-Length": str(MAX_BODY_BYTES + 1)}, 413),
}


@pytest.mark.parametrize(("headers", "status"), UNREAD.values(), ids=UNREAD.keys())
async def test_no_byte_is_read_of_what_its_headers_refuse(
    service: TestService, regular: Member, headers: dict[str, str], status: int
) -> None:
    over_limit = await service.member(plan_b="single")
    await service.client.get("/v1/models", headers=over_limit.b)
    read = 0

    async def watched() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield b"{}"

    known = regular.a["Authorization"]
    filled = {name: text.format(known=known, over_limit=over_limit.key) for name, text in headers.items()}
    assert await _raw_post(service, filled, watched()) == status
    assert read == 0


async def _raw_post(service: TestService, headers: dict[str, str], body: AsyncIterator[bytes]) -> int:
    """Post to the application itself: httpx would read the whole body before it sends any."""
    status = 0
    rows = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": await anext(body), "more_body": True}

    async def send(message: dict[str, object]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = int(str(message["status"]))

    await service.call({"path": "/v1/generate", "headers": rows}, receive, send)
    return status
