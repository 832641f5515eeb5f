"""Only proxies that the setting names are believed when they say where a caller is."""

import json
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.request_context import UNKNOWN, client_address, with_forwarded_address
from serve_app.settings import Network, Settings
from tests.attack.raw import exchange

LOAD_BALANCER, ELSEWHERE = "10.0.0.1", "203.0.113.7"


def address(peer: str | None, *forwarded: str, trusted: str = "") -> str:
    scope = {
        "type": "http",
        "client": None if peer is None else (peer, 40000),
        "headers": [(b"x-forwarded-for", line.encode("latin-1")) for line in forwarded],
    }
    return client_address(scope, Settings.model_validate({"trusted_proxies": trusted}).trusted_proxies)


@pytest.mark.parametrize(
    "forwarded",
    [(), ("198.51.100.1",), ("198.51.100.1, 10.0.0.1",), ("198.51.100.1", "10.0.0.2"), ("",), (",",)],
    ids=str,
)
@pytest.mark.parametrize("trusted", ["", LOAD_BALANCER, "127.0.0.1, 10.0.0.0/8"])
def test_headers_of_an_untrusted_address_are_ignored(forwarded: tuple[str, ...], trusted: str) -> None:
    assert address(ELSEWHERE, *forwarded, trusted=trusted) == ELSEWHERE


@pytest.mark.parametrize(
    ("peer", "forwarded", "trusted", "counted"),
    [
        # uvicorn takes the first address where it believes everybody, which is the caller's own text
        ("198.51.100.1", "198.51.100.1, 203.0.113.7", "", UNKNOWN),
        ("198.51.100.1", "198.51.100.1, 203.0.113.7", "127.0.0.1", UNKNOWN),
        # a trusted proxy that names nobody stands for itself
        (LOAD_BALANCER, "10.0.0.9", "10.0.0.0/8", LOAD_BALANCER),
        (LOAD_BALANCER, "no address", LOAD_BALANCER, UNKNOWN),
        # ports and brackets do not count
        (LOAD_BALANCER, "198.51.100.1:8080", LOAD_BALANCER, "198.51.100.1"),
        (LOAD_BALANCER, "198.51.100.1", LOAD_BALANCER, "198.51.100.1"),
        (LOAD_BALANCER, "[2001:db8::1]:80", LOAD_BALANCER, "2001:db8::/64"),
        # an address is counted as who can change it has it
        (LOAD_BALANCER, None, LOAD_BALANCER, LOAD_BALANCER),
        ("2001:db8:1:2:3::4", None, "", "2001:db8:1:2::/64"),
        ("::ffff:198.51.100.1", None, "", "198.51.100.1"),
        (None, None, "", UNKNOWN),
        ("a socket", None, "", UNKNOWN),
    ],
)
def test_an_address_is_what_its_caller_cannot_choose(
    peer: str | None, forwarded: str | None, trusted: str, counted: str
) -> None:
    assert address(peer, *([] if forwarded is None else [forwarded]), trusted=trusted) == counted


@pytest.mark.parametrize("forwarded", ["198.51.100.1", "203.0.113.9, 198.51.100.1", "x, 198.51.100.1, 10.0.0.9"])
def test_a_trusted_proxy_names_the_caller(forwarded: str) -> None:
    """It is the last address that is not a trusted proxy's: what stands before it is the caller's own text."""
    assert address(LOAD_BALANCER, forwarded, trusted="10.0.0.0/8") == "198.51.100.1"
    assert address(LOAD_BALANCER, *forwarded.split(", "), trusted="10.0.0.0/8") == "198.51.100.1"


@pytest.mark.parametrize("wrong", ["everybody", "10.0.0.0/99", "10.0.0.1/8"])
def test_a_proxy_that_is_no_address_stops_the_start(wrong: str) -> None:
    with pytest.raises(ValueError, match="trusted_proxies"):
        Settings.model_validate({"trusted_proxies": wrong})


