"""Headers of every response, whatever its status."""

import time
from collections.abc import AsyncIterator

import httpx
import pytest

from serve_app.accounts.auth import Authenticator
from serve_app.api.responses import LONGEST, MOST_WORDS, header_value
from serve_app.domain.requests import Variant
from serve_app.jobs.backlog import QueueStats
from serve_app.jobs.history import JobHistory, JobReader
from serve_app.jobs.polling import Poller
from serve_app.jobs.queue import JobQueue
from serve_app.store.redis_client import connect
from tests.api.app import (
    BODIES,
    BODY_A,
    LORA_FIELD,
    PROMPT_FIELD,
    UNKNOWN_JOB,
    Member,
    TestService,
    assert_headers,
    client_of,
    error_of,
    refused,
)
from tests.support import adapter_of, existing

A, B = Variant.A, Variant.B
UNKNOWN = UNKNOWN_JOB


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/generate", 202),
        ("GET", "/v1/jobs", 200),
        ("GET", f"/v1/generate/{UNKNOWN}", 404),
        ("GET", "/v1/models", 401),
        ("GET", "/v1/nothing", 404),
        ("GET", "/nothing", 404),
        ("DELETE", "/v1/generate", 405),
        ("GET", "/v1/upscale", 405),
        ("GET", "/healthz", 200),
        ("GET", "/openapi/a.json", 200),
        ("GET", "/docs/a", 200),
        ("GET", "/docs", 200),
        ("GET", "/", 200),
        ("GET", "/metrics", 401),
        ("GET", "/files/nothing", 404),
        ("HEAD", "/v1/jobs", 200),
    ],
)
async def test_any_answer_carries_the_headers(
    service: TestService, member: Member, method: str, path: str, status: int
) -> None:
    answer = await service.client.request(method, path, json=BODY_A, headers=member.a)
    assert answer.status_code == status, answer.text
    assert_headers(answer)


@pytest.mark.parametrize(
    ("method", "path", "headers", "policy", "limit"),
    [
        ("POST", "/v1/generate", {}, "a-hourly", 50),
        ("POST", "/v1/generate", {"Authorization": "Bearer nonsense"}, "a-hourly", 50),
        ("POST", "/v1/generate", {"X-API-Key": "nonsense"}, "b-minute", 10),
        ("GET", "/v1/models", {}, "b-minute", 10),
        ("GET", f"/v1/generations/{UNKNOWN}", {}, "b-minute", 10),
        ("GET", f"/v1/generate/{UNKNOWN}", {}, "a-hourly", 50),
        ("GET", "/nothing", {}, "a-hourly", 50),
        ("DELETE", "/v1/models", {}, "b-minute", 10),
        ("GET", "/docs/a", {}, "a-hourly", 50),
    ],
)
async def test_an_unknown_caller_sees_the_lowest_plan(
    service: TestService, method: str, path: str, headers: dict[str, str], policy: str, limit: int
) -> None:
    answer = await service.client.request(method, path, headers=headers)
    assert_headers(answer, policy)
    assert answer.headers["x-ratelimit-limit"] == answer.headers["x-ratelimit-remaining"] == str(limit)
    window = 3600 if limit == 50 else 60
    assert abs(int(answer.headers["x-ratelimit-reset"]) - time.time() - window) < 3


@pytest.mark.parametrize("variant", Variant)
async def test_a_known_caller_sees_its_own_plan_where_nothing_asks_for_a_key(
    service: TestService, variant: Variant
) -> None:
    caller = await service.member(plan_a="enterprise", plan_b="premium")
    image = (await service.complete(await service.submit(caller, variant))).images[0]
    address = service.resources.images.url(image.image_uri, base_url="")
    limit = "1000" if variant is A else "100"
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("DELETE", "/v1/generate", 405),
        ("GET", "/v1/jobs/x/nothing", 404),
        ("GET", "/files/nothing", 404),
        ("GET", address, 200),
    ):
        answer = await service.client.request(method, path, headers=caller.headers(variant))
        assert answer.status_code == status, path
        assert answer.headers["x-ratelimit-limit"] == limit, path
        assert int(answer.headers["x-ratelimit-remaining"]) == int(limit) - 1, "the job counted, and nothing else"


@pytest.mark.slow
async def test_an_anonymous_caller_and_one_without_redis_see_the_lowest_plan_where_nothing_asks_for_a_key(
    without_redis: httpx.AsyncClient, member: Member
) -> None:
    for headers in ({}, member.a, {"X-API-Key": "nonsense"}):
        answer = await without_redis.get("/nothing", headers=headers)
        assert answer.status_code == 404
        assert_headers(answer)
        assert answer.headers["x-ratelimit-limit"] in ("50", "10")


