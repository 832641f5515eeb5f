"""Every error of the real service raises its own class, with a message that says what to change."""

import inspect
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import redis
import yaml

from serve_app.client import (
    AsyncClient,
    AtelierClientError,
    Client,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unauthorized,
    Unreachable,
)
from serve_app.client.errors import service_error
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from tests.live import Live, live_service
from tests.support import PRIVATE_ADAPTER, adapter_id

LORA = adapter_id("neon")
PROMPT = "purple mountains under a black sky with a yellow moon"


def test_an_invalid_field_is_named_with_its_range(live: Live, key: str) -> None:
    with Client(live.base_url, key) as client, pytest.raises(InvalidRequest, match=r"guidance_scale.*1.*20") as error:
        client.generate(PROMPT, lora_id=LORA, guidance_scale=21)
    assert (error.value.status, error.value.code) == (400, "invalid_parameter")
    assert error.value.request_id
    assert error.value.request_id in str(error.value)


def test_an_unknown_key_is_unauthorized(live: Live) -> None:
    with Client(live.base_url, "atl_nobody") as client, pytest.raises(Unauthorized):
        client.generate(PROMPT, lora_id=LORA)


def test_a_key_of_the_other_interface_is_unauthorized(live: Live) -> None:
    account, _ = live.member()
    _, only_a = live.run(live.resources.api_keys.create(account.id, interfaces=frozenset({Variant.A})))
    with Client(live.base_url, only_a, interface="b") as client, pytest.raises(Unauthorized):
        client.generate(PROMPT, lora_id=LORA)


def test_another_accounts_adapter_is_forbidden(live: Live, key: str) -> None:
    with Client(live.base_url, key) as client, pytest.raises(Forbidden):
        client.generate(PROMPT, lora_id=PRIVATE_ADAPTER)


@pytest.mark.parametrize("run_id", ["gen_" + "a" * 26, "../models", "?", "a b"])
def test_an_unknown_job_is_not_found(live: Live, key: str, run_id: str) -> None:
    with Client(live.base_url, key) as client, pytest.raises(NotFound):
        client.run(run_id)


def test_one_idempotency_key_for_two_requests_is_a_conflict(live: Live, key: str) -> None:
    with Client(live.base_url, key) as client:
        client.generate(PROMPT, lora_id=LORA, idempotency_key="order-7")
        with pytest.raises(Conflict):
            client.generate("a windmill", lora_id=LORA, idempotency_key="order-7")


def test_over_the_plan_is_rate_limited_with_retry_after(
    settings: Settings, redis_db: redis.Redis, tmp_path: Path
) -> None:
    plans = tmp_path / "plans.yaml"
    plans.write_text(yaml.safe_dump([{"interface": "a", "name": "tiny", "limit": 1, "window_s": 600}]))
    with live_service(settings.model_copy(update={"plans": plans})) as live:
        _, key = live.member(plan_a="tiny")
        with Client(live.base_url, key) as client:
            job = client.generate(PROMPT, lora_id=LORA)
            with pytest.raises(RateLimited) as limited:
                client.generate(PROMPT, lora_id=LORA)
            assert limited.value.retry_after is not None
            assert 500 < limited.value.retry_after <= 600
            assert job.wait(timeout=20).done, "polls are not counted"


def test_no_server_at_the_address_is_unreachable(key: str) -> None:
    with Client("http://127.0.0.1:9", key, retry_budget=0) as client, pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
        client.models()


async def test_the_async_client_raises_the_same(live: Live, key: str) -> None:
    async with AsyncClient(live.base_url, key) as client:
        with pytest.raises(Forbidden):
            await client.generate(PROMPT, lora_id=PRIVATE_ADAPTER)


@pytest.mark.parametrize("base_url", ["localhost:8000", "ftp://service.test", "/v1", ""])
def test_an_invalid_base_url_is_refused_at_once(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        Client(base_url, "atl_key")


@pytest.mark.parametrize("key", ["", "atl\n", "schlüssel"])
def test_an_invalid_key_is_refused_at_once_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"^key: ") as error:
        Client("http://service.test", key)
    assert not key or key not in str(error.value)


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad gateway</html>", b"[]", b'{"error":"no"}', b'{"error":null}', b"\xff"]
)
def test_an_answer_of_a_proxy_is_a_service_error(body: bytes) -> None:
    error = service_error(httpx.Response(502, content=body))
    assert isinstance(error, AtelierClientError)
    assert (error.status, error.code) == (502, "unknown")


@pytest.mark.slow
def test_the_package_imports_nothing_of_the_service() -> None:
    """The client imports nothing of the service and no heavy library."""
    program = "import serve_app.client, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.startswith("serve_app.") and not name.startswith("serve_app.client")}
    assert not ours
    assert not {"redis", "pydantic", "torch", "PIL", "ray", "fastapi"} & set(loaded)


def test_both_clients_have_the_same_signatures() -> None:
    for name in ("__init__", "generate", "upscale", "models", "run", "execute"):
        sync, asynchronous = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert [(p.name, p.default) for p in sync.parameters.values()] == [
            (p.name, p.default) for p in asynchronous.parameters.values()
        ]
