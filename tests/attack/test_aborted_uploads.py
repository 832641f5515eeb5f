"""Clients who break off uploads of LoRAs, by the API or in the console: the disk keeps nothing."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from serve_app.client.access import READY_FILE
from serve_app.loras.registration import UPLOADS_AT_ONCE
from tests.attack.upload_kinds import BOUNDARY, FORM_TYPE
from tests.deployments.service import Service
from tests.support import POCKET
from tests.web.browser import Page

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

BY_API, BY_CONSOLE = 10, 6
GONE_WITHIN_S = 10
SENT = (0, 1 << 10, 3 << 20, 24 << 20)
"""The client is gone after this many bytes of a file of 100 MB: some are in memory, on the disk or being written."""
BEGUN = 64 << 10
"""Bytes of the file that are sent with the head: the proxy passes on what fills its buffer."""
FIELDS = {"name": "Ink", "base_model": "pocket"}


class Upload(NamedTuple):
    head: bytes
    sent: int
    is_reset: bool


def begin(port: int, path: str, fields: dict[str, str], *rows: str, length: int = 100 << 20) -> bytes:
    """An upload's head, its fields and the head of its file, which is as long as the body says."""
    texts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{each}"\r\n\r\n{fields[each]}\r\n' for each in fields
    ]
    file = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    lines = (f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", FORM_TYPE, f"Content-Length: {length}", *rows)
    return ("\r\n".join(lines) + "\r\n\r\n" + "".join(texts) + file).encode()


@pytest.fixture
def uploads(service: Service) -> Iterator[list[Upload]]:
    """Uploads by a key, and by a browser that has signed in."""
    local = json.loads((service.data_dir / READY_FILE).read_text())
    with httpx.Client(base_url=local["base_url"], headers={"Sec-Fetch-Site": "same-origin"}, timeout=30) as browser:
        sign_in = Page(browser.get("/console/sign-in")).form("Sign in")
        who = {"name": local["account"], "password": local["console_password"]}
        assert browser.post(sign_in.action, data=sign_in.fields | who).has_redirect_location
        form = Page(browser.get("/console/loras/new")).form("Upload and check")
        cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in browser.cookies.jar)
        own = (f"Cookie: {cookies}", f"Origin: {local['base_url']}", "Sec-Fetch-Site: same-origin")
        by_console = begin(service.port, form.action, {"form_token": form.fields["form_token"], **FIELDS}, *own)
        by_api = begin(service.port, "/v1/loras", FIELDS, f"Authorization: Bearer {local['keys']['both']}")
        heads = [by_api] * BY_API + [by_console] * BY_CONSOLE
        yield [Upload(head, SENT[n % len(SENT)], is_reset=bool(n % 3)) for n, head in enumerate(heads)]


def test_broken_off_uploads_are_gone_within_ten_seconds(service: Service, uploads: list[Upload]) -> None:
    folder = service.data_dir / "uploads"
    for first in range(0, len(uploads), UPLOADS_AT_ONCE):
        together = uploads[first : first + UPLOADS_AT_ONCE]
        connections = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in together]
        for connection, upload in zip(connections, together, strict=True):
            connection.sendall(upload.head + bytes(BEGUN))
        service.until(lambda: len(folders(folder)) == len(together), limit=30)  # noqa: B023 - it is asked in this round
        for connection, upload in zip(connections, together, strict=True):
            with closing(connection):
                connection.sendall(bytes(upload.sent))
                if upload.is_reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        service.until(lambda: not folders(folder), limit=GONE_WITHIN_S)


def test_an_upload_whose_client_leaves_while_it_is_checked_leaves_its_lora_alone(service: Service) -> None:
    """All of it has come: it is checked and registered as for a client that waits, and its folder is gone.

    The check takes seconds, in a process of its own, since it loads torch for a file whose header is that of a LoRA.
    """
    content, end = (POCKET / "loras" / "stripes.safetensors").read_bytes(), f"\r\n--{BOUNDARY}--\r\n".encode()
    headers = {"Authorization": f"Bearer {service.ready['keys']['both']}"}
    row = f"Authorization: {headers['Authorization']}"
    body = begin(service.port, "/v1/loras", FIELDS, row, length=0).partition(b"\r\n\r\n")[2] + content + end
    head = begin(service.port, "/v1/loras", FIELDS, row, length=len(body)).partition(b"\r\n\r\n")[0]
    with closing(socket.create_connection(("127.0.0.1", service.port), timeout=30)) as connection:
        connection.sendall(head + b"\r\n\r\n" + body)
        service.until(lambda: bool(list((service.data_dir / "uploads").glob("*/upload.safetensors"))), limit=30)
    service.until(lambda: not folders(service.data_dir / "uploads"), limit=60)
    loras = service.client.get("/v1/loras", headers=headers).json()["loras"]
    (made,) = [lora["id"] for lora in loras if lora["name"] == FIELDS["name"]]
    assert service.client.delete(f"/v1/loras/{made}", headers=headers).is_success


def folders(uploads: Path) -> list[Path]:
    return list(uploads.iterdir()) if uploads.exists() else []
