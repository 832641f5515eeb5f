"""Delivers webhooks: what the scripts wrote for a job's end is sent, signed by Standard Webhooks, at least once."""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import httpx
from aiodns import DNSResolver
from standardwebhooks.webhooks import Webhook

from serve_app.domain.durations import from_epoch_ms, milliseconds
from serve_app.domain.errors import InvalidParameter, UnreadableRecord
from serve_app.domain.jobs import Job
from serve_app.jobs.history import JobReader
from serve_app.jobs.images import ImageStore
from serve_app.settings import Settings
from serve_app.store.measures import is_cancelled
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Rewrite, Script, pairs
from serve_app.webhooks.endpoints import LISTED, OF_JOBS, TEST, signing_secrets
from serve_app.webhooks.targets import FIRST_TRY_S, TRIES, Target, Targets

AT_ONCE = 128
PER_ACCOUNT = 8
"""At most this many deliveries of one account are under way: its slow receivers and silent names hold up nobody else's."""
TIMEOUT = timedelta(seconds=15)
"""An attempt takes at most this long, from resolving the name to the head of the answer; the rest is not read."""
LEASE = timedelta(minutes=1)
"""A delivery whose housekeeper died is made again after this long."""
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=5), timedelta(hours=4)
"""The second attempt waits this long and each further one four times as long, times a jitter of 0.75 to 1.25: about a
dozen within the day that a delivery is tried."""
LOOK_EVERY_S, BRISK_S = 1.0, 0.05
GONE = 410

JobRecord = Callable[[Job, Callable[[str], str]], Mapping[str, Any]]
"""Returns a job as the API shows it; its second argument signs an image's address."""

_log = logging.getLogger(__name__)


class Claimed(NamedTuple):
    """A delivery that this process makes, with its endpoint's record, which is empty for one that was deleted."""

    account_id: str
    endpoint_id: str
    message: str
    fields: Mapping[str, str]
    endpoint: Mapping[str, str]


class Outcome(NamedTuple):
    """What became of an attempt, as `settle_delivery.lua` takes it."""

    name: str
    status: int = 0
    error: str = ""


Clients = tuple[httpx.AsyncClient, httpx.AsyncClient]
"""One that connects to receivers itself, and one that leaves that to the proxy."""