async def test_the_longest_cookie_takes_linear_time(service: TestService) -> None:
    async def seconds(size: int) -> float:
        cookie = {"Cookie": 'a="' + "\\" * size + '"'}
        began = time.process_time()
        for path in ("/v1/jobs", "/console/"):
            await service.client.get(path, headers=cookie)
        return time.process_time() - began

    short, long = [min([await seconds(size) for _ in range(3)]) for size in (2_000, 16_000)]
    assert long < 24 * short


@pytest.mark.parametrize("given", ["01234567", "a.b-c_d.0", "x" * 128])
async def test_a_fit_request_id_is_echoed(service: TestService, given: str) -> None:
    answer = await service.client.get("/healthz", headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize(
    "given", ["", "short", "x" * 129, "a b c d e f", "<script>alert</script>", "\u00e9" * 10, "12345678\t"]
)
async def test_an_unfit_request_id_is_replaced(service: TestService, given: str) -> None:
    answer = await service.client.get("/healthz", headers=[(b"x-request-id", given.encode())])
    assert_headers(answer)


METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "QUERY"}
ALLOWED = {
    "/v1/generate": {"POST"},
    f"/v1/generate/{UNKNOWN}": {"GET", "HEAD"},
    "/v1/upscale": {"POST"},
    f"/v1/upscale/{UNKNOWN}": {"GET", "HEAD"},
    f"/v1/generations/{UNKNOWN}": {"GET", "HEAD"},
    "/v1/models": {"GET", "HEAD"},
    "/v1/jobs": {"GET", "HEAD", "POST"},
    "/v1/base-models": {"GET", "HEAD"},
    f"/v1/jobs/{UNKNOWN}": {"DELETE", "GET", "HEAD"},
    f"/v1/jobs/{UNKNOWN}/images/img_x": {"DELETE"},
    f"/v1/jobs/{UNKNOWN}/cancel": {"POST"},
    "/healthz": {"GET", "HEAD"},
    "/docs": {"GET", "HEAD"},
    "/docs/a": {"GET", "HEAD"},
    "/openapi/b.json": {"GET", "HEAD"},
}


@pytest.mark.parametrize("path", ALLOWED)
async def test_another_method_gets_405_and_the_ones_that_work(service: TestService, member: Member, path: str) -> None:
    for method in METHODS - ALLOWED[path]:
        for headers in ({}, member.a, member.b):
            answer = await service.client.request(method, path, headers=headers)
            assert answer.status_code == 405, method
            refused(answer, 405, "method_not_allowed")
            assert answer.headers["allow"] == ", ".join(sorted(ALLOWED[path]))