def test_the_setting_is_read_from_the_environment_as_haproxy_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_TRUSTED_PROXIES", "10.0.0.0/8, 192.0.2.1,::1")
    assert Settings().trusted_proxies == (ip_network("10.0.0.0/8"), ip_network("192.0.2.1"), ip_network("::1"))


FORGED = [
    "198.51.100.1",
    "198.51.100.1:5",
    "127.0.0.1",
    "198.51.100.1, 127.0.0.1",
    "198.51.100.1:x",
    "nonsense",
    "[::1]:5",
    "10.0.0.1",
]


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [(), (ip_network("10.0.0.0/8"),)])
def test_behind_a_server_that_believes_this_machine_nobody_chooses_an_address(trusted: tuple[Network, ...]) -> None:
    """uvicorn believes 127.0.0.1 by default, and the service does not take what it says in that case."""
    with served(trusted) as port:
        assert asked(port, None) == "127.0.0.1"
        found = {forwarded: asked(port, forwarded) for forwarded in FORGED}
    assert {each: said for each, said in found.items() if said not in (UNKNOWN, "127.0.0.1")} == {}


def test_behind_such_a_server_a_trusted_proxy_on_this_machine_names_the_caller() -> None:
    with served((ip_network("127.0.0.1"),)) as port:
        assert asked(port, "203.0.113.9, 198.51.100.1") == "198.51.100.1"


SECRET = "5" * 64


async def nothing(*_: Any) -> Any:
    return {}


async def through_the_check(scope: Scope) -> tuple[list[Scope], list[Message]]:
    """Return what reaches the application behind the check of HAProxy's secret, and what is answered."""
    seen, sent = list[Scope](), list[Message]()

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append(scope)

    async def keep(message: Message) -> None:
        sent.append(message)

    await with_forwarded_address(app, SECRET)(scope, nothing, keep)
    return seen, sent


def request(*rows: tuple[str, str]) -> Scope:
    headers = [(name.encode(), value.encode("latin-1")) for name, value in rows]
    return {"type": "http", "client": ("10.0.0.5", 40000), "scheme": "https", "headers": headers}


async def test_haproxy_s_one_address_is_the_caller_s() -> None:
    """On another node HAProxy is no local peer, and uvicorn does not believe it."""
    forwarded = (("x-atelier-proxy", SECRET), ("x-forwarded-for", "198.51.100.1"))
    [scope], _ = await through_the_check(request(*forwarded))
    assert (client_address(scope, ()), scope["scheme"], scope["headers"]) == ("198.51.100.1", "http", [])
    [scope], _ = await through_the_check(request(*forwarded, ("x-forwarded-proto", "https")))
    assert scope["scheme"] == "https"


async def test_what_is_no_request_passes_as_it_is() -> None:
    assert await through_the_check({"type": "lifespan"}) == ([{"type": "lifespan"}], [])


@pytest.mark.parametrize("given", [(), (("x-atelier-proxy", "6" * 64),), (("x-atelier-proxy", "\xff"),)])
async def test_who_calls_a_replica_s_own_port_is_refused(given: tuple[tuple[str, str], ...]) -> None:
    seen, (start, body) = await through_the_check(request(*given, ("x-forwarded-for", "198.51.100.1")))
    assert (seen, start["status"]) == ([], 403)
    assert json.loads(body["body"])["error"]["code"] == "forbidden"


@contextmanager
def served(trusted: tuple[Network, ...]) -> Generator[int]:
    """uvicorn with its own defaults; it answers with the caller's address."""

    async def answer(scope: Scope, _receive: Receive, send: Send) -> None:
        body = client_address(scope, trusted).encode()
        headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(answer, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


def asked(port: int, forwarded: str | None) -> str:
    line = "" if forwarded is None else f"X-Forwarded-For: {forwarded}\r\n"
    (answer,) = exchange(port, f"GET / HTTP/1.1\r\nHost: x\r\n{line}\r\n".encode())
    return answer.body.decode()
