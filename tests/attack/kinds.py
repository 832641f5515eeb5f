"""The kinds of hostile, broken and odd requests, as bytes.

Each names one thing that is wrong or unusual.
"""

import base64
import json
from collections.abc import Iterator

from tests.attack.requests import Kind, Requests, odd, one
from tests.attack.upload_kinds import lora_kinds, page_kinds

BODY = b'{"prompt":"a red circle","lora_id":"model_x"}'
FIVE_HEADERS_OF_SERVE = (
    "x-request-id",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
)
ENDPOINTS = (
    "/v1/generate",
    "/v1/generate/gen_aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "/v1/upscale",
    "/v1/upscale/up_aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "/v1/generations/gen_aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "/v1/models",
    "/v1/jobs",
    "/v1/jobs/gen_aaaaaaaaaaaaaaaaaaaaaaaaaa",
    "/files/images/x.png",
    "/healthz",
    "/readyz",
    "/openapi/a.json",
    "/docs/a",
)


def kinds(host: str, secret: str) -> list[Kind]:
    """Return all kinds. `host` is the service's own; `secret` a key for both interfaces."""
    return [*_Kinds(host, secret).all(), *lora_kinds(host, secret), *page_kinds(host, secret)]


class _Kinds(Requests):
    def all(self) -> Iterator[Kind]:
        yield from self._methods()
        yield from self._versions()
        yield from self._targets()
        yield from self._hosts()
        yield from self._lengths()
        yield from self._encodings()
        yield from self._header_lines()
        yield from self._headers_of_serve()
        yield from self._other_protocols()
        yield from self._sizes()
        yield from self._credentials()
        yield from self._bodies()
        yield from self._unfinished()

    def _methods(self) -> Iterator[Kind]:
        strange = (
            "FOO",
            "get",
            "Get",
            "PROPFIND",
            "SEARCH",
            "PURGE",
            "LINK",
            "M-SEARCH",
            "BREW",
            "X" * 200,
            "GET!",
            "TRACE",
        )
        for method in strange:
            yield one(f"method {method[:20]}", self.request(f"{method} /healthz HTTP/1.1"), 405)
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            for path in ("/v1/generate", "/v1/models", "/nowhere"):
                yield one(f"{method} {path}", self.request(f"{method} {path} HTTP/1.1"), 404, 405)
        yield one("method with a body", self.request("FOO / HTTP/1.1", "Content-Length: 3", body=b"abc"))
        yield odd("CONNECT to another", self.request("CONNECT 127.0.0.1:22 HTTP/1.1"))
        same = b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\nConnection: close\r\n\r\n"
        yield one("CONNECT with its own Host", same, 405)
        for path in ENDPOINTS:
            yield one(f"HEAD {path}", self.request(f"HEAD {path} HTTP/1.1"))
            yield one(f"TRACE {path}", self.request(f"TRACE {path} HTTP/1.1", self.key.strip()), 404, 405)

    def _versions(self) -> Iterator[Kind]:
        for version in ("HTTP/1.2", "HTTP/2.0", "HTTP/3.0", "HTTP/9.9", "HTTP/0.9"):
            yield odd(f"version {version}", self.request(f"GET /healthz {version}"))
        for version in ("HTTP/1", "HTTP/1.10", "HTTPS/1.1", "http/1.1", "ICY/1.1", "HTTP/1.1 x", ""):
            yield odd(f"version {version!r}", self.request(f"GET /healthz {version}"))
        yield odd("HTTP/0.9", b"GET /healthz\r\n")
        yield one("HTTP/1.0 with Host", self.request("GET /healthz HTTP/1.0"), 200)
        yield one("HTTP/1.0 without Host", b"GET /openapi/a.json HTTP/1.0\r\n\r\n", 200)

    def _targets(self) -> Iterator[Kind]:
        paths = {
            "two slashes": "//v1//jobs",
            "a dot": "/./v1/jobs",
            "dots": "/../../etc/passwd",
            "encoded dots": "/%2e%2e/%2e%2e/etc/passwd",
            "dots in a file": "/files/../../secrets.json",
            "encoded slashes in a file": "/files/..%2f..%2fsecrets.json",
            "encoded NUL": "/v1/jobs/%00",
            "not UTF-8, encoded": "/v1/generate/%ff%fe",
            "half an escape": "/v1/jobs/%",
            "no escape": "/v1/jobs/%zz",
            "encoded newline": "/v1/jobs/%0d%0aSet-Cookie:%20a=b",
            "semicolons": "/v1/jobs;a=b/c;d",
            "backslashes": "/v1\\jobs",
            "an address of Serve": "/-/nothing",
            "an address of Serve, encoded": "/%2d/nothing",
            "a long path": "/" + "a" * 8_000,
            "many segments": "/a" * 2_000,
            "a long query": "/v1/jobs?cursor=" + "9" * 8_000,
            "many parameters": "/v1/jobs?" + "&".join(f"a{i}=b" for i in range(1_000)),
            "a parameter twice": "/v1/jobs?limit=1&limit=2",
            "a bad cursor": "/v1/jobs?cursor=99999999999999-gen_" + "a" * 26,
            "a bad limit": "/v1/jobs?limit=-1",
            "a huge limit": "/v1/jobs?limit=" + "9" * 400,
            "a bad signature": "/files/images/x.png?exp=99999999999&kid=local&sig=" + "0" * 64,
            "a Lua escape": "/v1/jobs/%5Cx00%5C%22",
            "a format": "/v1/jobs/%%s%%n{0}",
        }
        for name, path in paths.items():
            yield one(f"target with {name}", self.request(f"GET {path} HTTP/1.1", self.key.strip()))
        yield one("target *", self.request("OPTIONS * HTTP/1.1"), 404)
        yield one(
            "target in absolute form", self.request(f"GET http://{self.host[6:-2].decode()}/healthz HTTP/1.1"), 200
        )
        yield odd("target of another host", self.request("GET http://evil.example/healthz HTTP/1.1"))
        for name, target in {
            "raw bytes": "/v1/\xff\xfe",
            "a fragment": "/healthz#x",
            "a NUL": "/healthz\x00",
            "a tab": "/a\tb",
            "a space": "/a b",
        }.items():
            yield odd(f"target with {name}", self.request(f"GET {target} HTTP/1.1"))
        for target in ("healthz", "", "?a=b", "ftp://a/b", "127.0.0.1:22"):
            yield odd(f"target {target!r}", self.request(f"GET {target} HTTP/1.1"))

    def _hosts(self) -> Iterator[Kind]:
        line = b"GET /openapi/a.json HTTP/1.1\r\n"
        end = b"Connection: close\r\n\r\n"
        yield one("no Host", line + end, 400)
        yield one("another Host", line + b"Host: evil.example\r\n" + end, 200)
        for name, host in {
            "empty": b"",
            "with a slash": b"a/b",
            "with a user": b"a@b",
            "with a space": b"a b",
            "with markup": b"<script>",
            "with a quote": b'a"b',
            "not ASCII": b"\xff\xfe",
            "with a bad port": b"a:99999999",
            "long": b"a" * 300,
            "half an IPv6 address": b"[::1",
        }.items():
            yield odd(f"Host {name}", line + b"Host: " + host + b"\r\n" + end)
        yield odd("two Hosts", line + self.host + b"Host: evil.example\r\n" + end)

    def _lengths(self) -> Iterator[Kind]:
        for length in ("+7", "-1", "0x7", "7 7", "9" * 23, "", "7.0", "seven", "1e2", "7;8"):
            yield odd(f"Content-Length {length[:24]!r}", self.post(f"Content-Length: {length}", body=b'{"a":1}'))
        yield odd("two lengths", self.post("Content-Length: 7", "Content-Length: 0", body=b'{"a":1}'))
        yield one("the length twice", self.post("Content-Length: 7", "Content-Length: 7", body=b'{"a":1}'), 401)
        yield one("the length as a list", self.post("Content-Length: 7, 7", body=b'{"a":1}'), 401)
        yield one("a body after GET", self.request("GET /healthz HTTP/1.1", "Content-Length: 7", body=b'{"a":1}'), 200)
        follower = self.request("GET /healthz HTTP/1.1")
        hidden = self.request("GET /healthz HTTP/1.1", f"Content-Length: {len(follower)}", body=follower)
        yield one("a request hidden in a body", hidden, 200)
        yield one(
            "a length and chunks", self.post("Content-Length: 6", "Transfer-Encoding: chunked", body=b"0\r\n\r\nG"), 401
        )
        three = self.request("GET /healthz HTTP/1.1", closes=False) * 2 + follower
        yield one("three at once", three, 200)

    def _encodings(self) -> Iterator[Kind]:
        for encoding in (
            "xchunked",
            '"chunked"',
            "chunked, identity",
            "identity",
            "gzip",
            "gzip, chunked",
            "\x0bchunked",
            "",
            "chunked chunked",
            "chunked;a=b",
        ):
            yield odd(f"Transfer-Encoding {encoding!r}", self.post(f"Transfer-Encoding: {encoding}", body=b"0\r\n\r\n"))
        yield one("Transfer-Encoding after a tab", self.post("Transfer-Encoding:\tchunked", body=b"0\r\n\r\n"), 401)
        yield odd("Transfer-Encoding before a space", self.post("Transfer-Encoding : chunked", body=b"0\r\n\r\n"))
        yield odd("Transfer-Encoding twice", self.post("Transfer-Encoding: chunked", "Transfer-Encoding: identity"))
        yield one("Transfer-Encoding folded", self.post("Transfer-Encoding:\r\n chunked", body=b"0\r\n\r\n"))
        chunks = {
            "an extension": b'7;a=b\r\n{"a":1}\r\n0\r\n\r\n',
            "a newline in an extension": b'7;a\nb\r\n{"a":1}\r\n0\r\n\r\n',
            "a bare newline": b'7\n{"a":1}\r\n0\r\n\r\n',
            "a prefix": b'0x7\r\n{"a":1}\r\n0\r\n\r\n',
            "too large a number": b'1000000000000000007\r\n{"a":1}\r\n0\r\n\r\n',
            "a negative number": b'-7\r\n{"a":1}\r\n0\r\n\r\n',
            "no number": b'zz\r\n{"a":1}\r\n0\r\n\r\n',
            "a missing end": b'7\r\n{"a":1}xx0\r\n\r\n',
            "trailers": b'7\r\n{"a":1}\r\n0\r\nContent-Length: 5\r\nAuthorization: Bearer x\r\n\r\n',
        }
        for name, body in chunks.items():
            head = self.post(self.key.strip(), "Transfer-Encoding: chunked")
            yield odd(f"chunk with {name}", head + body)
            yield Kind(f"chunk with {name}, later", (head, body), is_http=False)

    def _header_lines(self) -> Iterator[Kind]:
        lines = {
            "a space in its name": b"X A: b",
            "a space before the colon": b"X-A : b",
            "no colon": b"X-A",
            "no name": b": b",
            "a NUL": b"X-A: b\0c",
            "a NUL in its name": b"X\0A: b",
            "a bare carriage return": b"X-A: b\rX-B: c",
            "a bracket in its name": b"X(A): b",
            "a name that is not ASCII": b"X-\xe4: b",
            "a leading space": b" X-A: b",
        }
        for name, line in lines.items():
            yield odd(f"header with {name}", self.request("GET /healthz HTTP/1.1", line))
        for name, line in {
            "a folded value": b"X-A: b\r\n c",
            "a bare newline": b"X-A: b\nX-B: c",
            "an underscore": b"X_A: b",
            "no value": b"X-A:",
            "control characters": b"X-A: \x01\x02\x1b[31m\x7f",
            "a tab": b"X-A:\tb\tc",
            "markup": b"X-A: <script>alert(1)</script>",
        }.items():
            yield one(f"header with {name}", self.request("GET /healthz HTTP/1.1", line))
        for name in (
            "authorization",
            "x-api-key",
            "content-type",
            "cookie",
            "idempotency-key",
            "user-agent",
            "accept",
            "x-forwarded-for",
            "traceparent",
            "origin",
            "accept-language",
            "if-none-match",
            "range",
            "content-encoding",
        ):
            row = name.encode() + b": \xff\xfe\xe4"
            yield one(f"{name} not UTF-8", self.json(BODY, row), 202, 400, 401, 403, 415)
            yield one(f"{name} sent 50 times", self.request("GET /v1/models HTTP/1.1", *[f"{name}: a"] * 50))

    def _headers_of_serve(self) -> Iterator[Kind]:
        for name in FIVE_HEADERS_OF_SERVE:
            for value in (b"\xff\xfe", b"0.000001", b"-1", b"?1", b"a" * 7_000, b"\x1b]0;x\x07"):
                request = self.request("GET /healthz HTTP/1.1", name.encode() + b": " + value)
                yield one(f"{name}: {value[:8]!r}", request, 200)
        for name in ("Serve_Multiplexed-Model_Id", "X-Serve-Router-Target", "X-Session-Id", "x-serve-anything"):
            yield one(f"{name} not UTF-8", self.request("GET /healthz HTTP/1.1", name.encode() + b": \xff"), 200)
        for value in ("short", "a" * 200, "with space", "semi;colon", "a\tb", '"><img src=x>'):
            yield one(
                f"X-Request-Id {value[:12]!r}", self.request("GET /healthz HTTP/1.1", f"X-Request-Id: {value}"), 200
            )
        twice = ["X-Request-Id: aaaaaaaaaaaa", "X-Request-Id: bbbbbbbbbbbb"]
        yield one("X-Request-Id twice", self.request("GET /healthz HTTP/1.1", *twice), 200)
        yield one("a timeout for a request that runs", self.json(b"{}", "x-request-timeout-seconds: 0.000001"), 400)

    def _other_protocols(self) -> Iterator[Kind]:
        socket = ("Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
        for protocol in ("websocket", "h2c", "TLS/1.0", "\xff"):
            for path in ("/v1/jobs", "/healthz", "/nowhere"):
                yield one(
                    f"upgrade to {protocol!r} at {path}",
                    self.request(f"GET {path} HTTP/1.1", f"Upgrade: {protocol}", *socket),
                )
        yield odd("HTTP/2 at once", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        yield odd("TLS", bytes.fromhex("16030100c8010000c40303") + b"\0" * 190)
        yield one(
            "gRPC",
            self.post(
                "TE: trailers",
                "Content-Type: application/grpc",
                "Content-Length: 5",
                body=b"\0" * 5,
                path="/ray.rpc.syncer.RaySyncer/StartSync",
            ),
            404,
        )
        yield odd("SOCKS", b"\x05\x01\x00", waits=True)
        yield odd("PROXY", b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n" + self.request("GET /healthz HTTP/1.1"))
        yield odd("SMTP", b"EHLO evil.example\r\n", waits=True)
        yield odd("Redis", b"*1\r\n$4\r\nPING\r\n", waits=True)
        yield odd("noise", bytes(range(256)) * 8)
        for value in ("100-continue", "200-ok", "\xff", "100-continue, 100-continue"):
            yield one(f"Expect {value!r}", self.post(f"Expect: {value}", "Content-Length: 2", body=b"{}"), 401)

    def _sizes(self) -> Iterator[Kind]:
        yield one("a header of 20 KB", self.request("GET /healthz HTTP/1.1", "X-A: " + "a" * 20_000), 400)
        yield one("a header of 60 KB", self.request("GET /healthz HTTP/1.1", "X-A: " + "a" * 60_000), 400)
        yield odd("a header of 1 MB", self.request("GET /healthz HTTP/1.1", "X-A: " + "a" * 1_000_000))
        yield one("200 headers", self.request("GET /healthz HTTP/1.1", *(f"X-{i}: a" for i in range(200))), 400)
        yield odd("2,000 headers", self.request("GET /healthz HTTP/1.1", *(f"X-{i}: a" for i in range(2_000))))
        yield odd("a long name", self.request("GET /healthz HTTP/1.1", "X" * 10_000 + ": a"))
        yield one("cookies of 10 KB", self.request("GET /console/sign-in HTTP/1.1", "Cookie: " + "a=b; " * 2_000))
        yield one("a target of 60 KB", self.request(f"GET /{'a' * 60_000} HTTP/1.1"), 404)
        for path in ("generate", "upscale", "jobs", "loras"):
            line = f"GET /v1/{path}/{'a' * 60_000} HTTP/1.1"
            yield one(f"an id of 60 KB in {path}", self.request(line, self.key.strip()), 404)
        yield one("a body of 70 KB", self.json(b" " * 70_000), 413)
        yield one(
            "a body of 70 KB in chunks",
            self.post(
                self.key.strip(), "Transfer-Encoding: chunked", body=b"11170\r\n" + b" " * 0x11170 + b"\r\n0\r\n\r\n"
            ),
            413,
        )
        yield one("a body of 70 KB from nobody", self.post("Content-Length: 70000", body=b" " * 70_000), 401)

    def _credentials(self) -> Iterator[Kind]:
        basic = base64.b64encode(b"a:b").decode()
        rows = {
            "none": (),
            "an unknown key": (f"Authorization: Bearer atl_{'a' * 38}",),
            "no key": ("Authorization: Bearer ",),
            "only a scheme": ("Authorization: Bearer",),
            "another scheme": (f"Authorization: Basic {basic}",),
            "two lines": (f"Authorization: Bearer {self.secret}",) * 2,
            "both": (f"Authorization: Bearer {self.secret}", f"X-API-Key: {self.secret}"),
            "a long key": ("Authorization: Bearer " + "a" * 10_000,),
            "a key with a NUL escape": ("Authorization: Bearer a%00b",),
            "a key of Redis": ("Authorization: Bearer {job:0}:keys:*",),
            "two API keys": (f"X-API-Key: {self.secret}", "X-API-Key: b"),
            "a cookie": ("Cookie: atelier_session=" + "a" * 64,),
        }
        for name, lines in rows.items():
            yield one(
                f"credentials: {name}", self.post(*lines, f"Content-Length: {len(BODY)}", body=BODY), 400, 401, 403
            )
        for path in ENDPOINTS:
            yield one(f"GET {path} from nobody", self.request(f"GET {path} HTTP/1.1"), 200, 401, 404, 405)

    def _bodies(self) -> Iterator[Kind]:
        bodies = {
            "empty": b"",
            "not JSON": b"prompt=a",
            "half": BODY[:20],
            "two": BODY * 2,
            "a list": b"[]",
            "a string": b'"a"',
            "null": b"null",
            "a deep list": b"[" * 10_000 + b"]" * 10_000,
            "a deep object": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
            "a byte order mark": b"\xef\xbb\xbf" + BODY,
            "UTF-16": BODY.decode().encode("utf-16"),
            "not UTF-8": b'{"prompt":"\xff"}',
            "a lone surrogate": b'{"prompt":"\\ud800"}',
            "a NUL": b'{"prompt":"a\\u0000b"}',
            "a key twice": b'{"prompt":"a","prompt":"b"}',
            "NaN": b'{"prompt":"a","lora_id":"b","guidance_scale":NaN}',
            "Infinity": b'{"prompt":"a","lora_id":"b","guidance_scale":1e400}',
            "a huge number": b'{"prompt":"a","lora_id":"b","seed":' + b"9" * 5_000 + b"}",
            "comments": b'{/* a */"prompt":"a"}',
            "an unknown field": b'{"prompt":"a","lora_id":"b","promt":"c"}',
            "the other interface's fields": b'{"positive_prompt":"a","model_id":"b"}',
            "a prototype": b'{"__proto__":{"a":1},"constructor":1}',
            "many fields": json.dumps({f"a{i}": i for i in range(4_000)}).encode(),
        }
        for name, body in bodies.items():
            yield one(f"body: {name}", self.json(body), 400, 403)
        for media in (
            "text/xml",
            "multipart/form-data; boundary=x",
            "application/x-www-form-urlencoded",
            "\xff",
            "a" * 3_000,
        ):
            yield one(f"media type {media[:20]!r}", self.json(BODY, f"Content-Type: {media}"), 400, 415)
        for encoding in ("gzip", "br", "\xff"):
            yield one(f"content encoding {encoding!r}", self.json(BODY, f"Content-Encoding: {encoding}"), 400, 415)
        for key in ("a" * 300, "a b", "\xff", ""):
            yield one(f"idempotency key {key[:8]!r}", self.json(BODY, f"Idempotency-Key: {key}"), 400, 403)
        for field, value in (("image_id", "x"), ("image_id", 7), ("scale_factor", 3)):
            yield one(
                f"upscale {field} {value}", self.json(json.dumps({field: value}).encode(), path="/v1/upscale"), 400, 404
            )

    def _unfinished(self) -> Iterator[Kind]:
        """The first three connections are closed without an answer: what they sent never was a request."""
        yield odd("silence", b"", waits=True)
        yield odd("half a line", b"GET /heal", waits=True)
        yield odd("half the headers", b"GET /healthz HTTP/1.1\r\nHo", waits=True)
        for name, path, row, status in (
            ("the API", "/v1/generate", self.key.strip(), 408),
            ("the API from nobody", "/v1/generate", "X-A: b", 401),
            ("sign-in", "/console/sign-in", f"Origin: http://{self.host[6:-2].decode()}", 408),
            ("nothing", "/nowhere", "X-A: b", 404),
        ):
            half = self.post(row, "Content-Length: 100", body=b"a", path=path)
            yield one(f"half a body for {name}", half, status, waits=True)
            chunk = self.post(row, "Transfer-Encoding: chunked", body=b"5\r\nab", path=path)
            yield one(f"half a chunk for {name}", chunk, status, waits=True)