class WebhookDelivery:
    """Makes the deliveries that are due. Any number of processes may."""

    def __init__(
        self,
        redis: RedisClient,
        settings: Settings,
        *,
        jobs: JobReader,
        images: ImageStore,
        record_of: JobRecord,
        nameservers: Sequence[str] = (),
        rewrite: Rewrite | None = None,
    ) -> None:
        """Names are resolved by the servers of the machine's resolv.conf, or by `nameservers`, each `address:port`."""
        self._settings = settings
        self._jobs = jobs
        self._images = images
        self._record_of = record_of
        self._targets = Targets(settings.webhook_networks, by_proxy=bool(settings.webhook_proxy))
        self._nameservers = nameservers
        self._claim = Script(redis, "webhooks/claim_deliveries", rewrite)
        self._settle = Script(redis, "webhooks/settle_delivery", rewrite)
        self._under_way: Counter[str] = Counter()
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs addresses, which may hold secrets

    async def deliver_forever(self) -> None:
        """Make deliveries as they are due until canceled, through any outage."""
        resolver = DNSResolver(self._nameservers, timeout=FIRST_TRY_S, tries=TRIES)
        by_proxy = _client(self._settings.webhook_proxy or None)
        async with _client() as direct, by_proxy, resolver, asyncio.TaskGroup() as group:
            while not is_cancelled():
                claimed: list[Claimed] = []
                try:
                    claimed = await self._claim_due()
                except Exception as error:  # noqa: BLE001 - deliveries outlive any failure of a round
                    _log.warning("claiming webhooks failed, trying again: %s", error)
                for each in claimed:
                    self._under_way[each.account_id] += 1
                    group.create_task(self._deliver((direct, by_proxy), resolver, each))
                await asyncio.sleep(BRISK_S if claimed else LOOK_EVERY_S)

    async def _claim_due(self) -> list[Claimed]:
        free = AT_ONCE - self._under_way.total()
        if free <= 0:
            return []
        rows = await self._claim(
            limit=free,
            per_account=PER_ACCOUNT,
            lease_ms=milliseconds(LEASE),
            under_way=[f"{account} {count}" for account, count in self._under_way.items()],
        )
        return [Claimed(*row[:3], fields=pairs(row[3]), endpoint=pairs(row[4])) for row in rows]

    async def _deliver(self, clients: Clients, resolver: DNSResolver, claimed: Claimed) -> None:
        try:
            outcome = await self._attempt(clients, resolver, claimed)
            await self._settle(
                account=claimed.account_id,
                endpoint=claimed.endpoint_id,
                message=claimed.message,
                outcome=outcome.name,
                status=str(outcome.status or ""),
                error=outcome.error,
                pause_ms=milliseconds(pause_after(int(claimed.fields["tries"]))),
                kept=LISTED,
            )
        except Exception as error:  # noqa: BLE001 - it is due again when its lease ends
            _log.warning("webhook %s: %s", claimed.message, type(error).__name__)
        finally:
            self._under_way[claimed.account_id] -= 1
            if not self._under_way[claimed.account_id]:
                del self._under_way[claimed.account_id]

    async def _attempt(self, clients: Clients, resolver: DNSResolver, claimed: Claimed) -> Outcome:
        is_own, job_id = claimed.endpoint_id == OF_JOBS, claimed.fields["job"]
        if not is_own and ("url" not in claimed.endpoint or ("disabled" in claimed.endpoint and job_id)):
            return Outcome("failed", error="the webhook is disabled or deleted")
        now = datetime.now(UTC)
        secrets = signing_secrets(self._settings, claimed.account_id, claimed.endpoint_id, claimed.endpoint, at=now)
        if not secrets:
            return Outcome("failed", error="the secret's pepper is gone: ask for another secret")
        url, _, base_url = claimed.fields.get("url", "").partition(" ")
        base_url = base_url or claimed.endpoint.get("base_url", "")
        try:
            job = await self._jobs.get(job_id, account_id=claimed.account_id) if job_id else None
        except UnreadableRecord:
            return Outcome("retry", error="the job's record cannot be read by this version of the service")
        if job is None and job_id:
            return Outcome("failed", error="the job was deleted")
        url_of = partial(self._images.url, base_url=base_url)
        data = {"id": claimed.endpoint_id} if job is None else self._record_of(job, url_of)
        body = _body(claimed.fields, data)
        try:
            async with asyncio.timeout(TIMEOUT.total_seconds()):
                target = await self._targets.find(url if is_own else claimed.endpoint["url"], resolver)
                direct, by_proxy = clients
                status = await _post(
                    direct if target.addresses else by_proxy,
                    target,
                    body,
                    _headers(claimed.message, now, body, secrets),
                )
        except InvalidParameter as error:
            return Outcome("retry", error=error.message)
        except TimeoutError:
            return Outcome("retry", error=f"no answer within {TIMEOUT.total_seconds():.0f} seconds")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Outcome("retry", error=f"no connection, or none that speaks HTTP ({type(error).__name__})")
        if 200 <= status < 300:
            return Outcome("delivered", status)
        return Outcome("gone" if status == GONE else "retry", status, f"answered {status}")


def _client(proxy: str | None = None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        verify=httpx.create_ssl_context(),  # it reads SSL_CERT_FILE
        trust_env=False,  # HTTPS_PROXY may be meant for models alone, and a proxy may reach what customers may not
        proxy=proxy,
        follow_redirects=False,
        timeout=TIMEOUT.total_seconds(),
        # Connections are not kept: one to an address would be taken for another name there.
        limits=httpx.Limits(max_keepalive_connections=0),
    )


def _body(fields: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """Return the message: the job as it is now, with addresses of its images that open; of a test, its webhook's id."""
    at = from_epoch_ms(fields["at"]).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    message = {"type": f"job.{fields['ended']}" if fields["job"] else TEST, "timestamp": at, "data": data}
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def pause_after(tries: int) -> timedelta:
    """Return how long to wait after `tries` attempts."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 4 ** min(tries - 1, 9)) * random.uniform(0.75, 1.25)


def _headers(message: str, now: datetime, body: str, secrets: Sequence[str]) -> dict[str, str]:
    """Return the headers of Standard Webhooks, with a signature by each secret."""
    return {
        "content-type": "application/json",
        "user-agent": "atelier-webhooks/1",
        "webhook-id": message,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(message, now, body) for secret in secrets),
    }


async def _post(client: httpx.AsyncClient, target: Target, body: str, headers: Mapping[str, str]) -> int:
    """Send to a checked address, by the name that was asked for, and return the status; the answer is not read."""
    whom = {"host": target.url.netloc.decode()}
    *others, last = target.pinned
    for url in (*others, last):
        try:
            async with client.stream(
                "POST",
                url,
                content=body.encode(),
                headers={**headers, **whom},
                extensions={"sni_hostname": target.url.raw_host.decode()},
            ) as answer:
                return answer.status_code
        except httpx.ConnectError:
            if url is last:
                raise
    raise AssertionError("the last attempt raises or returns")