@pytest.mark.parametrize(
    "path",
    [
        "/v1/",
        "/generate",
        "/V1/generate",
        "/v1/Generate",
        "/v1/generate/",
        "/v1/generate/x/y",
        "/v1/generations",
        "/v1/models/model_x",
        "/v1//generate",
        "//v1/generate",
        "/v1/jobs/x/",
        "/openapi.json",
        "/.env",
        "/%00",
        "/%ff",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_any_other_path_is_404_and_nothing_redirects(
    service: TestService, member: Member, path: str, method: str
) -> None:
    answer = await service.client.request(method, f"http://service.test{path}", headers=member.a)
    assert answer.status_code == 404
    assert error_of(answer) == {"code": "not_found", "message": "There is nothing at this address."}
    assert_headers(answer)


@pytest.mark.parametrize("path", ["/v1/predictions", "/v1/models/outline/predictions", "/sdapi/v1/txt2img"])
async def test_another_service_s_path_is_answered_with_its_like_here(service: TestService, path: str) -> None:
    answer = await service.client.post(path, json={})
    assert (answer.status_code, error_of(answer)["message"].endswith("Here it is POST /v1/jobs.")) == (404, True)


@pytest.fixture
async def broken(service: TestService, member: Member) -> AsyncIterator[httpx.AsyncClient]:
    """The application without a queue and a catalog: every use of them raises."""
    resources = service.resources.with_parts(queue=None, catalog=None)  # pyright: ignore[reportArgumentType]
    async with client_of(resources.app()) as client:
        yield client


@pytest.mark.parametrize("variant", Variant)
async def test_an_exception_is_a_500_in_the_envelope_with_every_header(
    broken: httpx.AsyncClient, member: Member, variant: Variant, caplog: pytest.LogCaptureFixture
) -> None:
    body = BODIES[variant] | {PROMPT_FIELD[variant]: "canary"}
    answer = await broken.post("/v1/generate", json=body, headers=member.headers(variant))
    assert answer.status_code == 500
    error = error_of(answer)
    assert error["code"] == "internal_error"
    assert answer.headers["x-request-id"] in error["message"]
    assert "NoneType" not in answer.text
    assert "Traceback" not in answer.text
    assert_headers(answer, "a-hourly" if variant is A else None)
    assert answer.headers["x-ratelimit-limit"] == "1000000000", "the caller's own window, not another's"
    logged = caplog.text
    assert answer.headers["x-request-id"] in logged
    assert "NoneType" in logged, "the operator's log has the trace"
    assert "canary" not in logged
    assert member.key not in logged
    for path in ("/openapi/a.json", "/docs/b", "/v1/models"):
        answer = await broken.get(path, headers=member.b)
        refused(answer, 500, "internal_error")
        assert_headers(answer)


@pytest.fixture
async def without_redis(service: TestService) -> AsyncIterator[httpx.AsyncClient]:
    """The application with no server at Redis's address."""
    unreachable = connect("redis://127.0.0.1:1/0")
    settings = service.resources.settings
    resources = service.resources.with_parts(
        queue=JobQueue(unreachable, settings),
        jobs=JobReader(unreachable),
        job_history=JobHistory(unreachable),
        queue_stats=QueueStats(unreachable),
        auth=Authenticator(unreachable, settings),
        poller=Poller(unreachable, settings),
    )
    async with client_of(resources.app()) as client:
        yield client
    await unreachable.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("variant", Variant)
async def test_without_redis_the_answer_is_503_with_retry_after(
    without_redis: httpx.AsyncClient, member: Member, variant: Variant
) -> None:
    answer = await without_redis.post("/v1/generate", json=BODIES[variant], headers=member.headers(variant))
    refused(answer, 503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert_headers(answer)


@pytest.mark.slow
async def test_without_redis_the_process_is_alive_and_not_ready(
    service: TestService, without_redis: httpx.AsyncClient
) -> None:
    assert (await without_redis.get("/healthz")).status_code == 200
    seen = {"status": "not ready", "accepting": False}
    for headers, details in (
        ({}, {}),
        (service.operator, {"reason": "Redis does not answer", "redis": "down", "storage": "ok"}),
    ):
        answer = await without_redis.get("/readyz", headers=headers)
        assert answer.status_code == 503
        assert answer.json() == {**seen, **details}


async def test_without_redis_credentials_and_routes_are_still_checked(without_redis: httpx.AsyncClient) -> None:
    assert (await without_redis.post("/v1/generate", json={})).status_code == 401
    assert (await without_redis.get("/v1/nothing")).status_code == 404


@pytest.mark.parametrize("variant", list(Variant))
async def test_words_that_the_base_model_has_never_read_are_named(service: TestService, variant: Variant) -> None:
    member = await service.member()
    lora = adapter_of(member.account.id, trigger_words=("Inkwash drawing",))
    await service.resources.adapter_registry.register(lora)

    async def said(text: str, **fields: str) -> str | None:
        sent = {**BODIES[variant], PROMPT_FIELD[variant]: text, **fields}
        headers = {**member.headers(variant), "Idempotency-Key": f"{text[:9].encode().hex()}-{len(fields)}"}
        answers = [await service.client.post("/v1/generate", json=sent, headers=headers) for _ in range(2)]
        found = {answer.headers.get("x-unknown-words") for answer in answers}
        assert len(found) == 1, "a replay says the same"
        return found.pop()

    assert await said("a red moon") is None
    assert await said("a red Drache, Schloß; drache") == "drache, schlo%C3%9F"
    assert await said("inkwash moon") == "inkwash"
    assert await said("inkwash moon", **{LORA_FIELD[variant]: lora.id}) is None, "its trigger word"
    many = existing(await said(" ".join("öü" * length for length in range(1, 41))))
    assert (len(many) <= LONGEST, many.startswith("%C3%B6%C3%BC, %C3%B6%C3%BC%C3%B6%C3%BC")) == (True, True)
    assert header_value(str(number) for number in range(100)) == ", ".join(map(str, range(MOST_WORDS)))


async def test_pages_of_the_origins_that_an_operator_names_may_call_from_a_browser(
    service: TestService, member: Member
) -> None:
    named, other = {"Origin": "https://app.example.com"}, {"Origin": "https://elsewhere.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-api-key,idempotency-key"}
    settings = service.resources.settings.model_copy(update={"cors_origins": ("https://app.example.com",)})
    async with client_of(service.resources.with_parts(settings=settings).app()) as client:
        before = await client.options("/v1/jobs", headers=named | asks)
        assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, named["Origin"])
        assert before.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
        for headers, status in ((member.b, 200), ({}, 401)):
            answer = await client.get("/v1/jobs", headers=headers | named)
            assert_headers(answer)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, named["Origin"])
            shown = {*answer.headers["access-control-expose-headers"].split(", ")}
            assert {"ETag", "Location", "Retry-After", "X-Unread-Characters"} < shown
            assert "access-control-allow-credentials" not in answer.headers
            answer = await client.get("/v1/jobs", headers=headers | other)
            assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/jobs", headers=other | asks)).status_code == 400
    refused(await service.client.options("/v1/jobs", headers=named | asks), 405, "method_not_allowed")
    assert "access-control-allow-origin" not in (await service.client.get("/v1/jobs", headers=member.b | named)).headers
