"""An ingress replica that dies: callers get the contract's error until the next one serves."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.attack.raw import breach, exchange
from tests.deployments.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


REQUESTS = {"GET /healthz": 200, "POST /v1/generate": 401}
SERVED_S = 3.0
"""An ingress that has answered as usual for this long serves again."""


def test_a_killed_ingress_is_a_503_at_worst(service: Service) -> None:
    for line, usual in REQUESTS.items():  # and HAProxy has a connection to reuse
        assert [answer.status for answer in exchange(service.port, request(service, line))] == [usual]
    service.kill("ServeReplica:atelier:ingress")
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        faults = list(pool.map(lambda line: faults_until_served(service, line, REQUESTS[line]), REQUESTS))
    assert faults == [[], []]


def request(service: Service, line: str) -> bytes:
    headers = f"Host: 127.0.0.1:{service.port}\r\nContent-Length: 0\r\nConnection: close"
    return f"{line} HTTP/1.1\r\n{headers}\r\n\r\n".encode()


def faults_until_served(service: Service, line: str, usual: int) -> list[str]:
    """Ask until the answer has been the usual one for a while; return what broke the contract."""
    faults: list[str] = []
    served_since, deadline = None, time.monotonic() + 60
    while served_since is None or time.monotonic() - served_since < SERVED_S:
        assert time.monotonic() < deadline, "no ingress serves"
        answers = exchange(service.port, request(service, line), timeout=30)
        faults += [fault for answer in answers if (fault := breach(answer))] if answers else ["no answer"]
        is_served = [answer.status for answer in answers] == [usual]
        served_since = (served_since or time.monotonic()) if is_served else None
    return faults
