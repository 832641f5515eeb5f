"""The service that the API tests call: the real application and stores, accounts, keys, a worker."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import httpx
import yaml

from serve_app.domain.accounts import Account
from serve_app.domain.jobs import Claim, Job, JobKind, Lease
from serve_app.domain.requests import Variant
from serve_app.jobs.queue import new_nonce
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from tests.attack.raw import RATE_HEADERS
from tests.composition import Resources, open_resources
from tests.made_jobs import job_of
from tests.support import adapter_id, png_of, store_image, volatile_redis, write_catalog

BASE = "http://service.test"
LORA = adapter_id("outline")
PLANS = [
    {"interface": interface, "name": name, "limit": limit, "window_s": 3600}
    for interface in "ab"
    for name, limit in (("unlimited", 1_000_000_000), ("single", 1))
]
BODY_A: dict[str, Any] = {"prompt": "a lighthouse", "lora_id": LORA}
BODY_B: dict[str, Any] = {"positive_prompt": "a lighthouse", "model_id": LORA}
ALL = frozenset(Variant)
BODIES: dict[Variant, dict[str, Any]] = {Variant.A: BODY_A, Variant.B: BODY_B}
PROMPT_FIELD = {Variant.A: "prompt", Variant.B: "positive_prompt"}
LORA_FIELD = {Variant.A: "lora_id", Variant.B: "model_id"}
ID_FIELD = {Variant.A: "request_id", Variant.B: "run_id"}
POLL_PATH = {Variant.A: "/v1/generate/", Variant.B: "/v1/generations/"}
ACCEPTED = {Variant.A: 202, Variant.B: 200}
UNKNOWN_NAME = "a" * 26
UNKNOWN_JOB = "gen_" + UNKNOWN_NAME

_names = count(1)


@dataclass(frozen=True, slots=True)
class Member:
    """An account with a key for both interfaces, and the two headers that present it."""

    account: Account
    key: str

    @property
    def a(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def b(self) -> dict[str, str]:
        return {"X-API-Key": self.key}

    def headers(self, variant: Variant) -> dict[str, str]:
        return self.a if variant is Variant.A else self.b


@dataclass(slots=True)
class TestService:
    """The opened stores, a client of the application, and a worker."""

    __test__: ClassVar[bool] = False

    resources: Resources
    client: httpx.AsyncClient
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    _claiming: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def operator(self) -> dict[str, str]:
        """The header that presents the operator's token."""
        return {"Authorization": f"Bearer {self.resources.settings.operator_secret.decode()}"}

    async def member(
        self,
        *,
        plan_a: str = "unlimited",
        plan_b: str = "unlimited",
        interfaces: frozenset[Variant] = ALL,
        name: str | None = None,
    ) -> Member:
        account = await self.resources.accounts.create(name or f"member {next(_names)}", plan_a=plan_a, plan_b=plan_b)
        return Member(account, await self.key(account, interfaces))

    async def key(self, account: Account, interfaces: frozenset[Variant] = ALL) -> str:
        _, secret = await self.resources.api_keys.create(account.id, interfaces=interfaces)
        return secret

    async def submit(self, member: Member, variant: Variant = Variant.A, **fields: Any) -> str:
        """Ask for images and return the new job's id."""
        answer = await self.generate(member, variant, **fields)
        assert answer.status_code == ACCEPTED[variant], answer.text
        return answer.json()[ID_FIELD[variant]]

    async def generate(self, member: Member, variant: Variant = Variant.A, **fields: Any) -> httpx.Response:
        """Ask for images, by the shortest body and other `fields`."""
        body = BODIES[variant] | fields
        return await self.client.post("/v1/generate", json=body, headers=member.headers(variant))

    async def poll(self, member: Member, variant: Variant, job_id: str) -> httpx.Response:
        return await self.client.get(POLL_PATH[variant] + job_id, headers=member.headers(variant))

    async def call(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Call the application itself, by a POST unless `scope` says otherwise, without a server or client between."""
        transport = self.client._transport  # pyright: ignore[reportPrivateUsage] # the application is in it
        assert isinstance(transport, httpx.ASGITransport)
        usual = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "query_string": b"",
            "server": ("service.test", 80),
        }
        await transport.app(usual | scope, receive, send)

    async def lease(self, job_id: str) -> Lease:
        """Claim until the job is ours; others met on the way stay claimed for the tests that wait for them."""
        kind = JobKind.UPSCALE if job_id.startswith("up_") else JobKind.GENERATION
        async with self._claiming:  # two callers at once could give both jobs to one of them
            while job_id not in self.claims:
                claims = await self.resources.queue.claim("tests", pool=kind, nonce=new_nonce(), limit=64)
                assert claims, f"{job_id} is not waiting"
                self.claims |= {claim.lease.job_id: claim for claim in claims}
        return self.claims[job_id].lease

    async def release(self, job_id: str) -> None:
        """Return a claimed job to the queue, as of a worker that stops, for another attempt."""
        await self.resources.queue.release(self.claims.pop(job_id).lease)

    async def run(self, job_id: str, progress: int) -> Lease:
        lease = await self.lease(job_id)
        await self.resources.queue.heartbeat(lease, progress=progress)
        return lease

    async def complete(self, job_id: str) -> Job:
        """Do the job as a worker does: store real PNGs of the size asked for, then commit them."""
        lease, claim = await self.lease(job_id), self.claims[job_id]
        images = [await store_image(self.resources.images, claim, index) for index in range(claim.request.num_images)]
        await self.resources.queue.finish(lease, images, seconds=0.5)
        return await job_of(self.resources, job_id)

    async def completed_image(self, member: Member, **fields: Any) -> str:
        """The id of a finished image of variant A."""
        job = await self.complete(await self.submit(member, **fields))
        return job.images[0].image_id

    async def keep_digests_of_before(self, member: Member) -> list[dict[str, str]]:
        """Reduce the account's idempotency keys to what versions up to aec29b3e wrote; return what they were."""
        redis, rows = self.resources.process.redis, list[dict[str, str]]()
        async for name in redis.scan_iter(match=redis_key("idempotency", member.account.id, "*")):
            rows.append(await redis.hgetall(name))
            await redis.hdel(name, "given")
        return rows


@asynccontextmanager
async def open_service(folder: Path, plans: Sequence[dict[str, Any]] = (), **extra: Any) -> AsyncGenerator[TestService]:
    """A service of its own over a Redis without a disk; `extra` are settings."""
    with volatile_redis() as redis_url:
        settings = service_settings(folder, plans, redis_url=redis_url, **extra)
        async with open_resources(settings) as resources, client_of(resources.app()) as client:
            yield TestService(resources, client)


def client_of(app: Any) -> httpx.AsyncClient:
    """A client that sees what a caller sees: exceptions never leave the application."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url=BASE)


def service_settings(folder: Path, plans: Sequence[dict[str, Any]], **extra: Any) -> Settings:
    """Return settings with the test catalog, `plans`, and two plans of the tests for each interface.

    Redis is embedded unless one is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.yaml").write_text(yaml.safe_dump([*PLANS, *plans]))
    extra.setdefault("catalog", write_catalog(folder / "catalog"))
    return Settings(data_dir=folder, plans=folder / "plans.yaml", **extra)


CURL_FILE = png_of((8, 8))
"""A file that a curl line uploads has this content: a picture, which for a LoRA stands for weights."""


async def send_curl(client: httpx.AsyncClient, words: Sequence[str]) -> httpx.Response:
    """Send what curl would: `-d` makes it a POST of a form, unless options say otherwise."""
    assert words[:2] == ["curl", "-s"]
    method, body, headers, url = "", None, dict[str, str](), ""
    form: dict[str, Any] = {}
    rest = iter(words[2:])
    for word in rest:
        match word:
            case "-X":
                method = next(rest)
            case "-H":
                name, value = next(rest).split(": ")
                headers[name.lower()] = value
            case "-d":
                body = next(rest)
                json.loads(body)
                headers = {"content-type": "application/x-www-form-urlencoded", **headers}
            case "-F":
                field, _, value = next(rest).partition("=")
                form[field] = (None, CURL_FILE if value.startswith("@") else value)
            case _:
                assert not url
                url = word
    method = method or ("GET" if body is None and not form else "POST")
    return await client.request(method, url, headers=headers, content=body, files=form or None)


def assert_headers(answer: httpx.Response, policy: str | None = None) -> None:
    """Each common header is there once, in its format."""
    for name in RATE_HEADERS:
        assert len(answer.headers.get_list(name)) == 1, name
    limit, remaining, reset = (int(answer.headers[name]) for name in RATE_HEADERS[:3])
    assert 0 <= remaining <= limit
    assert time.time() - 1 <= reset <= time.time() + 3602
    assert re.fullmatch(rf'"([ab]-[a-z0-9.]+)";q={limit};w=\d+', answer.headers["ratelimit-policy"])
    assert re.fullmatch(rf'"([ab]-[a-z0-9.]+)";r={remaining};t=\d+', answer.headers["ratelimit"])
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
    assert answer.headers["x-content-type-options"] == "nosniff"
    expected = "private, no-cache" if answer.request.method in ("GET", "HEAD") else "no-store"
    assert answer.headers["cache-control"] == expected
    if policy is not None:
        assert answer.headers["ratelimit-policy"].startswith(f'"{policy}"')


def refused(answer: httpx.Response, status: int, code: str, text: str = "") -> None:
    """Check that the answer is this error, and that its message has `text`."""
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert text in error["message"]


def error_of(answer: httpx.Response) -> Mapping[str, str]:
    """The error object, after checking that it is the whole body, and that the answer has every header."""
    assert_headers(answer)
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return body["error"]
