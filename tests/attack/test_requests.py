"""Hostile requests to the real port: every answer keeps the contract, and nothing fails inside."""

import json
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest

from deployments.proxy import proxy_secret
from tests.attack.kinds import Kind, kinds
from tests.attack.raw import Answer, breach, exchange, first_line
from tests.attack.requests import trailed
from tests.attack.test_listeners import listeners
from tests.deployments.service import ATELIER, Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]

AT_ONCE = 32
RATE_LIMITED = 429
"""Any kind may get this status: the plan of the key that they share has an end."""


def faults(port: int, kinds: Iterable[Kind]) -> list[str]:
    """What is wrong in the answers to these kinds, one line each."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [line for lines in pool.map(lambda kind: faults_of(port, kind), kinds) for line in lines]


def faults_of(port: int, kind: Kind) -> list[str]:
    seen = attempt(port, kind)
    wrong = {answer.status for answer in seen.answers} - {*kind.statuses, RATE_LIMITED} if kind.statuses else set[int]()
    found = [seen.fault] if seen.fault else []
    return [f"{kind.name}: {fault}" for fault in (*found, *(f"{status}, not {kind.statuses}" for status in wrong))]


class Seen(NamedTuple):
    """What a request of a kind was answered, and what in it breaks the contract."""

    kind: Kind
    answers: list[Answer]
    fault: str | None


def attempt(port: int, kind: Kind) -> Seen:
    try:
        answers = exchange(port, *kind.parts, timeout=240 if kind.is_checked else 15)
    except AssertionError as error:
        return Seen(kind, [], f"not HTTP: {error}")
    fault = next((fault for answer in answers if (fault := breach(answer, is_page=kind.is_page))), None)
    return Seen(kind, answers, "no answer" if kind.is_http and not answers else fault)


def test_every_answer_to_a_hostile_request_keeps_the_contract(service: Service) -> None:
    every_kind = kinds(f"127.0.0.1:{service.port}", service.ready["keys"]["both"])
    assert len(every_kind) >= 150
    found = faults(service.port, [kind for kind in every_kind if not kind.is_checked])  # the long attack sends these
    assert not found, "\n".join(found)
    assert service.client.get("/readyz").is_success


def test_a_caller_cannot_shorten_the_time_of_a_request_that_is_accepted(service: Service) -> None:
    """Serve would answer 408 and leave the job running unseen."""
    headers = {**service.bearer, "x-request-timeout-seconds": "0.000001", "Idempotency-Key": "timed-out"}
    body = {"prompt": "a red circle", "lora_id": service.lora_id, "steps": 20}
    answer = service.client.post("/v1/generate", json=body, headers=headers)
    assert answer.status_code == 202
    service.result(answer.json()["request_id"])


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_no_address_names_a_port_behind_the_proxy(service: Service, version: str) -> None:
    """An HTTP/1.0 caller may leave Host out: the addresses it gets are those it has called."""
    host = b"" if version == "HTTP/1.0" else b"Host: 127.0.0.1:%d\r\n" % service.port
    request = f"GET /openapi/a.json {version}\r\n".encode() + host + b"Connection: close\r\n\r\n"
    (answer,) = exchange(service.port, request)
    assert f'"url":"http://127.0.0.1:{service.port}"'.encode() in answer.body.replace(b'": "', b'":"')


def test_a_replica_s_own_port_answers_nobody(service: Service) -> None:
    """On a cluster it listens on every interface, for the HAProxy of other nodes."""
    ports = [one.port for one in listeners(service.pid) if SERVERS["a replica"] in one.process]
    rows = ("Host: a.example", "X-Forwarded-Proto: https", "X-Forwarded-For: 198.51.100.1", "Connection: close")
    request = "\r\n".join(("GET /openapi/a.json HTTP/1.1", *rows)).encode() + b"\r\n\r\n"
    assert {answer.status for port in ports for answer in http(port, (request,))} == {403}


SERVERS = {"a replica": "ServeReplica:atelier:ingress", "Serve's own proxy": "ProxyActor"}
"""These processes take requests beside HAProxy; each has its title."""
CREDENTIALS = ("Authorization: Bearer {key}", "X-API-Key: {key}")
OBEYED = (
    *(
        "Idempotency-Key: a b",
        "Content-Encoding: gzip",
        "Content-Type: text/plain",
        "X-Request-Timeout-Seconds: 0.000001",
    ),
    *("X-API-Key: a", "Authorization: Bearer a"),
)
"""Each of these would change the answer if it were taken for a header."""
FRAMING = ("Transfer-Encoding: gzip", "Content-Length: 0")
"""HAProxy and uvicorn's parser may refuse these."""


