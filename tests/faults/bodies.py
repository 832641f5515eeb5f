"""Requests nobody should send: a seeded stream of them for both rooms, from nearly right to hostile."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.api.body import MAX_BODY_BYTES

Headers = list[tuple[bytes, bytes]]

FIELDS: dict[str, dict[str, Sequence[Any]]] = {
    "a": {
        "prompt": ["a lighthouse", "x" * 4000, "é" * 4000, " \u2003padded\n"],
        "lora_weight": [0.1, 0.75, 1, 1.0],
        "width": [512, 768],
        "height": [512, 768],
        "num_images": [1, 2, 3, 4],
        "guidance_scale": [1, 7.5, 20],
        "steps": [20, 35, 50],
        "seed": [0, -1, 2**63, 2**64, -(2**70), 10**400],
    },
    "b": {
        "positive_prompt": ["a lighthouse", "x" * 4000],
        "negative_prompt": ["", "blurry"],
        "lora_weight": [0, 0.5, 2],
        "guidance": [1, 20.0],
        "width": [256, 264, 1024],
        "height": [256, 1016],
        "seed": [0, 7, -(10**30)],
    },
}
"""Values that each room takes."""

JUNK: Sequence[Any] = (
    *(None, True, False, "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\U0010ffff", "ﷺ" * 5000, "x" * 4001),
    *(
        "../../etc/passwd",
        "'; DROP TABLE jobs; --",
        "${jndi:ldap://x/y}",
        "{{7*7}}",
        "<script>",
        "%00%0d%0aX: y",
        "\r\n",
    ),
    *(
        "EVAL 'return 1' 0",
        "{job:0}:job:x",
        "-OOM",
        "NaN",
        "null",
        "0x10",
        "1e3",
        "١٢٣",
        "🎨" * 200,
        "\u202e",
        "\ufeff",
    ),
    *(0, -0.0, -1, 1, 19, 21, 51, 255, 257, 513, 1025, 2**31, 2**53 + 1, 2**64, -(2**63) - 1, 10**308, 10**4299),
    *(0.1 + 0.2, 1e-320, 1e308, 0.09999999999999999, 1.0000000000000002, 2.0000001, 512.0, 512.5, 20.000001),
    *([], [[]], [1], ["a"], {}, {"a": 1}, {"$gt": ""}, {"__proto__": {}}, [None] * 50, [[[[[[]]]]]]),
)
RAW: Sequence[bytes] = (
    *(b"", b" ", b"null", b"true", b"17", b'"text"', b"[]", b"{", b"}", b'{"a"', b"{'a': 1}", b'{"a": 1,}', b"{} {}"),
    *(
        b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
        "{}".encode("utf-32"),
        b"\x00",
        b"\xff\xfe",
        b"\xc0\x80",
        b'"\xed\xa0\x80"',
    ),
    *(
        b'{"seed": NaN}',
        b'{"seed": Infinity}',
        b'{"seed": -Infinity}',
        b'{"seed": 01}',
        b'{"seed": 1e999}',
        b'{"a": 0x1}',
    ),
    *(
        b'{"prompt": "a", "prompt": "b"}',
        b'{"a\\u0000": 1}',
        b'{"\\ud800": 1}',
        b'{"prompt": "\\uZZZZ"}',
        b'{"a": "\t"}',
    ),
    *(b'{"seed": ' + b"9" * 5000 + b"}", b'{"seed": ' + b"9" * 60_000 + b"}", b'{"seed": -' + b"9" * 4300 + b"}"),
    *(b"[" * 30_000, b'{"a":' * 10_000, b"[" * 20_000 + b"]" * 20_000, b'{"a":1e' + b"9" * 1000 + b"}"),
    *(b"{" + b" " * MAX_BODY_BYTES + b"}", b'"' + b"a" * (MAX_BODY_BYTES + 1) + b'"', b"<xml/>", b"a=1&b=2"),
)
MEDIA_TYPES: Sequence[bytes] = (
    *(
        b"application/json",
        b"application/json; charset=utf-8",
        b"text/plain",
        b"",
        b"application/x-www-form-urlencoded",
    ),
    *(
        b"multipart/form-data; boundary=x",
        b"application/vnd.api+json",
        b"json",
        b"*/*",
        b"a" * 5000,
        b"\xff/\xff",
        b"/",
        b";",
    ),
)
ODD_VALUES: Sequence[bytes] = (
    *(
        b"",
        b" ",
        b"\x00",
        b"\xff",
        b"a" * 256,
        b"a" * 9000,
        b"-1",
        b"1e9",
        b"99999999999999999999",
        b"\r\nX: y",
        b"key-1",
    ),
    *(
        "é".encode(),
        b"*",
        b"null",
        b"Bearer",
        b"Bearer  ",
        b"Basic YTpi",
        b"atl_",
        b"atl_" + b"x" * 38,
        b"{job:0}:count",
    ),
)
ODD_HEADERS: Sequence[bytes] = (
    *(
        b"idempotency-key",
        b"x-request-id",
        b"content-length",
        b"content-encoding",
        b"authorization",
        b"x-api-key",
        b"host",
    ),
    *(
        b"cookie",
        b"origin",
        b"range",
        b"if-none-match",
        b"accept",
        b"x-forwarded-for",
        b"x-request-timeout-seconds",
        b"te",
    ),
)
IDS: Sequence[str] = (
    *("", "gen_" + "a" * 26, "up_" + "a" * 26, "img_" + "a" * 26, "gen_", "GEN_" + "A" * 26, "gen_" + "a" * 25, "../x"),
    *(
        "gen_" + "a" * 26 + "\0",
        "a" * 5000,
        "%2e%2e",
        "\ud7ff",
        "🎨",
        "*",
        "{job:0}:job:x",
        "gen_" + "１" * 26,
        "a b",
        "-1",
    ),
)
QUERIES: Sequence[bytes] = (
    *(
        b"",
        b"limit=0",
        b"limit=-1",
        b"limit=1e9",
        b"limit=" + b"9" * 5000,
        b"limit=a&limit=b",
        b"before=yesterday",
        b"%",
    ),
    *(
        b"before=2026-11-21T12:00:00Z",
        b"before=9999-99-99",
        b"before=0001-01-01T00:00:00%2B23:59",
        b"state=nope",
        b"&&=&=",
    ),
    *(
        b"exp=1&kid=local&sig=x",
        b"exp=" + b"9" * 400 + b"&kid=local&sig=x",
        b"exp=\xff&kid=&sig=",
        b"\x00",
        b"cursor=%00",
    ),
)


@dataclass(frozen=True, slots=True)
class Hostile:
    method: str
    path: str
    query: bytes
    headers: Headers
    chunks: tuple[bytes, ...]


def hostile_requests(seed: int, *, key: str, lora_id: str) -> Iterator[Hostile]:
    """Without end; the same seed gives the same stream."""
    rnd = random.Random(seed)
    while True:
        room = rnd.choice("ab")
        method, path = _target(rnd)
        headers = _headers(rnd, room, key)
        chunks = _in_chunks(rnd, _body(rnd, room, lora_id)) if method not in ("GET", "HEAD") else ()
        yield Hostile(method, path, rnd.choice(QUERIES) if rnd.random() < 0.3 else b"", headers, chunks)


def _target(rnd: random.Random) -> tuple[str, str]:
    some_id = rnd.choice(IDS)
    return rnd.choices(
        (
            ("POST", "/v1/generate"),
            ("POST", "/v1/upscale"),
            ("GET", f"/v1/generate/{some_id}"),
            ("GET", f"/v1/upscale/{some_id}"),
            ("GET", f"/v1/generations/{some_id}"),
            ("GET", "/v1/jobs"),
            ("GET", f"/v1/jobs/{some_id}"),
            ("POST", f"/v1/jobs/{some_id}/cancel"),
            ("GET", f"/files/images/{some_id}"),
            ("GET", "/v1/models"),
            (rnd.choice(("PUT", "DELETE", "PATCH", "HEAD", "TRACE", "NONSENSE", "GET")), "/v1/generate"),
            ("GET", f"/nowhere/{some_id}"),
        ),
        (60, 10, 3, 2, 3, 3, 3, 3, 3, 2, 3, 2),
    )[0]


def _headers(rnd: random.Random, room: str, key: str) -> Headers:
    headers: Headers = [(b"host", b"house.test")]
    if rnd.random() < 0.97:
        headers.append((b"authorization", b"Bearer " + key.encode()) if room == "a" else (b"x-api-key", key.encode()))
    if rnd.random() < 0.9:
        headers.append((b"content-type", b"application/json" if rnd.random() < 0.9 else rnd.choice(MEDIA_TYPES)))
    if rnd.random() < 0.15:
        headers.append((rnd.choice(ODD_HEADERS), rnd.choice(ODD_VALUES)))
    return headers


def _body(rnd: random.Random, room: str, lora_id: str) -> bytes:
    if rnd.random() < 0.2:
        return rnd.choice(RAW)
    text = json.dumps(_document(rnd, room, lora_id), ensure_ascii=rnd.random() < 0.5)
    raw = text.encode(errors="surrogatepass")
    return _damaged(rnd, raw) if rnd.random() < 0.25 else raw


def _document(rnd: random.Random, room: str, lora_id: str) -> dict[str, Any]:
    fields = FIELDS[room]
    document = {name: rnd.choice(values) for name, values in fields.items() if rnd.random() < 0.7}
    document["prompt" if room == "a" else "positive_prompt"] = "a lighthouse"
    document["lora_id" if room == "a" else "model_id"] = lora_id if rnd.random() < 0.9 else rnd.choice(JUNK)
    for _ in range(rnd.choice((0, 1, 1, 2, 5))):
        document[rnd.choice([*document, *fields, *FIELDS["a"], "image_id", "scale_factor", "", "\0", "__proto__"])] = (
            rnd.choice(JUNK)
        )
    if document and rnd.random() < 0.2:
        del document[rnd.choice(list(document))]
    return document


def _damaged(rnd: random.Random, raw: bytes) -> bytes:
    """A few bytes changed, lost or doubled."""
    damaged = bytearray(raw)
    for _ in range(rnd.randrange(1, 4)):
        place = rnd.randrange(len(damaged) + 1)
        damaged[place : place + rnd.randrange(3)] = rnd.randbytes(rnd.randrange(3))
    return bytes(damaged)


def _in_chunks(rnd: random.Random, body: bytes) -> tuple[bytes, ...]:
    if rnd.random() < 0.8:
        return (body,)
    cut = rnd.randrange(len(body) + 1)
    return (body[:cut], b"", body[cut:])
