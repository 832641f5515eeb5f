"""Health, readiness, metrics and the landing page."""

import re

from tests.api.app import Member, TestService


async def test_the_process_says_it_is_alive(service: TestService) -> None:
    answer = await service.client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_the_service_says_it_is_ready(service: TestService) -> None:
    answer = await service.client.get("/readyz")
    assert (answer.status_code, answer.json()) == (
        200,
        {"status": "ready", "redis": "ok", "storage": "ok", "generator": "scaled to zero"},
    )


async def test_metrics_are_prometheus_text_with_the_queue_s_depth(service: TestService, member: Member) -> None:
    await service.submit(member)
    answer = await service.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in lines:
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="\w+"\})? [0-9.e+-]+', line), line
    ready = next(line for line in lines if line.startswith('atelier_jobs_ready{kind="generation"}'))
    assert float(ready.split()[-1]) >= 1
    accepted = next(line for line in lines if line.startswith('atelier_jobs_total{event="accepted"}'))
    assert float(accepted.split()[-1]) >= 1
    assert member.key not in answer.text


async def test_the_landing_page_leads_to_the_documents_and_the_console(service: TestService) -> None:
    answer = await service.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    for target in re.findall(r'href="([^"]+)"', answer.text):
        found = await service.client.get(target, follow_redirects=True)
        assert found.status_code == 200 or target.startswith("/console"), target