@pytest.mark.parametrize("server", ["HAProxy", *SERVERS])
def test_a_trailer_is_no_header(service: Service, server: str) -> None:
    """The trailer is sent in one packet with its request, and after it."""
    key = service.ready["keys"]["both"]
    ports = [service.port]
    if server in SERVERS:
        ports = [one.port for one in listeners(service.pid) if SERVERS[server] in one.process]
    found: dict[str, set[int]] = {}
    as_haproxy = (f"X-Atelier-Proxy: {secret_of(service)}", "X-Forwarded-For: 198.51.100.1")
    passed_on = () if server == "HAProxy" else as_haproxy
    for rows, trailers in (((), CREDENTIALS), ((f"Authorization: Bearer {key}",), (*OBEYED, *FRAMING))):
        for trailer in trailers:
            head, body = trailed("127.0.0.1", (*passed_on, *rows), trailer.format(key=key))
            answers = [
                answer for port in ports for parts in ((head + body,), (head, body)) for answer in http(port, parts)
            ]
            found[trailer] = {answer.status for answer in answers}
    assert [found[trailer] for trailer in CREDENTIALS] == [{401}] * len(CREDENTIALS), found
    assert all(found[trailer] == {403} for trailer in OBEYED if trailer not in FRAMING), found
    assert all(found[trailer] <= {400, 403} for trailer in FRAMING), found


def secret_of(service: Service) -> str:
    """Return what HAProxy shows replicas, so that a request straight to one is taken for HAProxy's."""
    environments = [child.environ() for child in psutil.Process(service.pid).children(recursive=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_AUTH_TOKEN", next(each["RAY_AUTH_TOKEN"] for each in environments if "RAY_AUTH_TOKEN" in each)
        )
        return proxy_secret()


def http(port: int, parts: tuple[bytes, ...]) -> list[Answer]:
    """What a port answers that may not speak HTTP."""
    try:
        return exchange(port, *parts, timeout=5)
    except (AssertionError, OSError):
        return []


def test_what_the_headers_tell_is_answered_before_the_body(service: Service) -> None:
    """A caller that waits for `100 Continue` gets the answer in its place."""
    key = f"Authorization: Bearer {service.ready['keys']['both']}"
    command = [ATELIER, "accounts", "create", "over", "--plan-b", "free", "--json", "--data-dir", str(service.data_dir)]
    over = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["key"]
    for _ in range(10):
        service.client.get("/v1/models", headers={"X-API-Key": over})
    withheld: dict[int, list[tuple[str, str]]] = {
        401: [("/v1/generate", "Authorization: Bearer a"), ("/v1/upscale", "X-A: b"), ("/v1/loras", "X-API-Key: a")],
        404: [("/nowhere", key), ("/v1/nothing", "X-A: b")],
        405: [("/v1/models", key), ("/healthz", "X-A: b")],
        413: [
            ("/v1/generate", f"{key}\r\nContent-Length: 70000"),
            ("/v1/loras", f"{key}\r\nContent-Length: {1 << 40}"),
        ],
        415: [("/v1/generate", f"{key}\r\nContent-Type: text/plain"), ("/v1/loras", f"{key}\r\nContent-Encoding: br")],
        429: [("/v1/generate", f"X-API-Key: {over}")],
    }
    found: list[tuple[int, bytes]] = []
    for status, requests in withheld.items():
        for path, rows in requests:
            length = "" if "Content-Length" in rows else "Content-Length: 500\r\n"
            for expect in ("", "Expect: 100-continue\r\n"):
                head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{rows}\r\n{length}{expect}\r\n"
                found.append((status, first_line(service.port, head.encode())))
    wrong = [(status, line) for status, line in found if not line.startswith(b"HTTP/1.1 %d " % status)]
    assert not wrong, wrong


def test_a_body_that_is_wanted_is_asked_for(service: Service) -> None:
    key = service.ready["keys"]["both"]
    rows = ("POST /v1/generate HTTP/1.1", "Host: a", f"X-API-Key: {key}", "Content-Length: 5", "Expect: 100-continue")
    head = "\r\n".join(rows) + "\r\n\r\n"
    assert first_line(service.port, head.encode()) == b"HTTP/1.1 100 Continue"
