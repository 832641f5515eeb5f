"""Both interfaces answer every input by the contract: never a 5xx, every error in the envelope."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from itertools import islice
from pathlib import Path

import pytest

from serve_app.store.embedded_redis import stop_redis
from tests.api.app import LORA, TestService, client_of, service_settings
from tests.audit import audit
from tests.composition import Resources, open_resources
from tests.faults.hostile import Hostile, hostile_requests, send
from tests.support import plain_redis

QUICK, SOAK = 3_000, int(os.environ.get("SOAK_REQUESTS", "110000"))
SEED = int(os.environ.get("SOAK_SEED", "20261121"))
OF_A_POST = {200, 202, 400, 401, 403, 404, 409, 413, 415}
"""Answers to `POST /v1/generate` and `POST /v1/upscale`."""
PAGES = ("/console", "/operators")
"""Below them, people are answered and not programs."""
LONGEST_ERROR = 4_000
"""Bytes: an error says what is wrong, and does not send back what was sent."""


@pytest.fixture
async def resources(tmp_path: Path) -> AsyncIterator[Resources]:
    settings = service_settings(tmp_path / "var", [], max_queued=1_000_000, max_queued_per_account=1_000_000)
    try:
        async with open_resources(settings) as opened:
            yield opened
    finally:
        stop_redis(settings.data_dir)


async def _fuzz(resources: Resources, number: int) -> Counter[int]:
    """The statuses of the answers, each checked."""
    app = resources.app()
    async with client_of(app) as client:
        member = await TestService(resources, client).member()
    statuses: Counter[int] = Counter()
    began = time.monotonic()
    for count, request in enumerate(islice(hostile_requests(SEED, key=member.key, lora_id=LORA), number), start=1):
        status, headers, body = await send(app, request)
        _check(request, status, headers, body)
        statuses[status] += 1
        if count % 10_000 == 0:
            sys.stdout.write(f"\r{count} of {number} in {time.monotonic() - began:.0f} s: {dict(statuses)}   ")
    with plain_redis(resources.redis_url, socket_timeout=600) as plain:
        assert not audit(plain, max_attempts=resources.settings.max_attempts)
    return statuses


async def test_thousands_of_hostile_requests_meet_no_5xx(resources: Resources) -> None:
    statuses = await _fuzz(resources, QUICK)
    assert statuses[200] > 50, "some of them must be fine, or nothing behind validation is tested"
    assert statuses[202] > 50
    assert statuses.keys() >= {400, 401, 403, 404, 405, 413, 415}


@pytest.mark.soak
async def test_many_hostile_requests_meet_no_5xx(resources: Resources) -> None:
    statuses = await _fuzz(resources, SOAK)
    sys.stdout.write(f"\n{statuses.total()} requests: {dict(sorted(statuses.items()))}\n")
    assert statuses.total() == SOAK


def _check(request: Hostile, status: int, headers: Mapping[str, str], body: bytes) -> None:
    assert status < 500, f"{status} for {request}"
    assert headers["x-request-id"], request
    assert headers["x-ratelimit-limit"], request
    if request.method == "POST" and request.path in ("/v1/generate", "/v1/upscale"):
        assert status in OF_A_POST, f"{status} for {request}"
    if request.method == "HEAD" or status < 400 or request.path.startswith(PAGES):
        return
    error = json.loads(body)
    assert headers["content-type"] == "application/json", request
    assert error.keys() == {"error"}, request
    assert error["error"].keys() == {"code", "message"}, request
    assert all(isinstance(value, str) and value for value in error["error"].values()), request
    assert len(body) < LONGEST_ERROR, request
