"""The kinds of hostile requests to the routes of LoRAs, usage, waiting polls and pages.

The pages are the console's and the operators'.
"""

import json
import struct
from collections.abc import Iterator, Mapping

from tests.attack.requests import Kind, Requests, odd, one

BOUNDARY = "x7"
FORM_TYPE = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
LORA = "/v1/loras/model_" + "a" * 26
IMAGES = ("/v1/images", "/v1/images/img_" + "a" * 26)
JOB = "gen_" + "a" * 26
JSON = "Content-Type: application/json"
REFUSED = (400, 403, 404, 413, 415)
CONSOLE_PAGES = (
    "/console/playground",
    "/console/compare?jobs=" + f"{JOB}," * 40,
    "/console/compare/grid?jobs=%00",
    f"/console/playground/{JOB}/panel",
    f"/console/playground/{JOB}/previews/99999999999999999999",
    f"/console/history/{JOB}/img_{'a' * 26}/thumbnail",
    "/console/history?after=99999999999999-x&from=9999-12-31&to=0000-00-00",
    "/console/loras",
    "/console/loras/..%2f..%2fsecrets.json",
    "/console/usage?days=" + "9" * 400,
    "/console/usage.csv?lora=%3D1%2B1",
    "/console/settings/users",
    "/console/settings/%2e%2e/x/roll",
    "/console/links/" + "a" * 3_000,
    "/console/sign-in?next=//evil.example",
)
OPERATORS_PAGES = (
    "/operators/",
    "/operators/live",
    "/operators/accounts?name=*&page=-1",
    "/operators/accounts/..%2f",
    "/operators/failures?after=99999999999999-x&window=%00",
    f"/operators/jobs/{JOB}",
    "/operators/models?owner=%ff",
    "/operators/audit?account=operator:&before=%00&act=x",
    "/operators/checks",
    "/operators/links/" + "a" * 3_000,
    "/operators/sign-in?next=//evil.example",
)
FORMS = (
    "/console/playground",
    "/console/compare",
    f"/console/playground/{JOB}/again",
    f"/console/history/{JOB}/delete",
    "/console/loras/new",
    "/console/loras/model_x/share",
    "/console/settings/users",
    "/console/settings/users/user_x/remove",
    "/console/settings/sessions/end",
    "/console/settings/password",
    "/console/links/x",
    "/operators/sign-in",
    "/operators/accounts/acct_x/link",
    "/operators/failures/requeue",
    "/operators/checks",
    "/operators/links/x",
)


def lora_kinds(host: str, secret: str) -> Iterator[Kind]:
    requests = Requests(host, secret)
    yield from _routes(requests)
    yield from _references(requests)
    yield from _forms(requests)
    yield from _files(requests)
    yield from _waits(requests)


def page_kinds(host: str, secret: str) -> Iterator[Kind]:
    """Requests to pages for people, without a session and with one that nobody has."""
    requests = Requests(host, secret)
    for path in (*CONSOLE_PAGES, *OPERATORS_PAGES):
        cookie = "Cookie: atelier_session=" + "a" * 43 + "; atelier_operator=\xff"
        for name, rows in {"nobody": (), "a made-up session": (cookie,), "a key": (requests.key.strip(),)}.items():
            text = requests.request(f"GET {path} HTTP/1.1", *rows)
            yield one(f"page {path[:60]} with {name}", text, 200, 303, 307, 400, 404, 405, is_page=True)
    own = f"Origin: http://{host}"
    for path in FORMS:
        for name, rows in {
            "no origin": (),
            "another origin": ("Origin: http://evil.example",),
            "another site": (own, "Sec-Fetch-Site: cross-site"),
            "its own origin": (own, "Sec-Fetch-Site: same-origin"),
        }.items():
            body = b"name=a&form_token=b&next=//evil.example"
            head = (*rows, "Content-Type: application/x-www-form-urlencoded", f"Content-Length: {len(body)}")
            text = requests.post(*head, body=body, path=path)
            yield one(f"form {path} with {name}", text, 303, 403, 404, 415, is_page=True)


