"""An ingress replica that dies: callers get the contract's error until the next one serves."""

import time

import pytest

from tests.attack.raw import breach, exchange
from tests.deployments.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]


def test_a_killed_ingress_is_a_503_at_worst(service: Service) -> None:
    request = f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\nConnection: close\r\n\r\n".encode()
    service.kill("ServeReplica:atelier:ingress")
    faults: list[str] = []
    served_since, deadline = None, time.monotonic() + 60
    while served_since is None or time.monotonic() - served_since < 3:
        assert time.monotonic() < deadline, "no ingress serves"
        answers = exchange(service.port, request, timeout=30)
        faults += [fault for answer in answers if (fault := breach(answer))] if answers else ["no answer"]
        is_served = [answer.status for answer in answers] == [200]
        served_since = (served_since or time.monotonic()) if is_served else None
    assert not faults, faults
