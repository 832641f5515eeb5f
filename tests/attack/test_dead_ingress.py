"""An ingress replica that dies: callers get the contract's error until the next one serves."""

import time

import pytest

from tests.attack.raw import breach, exchange
from tests.deployments.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


@pytest.mark.parametrize(("line", "usual"), [("GET /healthz", 200), ("POST /v1/generate", 401)])
def test_a_killed_ingress_is_a_503_at_worst(service: Service, line: str, usual: int) -> None:
    headers = f"Host: 127.0.0.1:{service.port}\r\nContent-Length: 0\r\nConnection: close"
    request = f"{line} HTTP/1.1\r\n{headers}\r\n\r\n".encode()
    assert [answer.status for answer in exchange(service.port, request)] == [
        usual
    ]  # and HAProxy has a connection to reuse
    service.kill("ServeReplica:atelier:ingress")
    faults: list[str] = []
    served_since, deadline = None, time.monotonic() + 60
    while served_since is None or time.monotonic() - served_since < 3:
        assert time.monotonic() < deadline, "no ingress serves"
        answers = exchange(service.port, request, timeout=30)
        faults += [fault for answer in answers if (fault := breach(answer))] if answers else ["no answer"]
        is_served = [answer.status for answer in answers] == [usual]
        served_since = (served_since or time.monotonic()) if is_served else None
    assert not faults, faults