def _routes(requests: Requests) -> Iterator[Kind]:
    for method in ("GET", "PATCH", "DELETE", "POST", "PUT"):
        for path in ("/v1/loras", LORA, f"{LORA}/grants", f"{LORA}/grants/acct_{'a' * 26}", "/v1/usage", *IMAGES):
            nobody = requests.request(f"{method} {path} HTTP/1.1", "Content-Length: 0")
            yield one(f"{method} {path} from nobody", nobody, 401, 404, 405)
            text = requests.request(f"{method} {path} HTTP/1.1", requests.key.strip(), JSON, "Content-Length: 0")
            yield one(f"{method} {path} without a body", text, 200, *REFUSED, 405)
    targets = {
        "dots": "/v1/loras/%2e%2e%2f%2e%2e%2fsecrets.json",
        "a NUL": "/v1/loras/%00",
        "a pattern of Redis": "/v1/loras/*",
        "a long id": "/v1/loras/" + "a" * 5_000,
        "an account of another family": f"{LORA}/grants/%7Bjob:0%7D:account:x",
        "a bad cursor": "/v1/loras?cursor=--1-" + "9" * 300,
        "a huge cursor": "/v1/loras?cursor=99999999999999-" + "a" * 128,
        "a limit too high": "/v1/loras?limit=201",
        "a long search": "/v1/loras?q=" + "a" * 4_000,
        "a search not UTF-8": "/v1/loras?q=%ff%fe",
        "days of usage": "/v1/usage?from=0000-00-00&to=9999-99-99",
        "a huge span of usage": "/v1/usage?from=0001-01-01&to=9999-12-31",
    }
    for name, path in targets.items():
        yield one(f"LoRAs with {name}", requests.request(f"GET {path} HTTP/1.1", requests.key.strip()))
    documents = {
        "nothing": b"{}",
        "null": b'{"name":null}',
        "another owner": b'{"owner":"acct_x"}',
        "markup": b'{"name":"<script>alert(1)</script>"}',
        "a newline": b'{"name":"a\\nb"}',
        "a direction": b'{"name":"a\\u202eb"}',
        "many words": json.dumps({"trigger_words": ["a"] * 5_000}).encode(),
        "a deep name": b'{"name":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    }
    for name, body in documents.items():
        head = (requests.key.strip(), JSON, f"Content-Length: {len(body)}")
        yield one(f"change of a LoRA to {name}", requests.request(f"PATCH {LORA} HTTP/1.1", *head, body=body), *REFUSED)
        yield one(f"share with {name}", requests.json(body, JSON, path=f"{LORA}/grants"), *REFUSED)


def _references(requests: Requests) -> Iterator[Kind]:
    """Addresses that a service must not fetch for a customer, and digests of others' files."""
    said = {"name": "a", "base_model": "pocket"}
    sources = (
        "http://127.0.0.1:6379/",
        "http://169.254.169.254/latest/meta-data/",
        "file:///etc/passwd",
        "/etc/passwd",
        "../../secrets.json",
        "s3://x/../y",
        "simplecache::http://127.0.0.1/",
        "http://allowed@127.0.0.1/",
        "http://[::1]/",
        "http://0x7f000001/",
        "gopher://127.0.0.1:6379/_PING",
        "data:;base64,AAAA",
        "memory://x",
        "github://a:b@/x",
        "",
        "a" * 1_001,
    )
    for source in sources:
        body = json.dumps({**said, "source": source}).encode()
        yield one(f"source {source[:40]!r}", requests.json(body, JSON, path="/v1/loras"), 400, 403)
    for name, digest in {
        "unknown": "9f" * 32,
        "short": "9f",
        "not hexadecimal": "zz" * 32,
        "of a path": "../" * 21,
    }.items():
        body = json.dumps({**said, "sha256": digest}).encode()
        yield one(f"digest {name}", requests.json(body, JSON, path="/v1/loras"), *REFUSED)
    both = json.dumps({**said, "sha256": "9f" * 32, "source": "http://127.0.0.1/"}).encode()
    yield one("a digest and a source", requests.json(both, JSON, path="/v1/loras"), 400, 403)


def _forms(requests: Requests) -> Iterator[Kind]:
    """Multipart forms that are damaged, or lie about what they hold."""
    whole = _form({"name": b"a", "base_model": b"pocket"}, b"abc")
    bodies: Mapping[str, bytes] = {
        "empty": b"",
        "not a form": b"abc",
        "no end": whole[:-8],
        "an end alone": f"--{BOUNDARY}--\r\n".encode(),
        "another boundary": whole.replace(BOUNDARY.encode(), b"y7"),
        "bare newlines": whole.replace(b"\r\n", b"\n"),
        "no file": _form({"name": b"a", "base_model": b"pocket"}, None),
        "an empty file": _form({"name": b"a", "base_model": b"pocket"}, b""),
        "a field twice": _form({"name": b"a"}, None)[: -len(BOUNDARY) - 6] + whole,
        "an unknown field": _form({"name": b"a", "owner": b"acct_x"}, b"abc"),
        "a path as a field": _form({"../../name": b"a"}, b"abc"),
        "a name not UTF-8": _form({"name": b"\xff", "base_model": b"pocket"}, b"abc"),
        "a long field": _form({"name": b"a" * 20_000}, b"abc"),
        "a path as the file's name": whole.replace(b"f.safetensors", b"../../../etc/cron.d/x"),
        "a NUL in the file's name": whole.replace(b"f.safetensors", b"a\0b"),
        "quotes in the file's name": whole.replace(b"f.safetensors", b'\\";name=\\"name'),
        "no disposition": whole.replace(b"Content-Disposition", b"X-Disposition"),
        "two dispositions": whole.replace(b"\r\n\r\n", b'\r\nContent-Disposition: form-data; name="x"\r\n\r\n', 1),
        "a part's header of 30 KB": whole.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * 30_000 + b"\r\n\r\n", 1),
        "1,000 parts": _form({f"a{i}": b"" for i in range(1_000)}, None),
        "a part in gzip": whole.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1),
        "a request after its end": whole + b"GET /healthz HTTP/1.1\r\n\r\n",
        "text before it": b"abc\r\n" + whole,
    }
    for name, body in bodies.items():
        yield one(f"upload: {name}", _upload(requests, body), *REFUSED, is_checked=True)
    for boundary in ("", '""', "a" * 300, "a b", '"a', "\xff", "-" * 70):
        row = f"Content-Type: multipart/form-data; boundary={boundary}"
        text = requests.post(requests.key.strip(), row, f"Content-Length: {len(whole)}", body=whole, path="/v1/loras")
        yield one(f"upload: boundary {boundary[:10]!r}", text, *REFUSED)
    huge = requests.post(requests.key.strip(), FORM_TYPE, f"Content-Length: {10**15}", path="/v1/loras")
    yield one("upload: a petabyte, announced", huge, 408, 413, waits=True)
    from_nobody = requests.post(FORM_TYPE, f"Content-Length: {len(whole)}", body=whole, path="/v1/loras")
    yield one("upload: from nobody", from_nobody, 401)
    unfinished = requests.post(requests.key.strip(), FORM_TYPE, "Content-Length: 10000", path="/v1/loras") + whole[:40]
    yield odd("upload: half", unfinished, waits=True)


