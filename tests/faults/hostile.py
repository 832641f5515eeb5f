"""Generates a seeded stream of bad requests for both interfaces, from nearly right to hostile."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

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
"""Values that each interface accepts."""

IMAGE = "img_" + "a" * 26
ODD_NAMES = ("image_id", "scale_factor", "extra", "", "\0", "\ud83d", "Prompt", "__proto__", "__class__")
JUNK: Sequence[Any] = (
    None, True, False, "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\U0010ffff", "ﷺ" * 5000, "x" * 4001,
    "../../etc/passwd", "'; DROP TABLE jobs; --", "${jndi:ldap://x/y}", "{{7*7}}", "<script>", "%00%0d%0aX: y", "\r\n",
    "EVAL 'return 1' 0", "{job:0}:job:x", "-OOM", "NaN", "null", "0x10", "1e3", "١٢٣", "🎨" * 200, "\u202e", "\ufeff",
    0, -0.0, -1, 1, 19, 21, 51, 255, 257, 513, 1025, 2**31, 2**53 + 1, 2**64, -(2**63) - 1, 10**308, 10**4299,
    0.1 + 0.2, 1e-320, 1e308, 0.09999999999999999, 1.0000000000000002, 2.0000001, 512.0, 512.5, 20.000001, [], [[]],
    [1], ["a"], [None] * 50, [1] * 200, [[[[[[]]]]]], {}, {"a": 1}, {"": {}}, {"prompt": "x"}, {"$gt": ""},
    {"__proto__": {}},
)  # fmt: skip
RAW: Sequence[bytes] = (
    b"", b" ", b"null", b"true", b"17", b'"text"', b"[]", b"{", b"}", b'{"a"', b"{'a': 1}", b'{"a": 1,}', b"{} {}",
    b"\xef\xbb\xbf{}", "{}".encode("utf-16"), "{}".encode("utf-32"), b"\x00", b"\xff\xfe", b"\xc0\x80",
    b'"\xed\xa0\x80"', b'{"seed": NaN}', b'{"seed": Infinity}', b'{"seed": -Infinity}', b'{"seed": 01}',
    b'{"seed": 1e999}', b'{"a": 0x1}', b'{"prompt": "a", "prompt": "b"}', b'{"a\\u0000": 1}', b'{"\\ud800": 1}',
    b'{"prompt": "\\uZZZZ"}', b'{"a": "\t"}', b'{"seed": ' + b"9" * 5000 + b"}", b'{"seed": ' + b"9" * 60_000 + b"}",
    b'{"seed": -' + b"9" * 4300 + b"}", b"[" * 30_000, b'{"a":' * 10_000, b"[" * 20_000 + b"]" * 20_000,
    b'{"a":1e' + b"9" * 1000 + b"}", b"{" + b" " * MAX_BODY_BYTES + b"}", b'"' + b"a" * (MAX_BODY_BYTES + 1) + b'"',
    b"<xml/>", b"a=1&b=2",
)  # fmt: skip
TOKENS: Sequence[bytes] = (
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e-400", b"01", b"+1", b".5", b"0x1", b"1e", b"--1", b"'x'",
    b"undefined", b"//", b"/**/", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b'"\\ud800"',
    b'"\\u0000"', b'"\\x"', b'"', b"{", b"}", b"[" * 900, b"9" * 4400, b'{"a":1,"a":2}', b",", b":", b"\\", b"\x7f",
    b"\xe2\x80\xa8",
)  # fmt: skip
"""What may stand anywhere in a damaged body."""
MEDIA_TYPES: Sequence[bytes] = (
    b"application/json", b"application/json; charset=utf-8", b"application/json; charset=utf-16", b"text/plain", b"",
    b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"application/vnd.api+json", b"json",
    b"*/*", b"a" * 5000, b"\xff/\xff", b"/", b";",
)  # fmt: skip
ODD_VALUES: Sequence[bytes] = (
    b"", b" ", b"\t", b"\x00", b"\xff", b"a" * 256, b"a" * 9000, b"-1", b"1e9", b"99999999999999999999", b"\r\nX: y",
    b"key-1", "é".encode(), b"*", b"null", b"Bearer", b"Bearer  ", b"Basic YTpi", b"atl_", b"atl_" + b"x" * 38,
    b"{job:0}:count", b"gzip", b"identity", b"bytes=0-1", b"nothing/*", b"a b", b"evil", b"x=" + b"y" * 4000,
    b"wait=1", b"wait=-1, wait=" + b"9" * 40,
)  # fmt: skip
ODD_HEADERS: Sequence[bytes] = (
    b"idempotency-key", b"x-request-id", b"content-length", b"content-encoding", b"transfer-encoding",
    b"authorization", b"x-api-key", b"host", b"cookie", b"origin", b"range", b"expect", b"if-none-match", b"prefer",
    b"accept", b"x-forwarded-for", b"x-forwarded-host", b"x-request-timeout-seconds", b"te",
)  # fmt: skip
IDS: Sequence[str] = (
    "", "gen_" + "a" * 26, "up_" + "a" * 26, IMAGE, "gen_", "GEN_" + "A" * 26, "gen_" + "a" * 25, "../x",
    "gen_" + "a" * 26 + "\0", "a" * 5000, "%2e%2e", "\ud7ff", "🎨", "*", "{job:0}:job:x", "gen_" + "１" * 26, "a b",
    "-1",
)  # fmt: skip
PARTS: Sequence[str] = (
    "v1", "generate", "generations", "upscale", "models", "jobs", "loras", "grants", "usage", "operators", "files",
    "images", "docs", "openapi", "console", "cancel", "a.json", "..", "%2e%2e", "%00", "%ff", "", "*", "x" * 300,
    "a;b", "🎨", "gen_" + "a" * 26,
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "NONSENSE")
QUERIES: Sequence[bytes] = (
    b"", b"limit=0", b"limit=-1", b"limit=1e9", b"limit=" + b"9" * 5000, b"limit=a&limit=b", b"limit=%ff",
    b"before=yesterday", b"%", b"x=1", b"state=nope", b"before=2026-11-21T12:00:00Z", b"before=9999-99-99",
    b"before=0001-01-01T00:00:00%2B23:59", b"&&=&=", b"exp=1&kid=local&sig=x", b"exp=1&kid=local&sig=%00",
    b"exp=" + b"9" * 400 + b"&kid=local&sig=x", b"exp=\xff&kid=&sig=", b"\x00", b"cursor=%00", b"cursor=" + b"9" * 30,
    b"q=" + b"a" * 101, b"base_model=" + b"a" * 129, b"limit=201", b"from=9999-12-31&to=0001-01-01",
)  # fmt: skip


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
        interface = rnd.choice("ab")
        method, path = _target(rnd)
        headers = _headers(rnd, interface, key)
        chunks = _in_chunks(rnd, _body(rnd, path, interface, lora_id)) if method not in ("GET", "HEAD") else ()
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
            (rnd.choice(METHODS), "/v1/loras"),
            (rnd.choice(METHODS), f"/v1/loras/{some_id}"),
            (rnd.choice(METHODS), f"/v1/loras/{some_id}/grants"),
            ("GET", "/v1/usage"),
            (rnd.choice(METHODS), f"/v1/images/{some_id}"),
            (rnd.choice(METHODS), f"/console/loras/{some_id}"),
            (rnd.choice(METHODS), f"/operators/accounts/{some_id}"),
            (rnd.choice(METHODS), "/v1/generate"),
            (rnd.choice(METHODS), "/" + "/".join(rnd.choices(PARTS, k=rnd.randrange(1, 5)))),
        ),
        (60, 10, 3, 2, 3, 3, 3, 3, 3, 2, 4, 4, 2, 2, 2, 1, 1, 3, 5),
    )[0]


def _headers(rnd: random.Random, interface: str, key: str) -> Headers:
    headers: Headers = [(b"host", b"service.test")]
    credentials = [(b"authorization", b"Bearer " + key.encode()), (b"x-api-key", key.encode())]
    if rnd.random() < 0.97:
        headers += credentials if rnd.random() < 0.02 else [credentials["ab".index(interface)]]
    if rnd.random() < 0.9:
        headers.append((b"content-type", b"application/json" if rnd.random() < 0.9 else rnd.choice(MEDIA_TYPES)))
    if rnd.random() < 0.15:
        headers.append((rnd.choice(ODD_HEADERS), rnd.choice(ODD_VALUES)))
    return headers


def _body(rnd: random.Random, path: str, interface: str, lora_id: str) -> bytes:
    if rnd.random() < 0.2:
        return rnd.choice(RAW)
    document = {"image_id": IMAGE, "scale_factor": 4} if path == "/v1/upscale" else _fields(rnd, interface, lora_id)
    text = json.dumps(_spoiled(rnd, document), ensure_ascii=rnd.random() < 0.5)
    raw = text.encode(errors="surrogatepass")
    return _damaged(rnd, raw) if rnd.random() < 0.25 else raw


def _fields(rnd: random.Random, interface: str, lora_id: str) -> dict[str, Any]:
    document = {name: rnd.choice(values) for name, values in FIELDS[interface].items() if rnd.random() < 0.7}
    document["prompt" if interface == "a" else "positive_prompt"] = "a lighthouse"
    document["lora_id" if interface == "a" else "model_id"] = lora_id if rnd.random() < 0.9 else rnd.choice(JUNK)
    return document


def _spoiled(rnd: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """With some fields too many, of a wrong value, or missing."""
    for _ in range(rnd.choice((0, 1, 1, 2, 5))):
        document[rnd.choice([*document, *FIELDS["a"], *FIELDS["b"], *ODD_NAMES])] = rnd.choice(JUNK)
    if document and rnd.random() < 0.2:
        del document[rnd.choice(list(document))]
    return document


def _damaged(rnd: random.Random, raw: bytes) -> bytes:
    """A few bytes changed, lost, doubled, or something foreign among them."""
    damaged = bytearray(raw)
    for _ in range(rnd.randrange(1, 4)):
        place = rnd.randrange(len(damaged) + 1)
        match rnd.randrange(4):
            case 0:
                damaged[place:place] = rnd.choice(TOKENS)
            case 1:
                damaged[place:place] = damaged[: rnd.randrange(40)]
            case _:
                damaged[place : place + rnd.randrange(9)] = rnd.randbytes(rnd.randrange(3))
    return bytes(damaged)


def _in_chunks(rnd: random.Random, body: bytes) -> tuple[bytes, ...]:
    if rnd.random() < 0.8:
        return (body,)
    cut = rnd.randrange(len(body) + 1)
    return (body[:cut], b"", body[cut:])


async def send(app: ASGIApp, request: Hostile) -> tuple[int, Mapping[str, str], bytes]:
    """Through the application as a server would: what HTTP libraries refuse to send reaches it too."""
    parts: list[Message] = [
        {"type": "http.request", "body": chunk, "more_body": n < len(request.chunks)}
        for n, chunk in enumerate(request.chunks, start=1)
    ] or [{"type": "http.request", "body": b"", "more_body": False}]
    waiting = iter(parts)
    sent: list[Message] = []

    async def receive() -> Message:
        return next(waiting, {"type": "http.disconnect"})

    async def keep(message: Message) -> None:
        sent.append(message)

    await app(_scope(request), receive, keep)
    head = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])


def _scope(request: Hostile) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(errors="replace"),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": ("127.0.0.1", 1),
        "server": ("service.test", 80),
    }
