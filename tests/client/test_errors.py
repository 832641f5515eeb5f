"""Every error of the real service raises its own class, with a message that says what to change."""

import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import httpx
import pytest
import redis

from serve_app.client import (
    AsyncClient,
    Client,
    Forbidden,
    Image,
    InvalidRequest,
    NotFound,
    RateLimited,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
)
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from tests.client.conftest import LORA, PROMPT, with_plan
from tests.live import Live, live_service
from tests.support import PRIVATE_ADAPTER, Answering, serving


def test_an_invalid_field_is_named_with_its_range(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"guidance_scale.*1.*20") as error:
        client.generate(PROMPT, lora_id=LORA, guidance_scale=21)
    assert (error.value.status, error.value.code) == (400, "invalid_parameter")
    assert error.value.request_id
    assert error.value.request_id in str(error.value)


def test_what_a_key_may_not_do_is_unauthorized_or_forbidden(live: Live) -> None:
    account, key = live.member()
    _, only_a = live.run(live.resources.api_keys.create(account.id, interfaces=frozenset({Variant.A})))
    with Client(live.base_url, "atl_nobody") as nobody, Client(live.base_url, only_a, interface="b") as other:
        for client in (nobody, other):
            with pytest.raises(Unauthorized):
                client.generate(PROMPT, lora_id=LORA)
    with Client(live.base_url, key) as client, pytest.raises(Forbidden):
        client.generate(PROMPT, lora_id=PRIVATE_ADAPTER)


@pytest.mark.parametrize(("own", "other"), [("a", "b"), ("b", "a")])
def test_a_key_of_the_other_interface_is_told_which(
    live: Live, own: Literal["a", "b"], other: Literal["a", "b"]
) -> None:
    account, _ = live.member()
    _, key = live.run(live.resources.api_keys.create(account.id, interfaces=frozenset({Variant(own)})))
    with (
        Client(live.base_url, key, interface=other) as client,
        pytest.raises(Unauthorized, match=rf"Client\(…, interface='{own}'\) uses this key"),
    ):
        client.generate(PROMPT, lora_id=LORA)
    with Client(live.base_url, key, interface=own) as client:
        assert client.generate(PROMPT, loras="neon").done


@pytest.mark.parametrize("run_id", ["gen_" + "a" * 26, "../models", "?", "a b"])
def test_an_unknown_job_is_not_found(client: Client, run_id: str) -> None:
    with pytest.raises(NotFound):
        client.run(run_id)


def test_over_the_plan_is_rate_limited_with_retry_after(
    settings: Settings, redis_db: redis.Redis, tmp_path: Path
) -> None:
    with live_service(with_plan(settings, tmp_path, limit=1, window_s=600)) as live:
        _, key = live.member(plan_a="tiny")
        with Client(live.base_url, key) as client:
            job = client.generate(PROMPT, lora_id=LORA)
            with pytest.raises(RateLimited) as limited:
                client.generate(PROMPT, lora_id=LORA)
            assert limited.value.retry_after is not None
            assert 500 < limited.value.retry_after <= 600
            assert job.wait(timeout=20).done, "polls are not counted"


def test_https_to_a_service_without_it_says_so(live: Live, key: str) -> None:
    address = live.base_url.replace("http://", "https://")
    with Client(address, key, retry_budget=0) as client, pytest.raises(Unreachable, match="speak http:// there"):
        client.base_models()


def test_no_server_at_the_address_is_unreachable_by_its_port(key: str) -> None:
    for address, server in (
        ("http://127.0.0.1:9", r"//127\.0\.0\.1:9: .*does the service run there .*is the port right\?"),
        ("https://127.0.0.1/x/v1", r"//127\.0\.0\.1:443: "),
    ):
        with Client(address, key, retry_budget=0) as client, pytest.raises(Unreachable, match=server):
            client.base_models()


@contextmanager
def web_server(status: int, body: str, **headers: str) -> Generator[str]:
    """A server that gives one answer to everything; its address."""

    class Page(Answering):
        def do_GET(self) -> None:
            self.answer(status, body.encode(), **headers)

        do_POST = do_DELETE = do_GET

    with serving(Page) as address:
        yield address


LOGIN = "<html><title>Corporate proxy</title><body>Please  sign in</body></html>"


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (200, LOGIN, {}, "'Corporate proxy Please sign in'"),
        (200, "[]", {}, r"'\[\]'"),
        (200, "", {}, "OK"),
        (302, "", {"Location": "https://sso.test/login"}, "it leads to https://sso.test/login"),
    ],
    ids=["a page", "another service", "nothing", "a redirect"],
)
def test_an_answer_that_is_not_the_services_is_named(
    status: int, body: str, headers: dict[str, str], words: str
) -> None:
    with web_server(status, body, **headers) as address, Client(address, "atl_key") as client:
        for call, path in (
            (client.base_models, "/v1/base-models"),
            (client.jobs, "/v1/jobs"),
            (lambda: client.generate(PROMPT, lora_id=LORA), "/v1/jobs"),
            (lambda: client.delete("gen_x"), "/v1/jobs/gen_x"),
        ):
            with pytest.raises(UnexpectedAnswer, match=f"{address}{path} .*{words}") as error:
                call()
            assert error.value.status == status


def test_a_page_in_place_of_an_image_is_not_taken_for_it(client: Client, tmp_path: Path) -> None:
    with web_server(200, LOGIN) as proxy:
        job = client.generate(PROMPT, lora_id=LORA).wait(timeout=20)
        record = job._record  # pyright: ignore[reportPrivateUsage]
        record = replace(record, images=[replace(record.images[0], url=f"{proxy}/x.png?signature=secret")])
        with pytest.raises(UnexpectedAnswer, match=r"/x\.png is not the service's") as error:
            Image(client, record, 0).download(tmp_path / "x.png")
    assert "secret" not in str(error.value)
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("timeout", [5, 5.0, timedelta(seconds=5), httpx.Timeout(5), None], ids=repr)
async def test_a_timeout_is_given_in_seconds_or_as_a_duration(
    live: Live,
    key: str,
    timeout: float | timedelta | httpx.Timeout | None,  # noqa: ASYNC109 — what is tested
) -> None:
    with Client(live.base_url, key, timeout=timeout) as client:
        assert client.base_models()
    async with AsyncClient(live.base_url, key, timeout=timeout) as other:
        assert await other.base_models()


def test_a_timeout_is_how_long_an_answer_may_take() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, "atl_key", timeout=0.2, retry_budget=0) as client, pytest.raises(Unreachable):
            client.base_models()


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_an_address_with_the_version_in_it_is_the_same(live: Live, key: str, end: str) -> None:
    with Client(live.base_url + end, key) as client:
        assert client.base_models()


ADDRESS, KEY = "http://service.test", "atl_key"


@pytest.mark.parametrize(
    ("base_url", "key"),
    [*((base_url, KEY) for base_url in ("localhost:8000", "ftp://service.test", "/v1", "")),
     *((ADDRESS, key) for key in ("", "atl\n", "schlüssel"))],
)  # fmt: skip
def test_an_invalid_address_or_key_is_refused_at_once_and_the_key_is_not_shown(base_url: str, key: str) -> None:
    with pytest.raises(ValueError, match="^base_url: " if key == KEY else "^key: ") as error:
        Client(base_url, key)
    assert not key or key not in str(error.value)