def _files(requests: Requests) -> Iterator[Kind]:
    """Whole forms with a safetensors file that lies."""
    tensor = b'{"a.lora_A.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}'
    files = {
        "no header": b"\0" * 4,
        "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
        "a header of half a file": struct.pack("<Q", 1 << 20) + b"{}",
        "a header that is no JSON": struct.pack("<Q", 8) + b"aaaaaaaa",
        "a pickle": b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "a zip": b"PK\x03\x04" + b"\0" * 60,
        "gzip": b"\x1f\x8b\x08" + b"\0" * 60,
        "a huge shape": _safetensors(tensor.replace(b"[1,1]", b"[4294967296,4294967296]") + b"}", b"\0" * 4),
        "overlapping offsets": _safetensors(tensor + b"," + tensor[1:].replace(b"a.", b"b.") + b"}", b"\0" * 4),
        "negative offsets": _safetensors(tensor.replace(b"[0,4]", b"[-4,0]") + b"}", b"\0" * 4),
        "a key twice": _safetensors(tensor + b"," + tensor[1:] + b"}", b"\0" * 4),
        "a deep header": _safetensors(b'{"a":' * 30_000 + b"1" + b"}" * 30_000, b""),
        "markup in its metadata": _safetensors(tensor + b',"__metadata__":{"format":"<script>"}}', b"\0" * 4),
        "infinite numbers": _safetensors(tensor + b"}", b"\0\0\x80\x7f"),
        "no known layer": _safetensors(tensor + b"}", b"\0" * 4),
    }
    for name, file in files.items():
        body = _form({"name": b"a", "base_model": b"pocket"}, file)
        yield one(f"LoRA file: {name}", _upload(requests, body), 400, 403, is_checked=True)


def _waits(requests: Requests) -> Iterator[Kind]:
    """Polls that would rather wait, or know what they have."""
    for path in (f"/v1/generate/{JOB}", f"/v1/generations/{JOB}", f"/v1/upscale/up_{'a' * 26}", f"/v1/jobs/{JOB}"):
        for row in (
            "Prefer: wait=999999999",
            "Prefer: wait=-1",
            "Prefer: wait=" + "9" * 3_000,
            "Prefer: " + "wait=1, " * 900,
            "Prefer: \xff",
            "If-None-Match: *",
            'If-None-Match: W/"' + "a" * 6_000 + '"',
            "If-None-Match: " + '"a",' * 1_500,
        ):
            text = requests.request(f"GET {path} HTTP/1.1", requests.key.strip(), row)
            yield one(f"{path[:14]} with {row[:24]!r}", text, 401, 404)


def _upload(requests: Requests, body: bytes) -> bytes:
    return requests.post(requests.key.strip(), FORM_TYPE, f"Content-Length: {len(body)}", body=body, path="/v1/loras")


def _form(texts: Mapping[str, bytes], file: bytes | None) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"
        for name, value in texts.items()
    ]
    if file is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="f.safetensors"\r\n\r\n'
        parts.append(head.encode() + file + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def _safetensors(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data
