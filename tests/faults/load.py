"""Calls a running service: both interfaces, idempotency keys, polls, downloads, cancels, upscales."""

import asyncio
import hashlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from serve_app.domain.accounts import Account
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from tests.composition import open_resources
from tests.faults.reconciliation import AcknowledgedJobs

AGAIN_S, POLL_S, CALL_LIMIT_S = 0.25, 0.5, 10.0
STEADY_S, POLLS_PER_ACCEPT = 0.05, 6
"""How long steady callers wait between two polls, and how many of them they make for each accept."""
USUAL_S = 1.0
"""A call that takes longer has met a fault, not load."""
MOST_UNFINISHED = 12
UNIMAGINABLE = 10_000
"""Tries of one request before the run is called broken."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a steady caller: its method, its begin by the monotonic clock, its time, its answer."""

    method: str
    begun: float
    seconds: float
    status: int | None
    """None when the connection ended, or the caller's patience, without an answer."""

    @property
    def is_usual(self) -> bool:
        """Whether the caller noticed nothing of a fault."""
        return self.status is not None and self.status < 400 and self.seconds < USUAL_S


@dataclass(slots=True)
class Seen:
    """What callers saw: how calls ended, how jobs ended, what their images were."""

    answers: Counter[str] = field(default_factory=Counter[str])
    surprises: list[str] = field(default_factory=list[str])
    """Error responses of ours that nobody expected: 503 is expected while Redis is down."""
    not_ours: Counter[int] = field(default_factory=Counter[int])
    """Answers that Serve or HAProxy made up while a part of them was dead: not in the contract's envelope."""
    ends: dict[str, str] = field(default_factory=dict[str, str])
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Object name → SHA-256 of what was downloaded."""
    calls: list[Call] = field(default_factory=list[Call])
    """The calls of steady callers, in the order of their ends."""
    open: set[float] = field(default_factory=set[float])
    """When the calls that have not ended were made."""
    double: list[str] = field(default_factory=list[str])


class Callers:
    """Makes requests until `stop` is set; then polls what is unfinished to its end."""

    def __init__(
        self,
        base_url: str,
        account: Account,
        key: str,
        *,
        lora_ids: list[str],
        prompt: str,
        seed: int = 1,
        call_limit_s: float = CALL_LIMIT_S,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._client = httpx.AsyncClient(base_url=base_url, timeout=call_limit_s, limits=limits)
        self._base_url = base_url
        self._account = account
        self.headers = {"a": {"Authorization": f"Bearer {key}"}, "b": {"X-API-Key": key}}
        self._lora_ids = lora_ids
        self._prompt = prompt
        self._rnd = random.Random(seed)
        self._unfinished: dict[str, str] = {}
        self._numbers = iter(range(UNIMAGINABLE * UNIMAGINABLE))
        self.canaries = (key, prompt)
        self.acknowledged = AcknowledgedJobs()
        self.seen = Seen()
        self.stop = asyncio.Event()

    async def run(self, submitters: int = 3) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(submitters):
                group.create_task(self._submit_until_stopped())
            group.create_task(self._poll_until_done())
        await self._client.aclose()

    async def run_steadily(self) -> None:
        """Poll one job and accept others, which are canceled, at a steady rate, however long a call takes."""
        polled = await self._ask("/v1/generate", self._body("b"), self.headers["b"])
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                if self.stop.is_set():
                    break
                group.create_task(self._timed("GET", f"/v1/generations/{polled}"))
                if number % POLLS_PER_ACCEPT == 0:
                    group.create_task(self._accept_and_cancel())
                await asyncio.sleep(STEADY_S)
        await self._client.aclose()

    async def _accept_and_cancel(self) -> None:
        answer = await self._timed("POST", "/v1/generate", self._body("b"))
        if answer is not None and answer.is_success:
            await self._call("POST", f"/v1/jobs/{answer.json()['run_id']}/cancel", self.headers["b"])

    async def _timed(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response | None:
        begun = time.monotonic()
        self.seen.open.add(begun)
        answer = await self._call(method, path, self.headers["b"], body)
        self.seen.open.discard(begun)
        status = answer.status_code if answer is not None else None
        self.seen.calls.append(Call(method, begun, time.monotonic() - begun, status))
        return answer

    @classmethod
    async def of(cls, settings: Settings, base_url: str, *, prompt: str = "a lighthouse", **more: Any) -> Self:
        """Callers with an account of their own."""
        async with open_resources(settings) as resources:
            account = await resources.accounts.create("callers", plan_a="roomy", plan_b="roomy")
            _, secret = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
            lora_ids = [adapter.id for adapter in await resources.catalog.adapters(account.id)]
        return cls(base_url, account, secret, lora_ids=lora_ids, prompt=prompt, **more)

    async def add_webhook(self, url: str) -> str:
        """Have every end of the account's jobs told there; return the secret that signs the messages."""
        answer = await self._client.post("/v1/webhooks", json={"url": url}, headers=self.headers["b"])
        return answer.raise_for_status().json()["secret"]

    @property
    def unfinished(self) -> int:
        return len(self._unfinished)

    async def probe(self) -> float:
        """Seconds until a request made now is accepted."""
        began = time.monotonic()
        await self._submit("b", "/v1/generate", self._body("b"))
        return time.monotonic() - began

    async def _submit_until_stopped(self) -> None:
        while not self.stop.is_set():
            if len(self._unfinished) >= MOST_UNFINISHED:
                await asyncio.sleep(AGAIN_S)
                continue
            interface = self._rnd.choice("abbbbbbb")
            job_id = await self._submit(interface, "/v1/generate", self._body(interface))
            if self._rnd.random() < 0.08:
                await self._cancel(job_id, interface)

    def _body(self, interface: str) -> dict[str, Any]:
        lora, seed = self._rnd.choice(self._lora_ids), self._rnd.randrange(2**40)
        if interface == "a":
            return {"prompt": self._prompt, "lora_id": lora, "steps": 20, "seed": seed}
        return {"positive_prompt": self._prompt, "model_id": lora, "width": 256, "height": 256, "seed": seed}

    async def _submit(self, interface: str, path: str, body: Mapping[str, Any]) -> str:
        """Ask until it is acknowledged, under one idempotency key, as a careful caller does.

        Now and then ask once more.
        """
        headers = self.headers[interface] | {"Idempotency-Key": f"chaos-{next(self._numbers)}"}
        job_id = await self._ask(path, body, headers)
        self.acknowledged.note(self._account.id, job_id)
        self._unfinished[job_id] = interface
        if self._rnd.random() < 0.1 and await self._ask(path, body, headers) != job_id:
            self.seen.double.append(job_id)
        return job_id

    async def _ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        for _ in range(UNIMAGINABLE):
            answer = await self._call("POST", path, headers, body)
            if answer is not None and answer.is_success:
                acknowledged = answer.json()
                return acknowledged.get("request_id") or acknowledged["run_id"]
            await asyncio.sleep(AGAIN_S)
        raise AssertionError(f"{path} was never acknowledged")

    async def _cancel(self, job_id: str, interface: str) -> None:
        self.acknowledged.may_end_as[job_id] = frozenset({JobState.CANCELED, JobState.COMPLETED})
        await self._call("POST", f"/v1/jobs/{job_id}/cancel", self.headers[interface])

    async def _poll_until_done(self) -> None:
        while not self.stop.is_set() or self._unfinished:
            for job_id, interface in list(self._unfinished.items()):
                await self._poll(job_id, interface)
            await asyncio.sleep(POLL_S)

    async def _poll(self, job_id: str, interface: str) -> None:
        path = f"/v1/generate/{job_id}" if interface == "a" else f"/v1/generations/{job_id}"
        answer = await self._call("GET", path, self.headers[interface])
        if answer is None or not answer.is_success:
            return
        record = answer.json()
        if record["status"] in ("processing", "queued"):
            return
        for url in _addresses(record):
            if not await self._download(url):
                return
        self.seen.ends[job_id] = record["status"]
        del self._unfinished[job_id]
        if interface == "a" and record.get("images") and not self.stop.is_set() and self._rnd.random() < 0.2:
            body = {"image_id": record["images"][0]["image_id"], "scale_factor": 2}
            await self._submit("a", "/v1/upscale", body)

    async def _download(self, url: str) -> bool:
        answer = await self._call("GET", url.removeprefix(self._base_url), {})
        if answer is None or not answer.is_success:
            return False
        name = url.partition("/files/")[2].partition("?")[0]
        self.seen.digests[name] = hashlib.sha256(answer.content).hexdigest()
        return True

    async def _call(
        self, method: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any] | None = None
    ) -> httpx.Response | None:
        try:
            answer = await self._client.request(method, path, headers=headers, json=body)
        except httpx.HTTPError as error:
            self.seen.answers[type(error).__name__] += 1
            return None
        self.seen.answers[f"{method} {answer.status_code}"] += 1
        if not answer.is_success:
            self._note_error(answer)
        return answer

    def _note_error(self, answer: httpx.Response) -> None:
        if not answer.text.startswith('{"error":{"code"'):
            self.seen.not_ours[answer.status_code] += 1
        elif answer.status_code != 503:
            self.seen.surprises.append(
                f"{answer.request.method} {answer.url.path}: {answer.status_code} {answer.text[:120]}"
            )


def say(text: str) -> None:
    """Tell progress to whoever watches the run (`pytest -s`)."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _addresses(record: Mapping[str, Any]) -> list[str]:
    if "image_url" in record:
        return [record["image_url"]]
    return [image["url"] for image in record.get("images", [])]
