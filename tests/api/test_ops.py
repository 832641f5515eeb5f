"""Health, readiness, metrics and the landing page."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr, ValidationError

from serve_app.api.app import create_app
from serve_app.settings import Settings
from tests.api.app import BASE, Member, TestService, error_of, open_service


async def test_the_process_says_it_is_alive(service: TestService) -> None:
    answer = await service.client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_the_service_says_it_is_ready(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        answer = await service.client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "redis": "ok", "storage": "ok", "generator": "scaled to zero"}


async def test_metrics_are_prometheus_text_with_the_queue_s_depth(service: TestService, member: Member) -> None:
    await service.submit(member)
    answer = await service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in lines:
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]+",?)+\})? [0-9.e+-]+', line), line
    ready = next(line for line in lines if line.startswith('atelier_jobs_ready{kind="generation"}'))
    assert float(ready.split()[-1]) >= 1
    accepted = next(line for line in lines if line.startswith('atelier_jobs_total{event="accepted"}'))
    assert float(accepted.split()[-1]) >= 1
    assert member.key not in answer.text


@dataclass(frozen=True)
class Case:
    """Who asks, of which service, and whether he sees what is the operator's."""

    address: str = "203.0.113.7"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    sees: bool = False


TOKEN = "an-operator-token-of-length"
WITH_TOKEN = {"operator_token": SecretStr(TOKEN)}
CASES = {
    "this machine": Case("127.0.0.1", sees=True),
    "this machine by IPv6": Case("::1", sees=True),
    "a stranger": Case(),
    "a stranger who says that he is local": Case(headers={"X-Forwarded-For": "127.0.0.1"}),
    "a stranger who guesses": Case(headers={"Authorization": "Bearer guessed"}, settings=WITH_TOKEN),
    "a stranger with nothing where nothing is set": Case(headers={"Authorization": "Bearer "}),
    "a stranger with odd characters": Case(headers={"Authorization": "Bearer \u00e9"}, settings=WITH_TOKEN),
    "the operator": Case(headers={"Authorization": f"Bearer {TOKEN}"}, settings=WITH_TOKEN, sees=True),
    "anybody through a proxy on this machine": Case("127.0.0.1", settings={"public_url": "https://example.com"}),
    "the operator through a proxy": Case(
        "127.0.0.1",
        headers={"Authorization": f"Bearer {TOKEN}"},
        settings={"public_url": "https://example.com", **WITH_TOKEN},
        sees=True,
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_tells_of_other_tenants_is_the_operators(service: TestService, case: str) -> None:
    asked = CASES[case]
    resources = replace(service.resources, settings=service.resources.settings.model_copy(update=dict(asked.settings)))
    transport = httpx.ASGITransport(create_app(resources), client=(asked.address, 4711))
    headers = [(name.encode(), value.encode()) for name, value in asked.headers.items()]
    async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers) as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
        assert (await client.get("/healthz")).status_code == 200
    assert ready.status_code == 200
    assert ("redis" in ready.json()) is asked.sees
    assert ready.json()["status"] == "ready"
    if asked.sees:
        assert "atelier_jobs_ready" in metrics.text
    else:
        assert (metrics.status_code, error_of(metrics)["code"]) == (401, "unauthorized")
        assert metrics.headers["www-authenticate"] == "Bearer"


def test_an_operator_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValidationError, match="operator_token"):
        Settings(operator_token=SecretStr("short"))


async def test_the_landing_page_leads_to_the_documents_and_the_console(service: TestService) -> None:
    answer = await service.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    for target in re.findall(r'href="([^"]+)"', answer.text):
        found = await service.client.get(target, follow_redirects=True)
        assert found.status_code == 200 or target.startswith("/console"), target
