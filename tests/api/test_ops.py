"""Health, readiness, metrics and the landing page."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pydantic import ByteSize, SecretStr, ValidationError

from serve_app.jobs import images
from serve_app.settings import Settings
from tests.api.app import BASE, TestService, client_of, open_service, refused
from tests.support import memory_limit, mounted_disk, plain_redis, wait_until


async def test_the_service_says_whether_it_is_ready(tmp_path: Path) -> None:
    """A service without the generator that it should have still answers polls and accepts jobs."""

    async def always(_kind: str) -> bool:
        return True

    async with (
        open_service(tmp_path) as service,
        client_of(service.resources.with_parts(keeps_worker=always).app()) as missing,
    ):
        for client, status, generator in (
            (service.client, "ready", "scaled to zero"),
            (missing, "not ready", "none has started"),
        ):
            answer = await client.get("/readyz", headers=service.operator)
            assert answer.status_code == 200
            states = {"redis": "ok", "storage": "ok", "generator": generator}
            assert answer.json() == {"status": status, "accepting": True, **states}


@pytest.mark.slow
async def test_it_says_what_keeps_new_jobs_out_and_polls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the images is really full and then really read-only, and Redis is really at its limit."""
    monkeypatch.setattr(images, "PROBE_EVERY_S", 0.0)
    with mounted_disk(tmp_path / "disk", megabytes=8) as disk:
        reserve = ByteSize(5 << 20)
        async with open_service(
            tmp_path / "service", storage_url=disk.as_uri(), disk_reserve=reserve, polls_per_second=1000
        ) as service:
            member = await service.member()
            done = await service.submit(member)
            await service.complete(done)

            async def says(reason: str) -> bool:
                answer = await service.client.get("/readyz", headers=service.operator)
                poll = await service.client.get(f"/v1/generate/{done}", headers=member.a)
                assert (answer.status_code, poll.status_code) == (200, 200)
                said = answer.json()
                assert (said["status"], said["accepting"]) == ("ready", "reason" not in said)
                numbers = (await service.client.get("/metrics", headers=service.operator)).text
                return said.get("reason", "") == reason and f"atelier_accepting {float(not reason)}" in numbers

            assert await says("")
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(4 << 20))
            await wait_until(lambda: says("disk below its reserve"))
            ballast.unlink()
            await wait_until(lambda: says(""))
            _remount(disk, "ro")
            await wait_until(lambda: says("storage cannot be written"))
            _remount(disk, "rw")
            await wait_until(lambda: says(""))
            with (
                plain_redis(service.resources.redis_url) as client,
                memory_limit(client, int(client.info("memory")["used_memory"] * 1.05)),
            ):
                await wait_until(lambda: says("Redis at its memory limit"))
            await wait_until(lambda: says(""))


def _remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


@dataclass(frozen=True)
class Case:
    """Who asks which service, and whether they see what is for the operator."""

    address: str = "203.0.113.7"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    sees: bool = False


TOKEN = "an-operator-token-of-length"
WITH_TOKEN = {"operator_token": SecretStr(TOKEN)}
CASES = {
    "another user of this machine": Case("127.0.0.1"),
    "another user of this machine by IPv6": Case("::1", settings=WITH_TOKEN),
    "an anonymous client": Case(),
    "an anonymous client that claims to be local": Case(headers={"X-Forwarded-For": "127.0.0.1"}),
    "an anonymous client that guesses": Case(headers={"Authorization": "Bearer guessed"}, settings=WITH_TOKEN),
    "an anonymous client with nothing where nothing is set": Case(headers={"Authorization": "Bearer "}),
    "an anonymous client with odd characters": Case(headers={"Authorization": "Bearer \u00e9"}, settings=WITH_TOKEN),
    "the operator": Case(headers={"Authorization": f"Bearer {TOKEN}"}, settings=WITH_TOKEN, sees=True),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_tells_of_other_tenants_is_the_operators(service: TestService, case: str) -> None:
    asked = CASES[case]
    resources = service.resources.with_parts(
        settings=service.resources.settings.model_copy(update=dict(asked.settings))
    )
    transport = httpx.ASGITransport(resources.app(), client=(asked.address, 4711))
    headers = [(name.encode(), value.encode()) for name, value in asked.headers.items()]
    async with httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers) as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
        assert (await client.get("/healthz")).status_code == 200
    assert ready.status_code == 200
    assert ("redis" in ready.json()) is asked.sees
    assert (ready.json()["status"], ready.json()["accepting"]) == ("ready", True)
    if asked.sees:
        assert "atelier_jobs_ready" in metrics.text
    else:
        refused(metrics, 401, "unauthorized")
        assert metrics.headers["www-authenticate"] == "Bearer"


async def test_a_token_that_is_not_set_is_made_for_the_service_s_user_alone(service: TestService) -> None:
    file = service.resources.settings.data_dir / "operator-token"
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    assert len(token) >= 32
    answer = await service.client.get("/metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 200
    assert service.resources.settings.operator_secret == token.encode(), "and stays the same"


def test_an_operator_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValidationError, match="operator_token"):
        Settings(operator_token=SecretStr("short"))


@pytest.mark.parametrize("path", ["/console", "/operators"])
async def test_pages_are_found_without_their_last_slash(service: TestService, path: str) -> None:
    answer = await service.client.get(path)
    assert (answer.status_code, answer.headers["location"]) == (308, f"{path}/")
