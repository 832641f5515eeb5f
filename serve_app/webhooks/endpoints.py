"""The webhooks of accounts: their endpoints, the secrets that sign, and what was delivered.

Redis holds no secret of a webhook: each is derived from the pepper and a random text of its endpoint's record.
"""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, cast, get_args

from serve_app.domain.durations import epoch_ms, from_epoch_ms, milliseconds
from serve_app.domain.errors import IdempotencyConflict, InvalidParameter, NotFound
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Script, pairs
from serve_app.webhooks.targets import Targets

Event = Literal["job.completed", "job.failed", "job.canceled", "job.expired"]
Events = Sequence[Event]
EVENTS: Events = get_args(Event)
"""What an endpoint is told of, unless it names some of these."""
TEST = "webhook.test"
"""The type of a message that tells of no job."""
OF_JOBS = "jobs"
"""The endpoint that stands for the addresses that jobs name themselves."""
NO_SUCH = "There is no such webhook."
MOST_ENDPOINTS = 10
GRACE = timedelta(hours=24)
"""How long a secret that was replaced still signs, as its successor does."""
LISTED = 100
"""A list has at most this many deliveries that have ended, and as many that wait."""
LOOKED_AT = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where an account wants to be told of the ends of its jobs. A disabled one is told nothing."""

    id: str
    url: str
    events: Events
    status: Literal["active", "disabled"]
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """A message for one endpoint, and what has become of its last attempt. That of a test is of no job."""

    id: str
    type: str
    job_id: str | None
    status: Literal["waiting", "delivered", "failed"]
    attempts: int
    ended_at: datetime
    next_attempt_at: datetime | None
    response_status: int | None
    error: str | None


class Created(NamedTuple):
    """An endpoint with its secret; `replayed` when an earlier call with the same idempotency key made it."""

    endpoint: Endpoint
    secret: str
    replayed: bool


class WebhookStore:
    """The webhooks of all accounts. Every method may raise `StoreUnavailable`."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self.targets = Targets(settings.webhook_networks)
        self._create = Script(redis, "webhooks/create_webhook")
        self._delete = Script(redis, "webhooks/delete_webhook")
        self._update = Script(redis, "webhooks/update_webhook")
        self._test = Script(redis, "webhooks/test_webhook")
        self._roll = Script(redis, "webhooks/roll_webhook")
        self._list = Script(redis, "webhooks/list_deliveries", writes=False)
        self._redeliver = Script(redis, "webhooks/redeliver")

    async def create(
        self, account_id: str, url: str, *, events: Events = (), base_url: str = "", idempotency_key: str | None = None
    ) -> Created:
        """Make an endpoint, which is told of some events, or of all.

        `base_url` is where its owner finds this service. The repeat of a call with an idempotency key gives what it
        made, as long as that is there. Raises `InvalidParameter`, `IdempotencyConflict` and `NotFound`.
        """
        self.targets.check(url)
        endpoint_id, salt = "wh_" + _name(account_id, idempotency_key), secrets.token_hex(16)
        given = hashlib.sha256(" ".join((url, *sorted(events))).encode()).hexdigest()[:32]
        row = await self._create(
            account=account_id,
            endpoint=endpoint_id,
            url=url,
            events=" ".join(events),
            base_url=base_url,
            given=given,
            salt=salt,
            pepper=self._newest_pepper,
            most=MOST_ENDPOINTS,
        )
        if not row:
            raise NotFound("There is no such account.")
        if row == ["full"]:
            raise InvalidParameter(f"url: an account has at most {MOST_ENDPOINTS} webhooks; delete one first")
        fields = pairs(row)
        if fields["given"] != given:
            raise IdempotencyConflict("This Idempotency-Key was used with a different body.")
        secret = signing_secrets(self._settings, account_id, endpoint_id, fields)[0]
        return Created(_endpoint(endpoint_id, fields), secret, replayed=fields["salt"] != salt)

    async def change(
        self, account_id: str, endpoint_id: str, *, url: str | None, events: Events | None, enabled: bool | None
    ) -> Endpoint:
        """Change what is not None. Raises `InvalidParameter` and `NotFound`."""
        if url is not None:
            self.targets.check(url)
        is_off = None if enabled is None else not enabled
        fields = {"url": url, "events": events and " ".join(events), "disabled": is_off}
        given = json.dumps({name: value for name, value in fields.items() if value is not None})
        row = endpoint_id != OF_JOBS and await self._update(account=account_id, endpoint=endpoint_id, fields=given)
        if not row:
            raise NotFound(NO_SUCH)
        return _endpoint(endpoint_id, pairs(row))

    async def test(self, account_id: str, endpoint_id: str, idempotency_key: str | None = None) -> Delivery:
        """Send an endpoint a message that tells of no job. Raises `NotFound`."""
        message = "msg_test_" + _name(f"{account_id}:{endpoint_id}", idempotency_key)
        row = endpoint_id != OF_JOBS and await self._test(account=account_id, endpoint=endpoint_id, message=message)
        if not row:
            raise NotFound(NO_SUCH)
        return _delivery(message, pairs(row), "")

    async def list(self, account_id: str) -> Sequence[Endpoint]:
        """List the account's endpoints, oldest first."""
        ids: list[str] = await self._redis.zrange(redis_key("webhooks", account_id), 0, -1)
        rows = await read_records(self._redis, ids, "webhook", account_id)
        return [_endpoint(endpoint_id, row) for endpoint_id, row in rows.items()]

    async def delete(self, account_id: str, endpoint_id: str) -> None:
        """Remove an endpoint; what waits for it is not delivered any more. Raises `NotFound`."""
        await self._require(account_id, endpoint_id)
        await self._delete(account=account_id, endpoint=endpoint_id)

    async def roll(self, account_id: str, endpoint_id: str, *, base_url: str = "") -> str:
        """Give an endpoint a new secret and return it; the one before signs too for `GRACE`. Raises `NotFound`."""
        row = await self._roll(
            account=account_id,
            endpoint=endpoint_id,
            base_url=base_url,
            salt=secrets.token_hex(16),
            pepper=self._newest_pepper,
            grace_ms=milliseconds(GRACE),
        )
        if not row:
            raise NotFound(NO_SUCH)
        return signing_secrets(self._settings, account_id, endpoint_id, pairs(row))[0]

    async def deliveries(self, account_id: str, endpoint_id: str) -> Sequence[Delivery]:
        """List deliveries: those that wait by their next attempt, then the newest that ended. Raises `NotFound`."""
        if endpoint_id != OF_JOBS:
            await self._require(account_id, endpoint_id)
        rows = await self._list(account=account_id, endpoint=endpoint_id, most=LISTED, looked_at=LOOKED_AT)
        return [_delivery(message, pairs(fields), due) for message, fields, due in rows]

    async def redeliver(self, account_id: str, endpoint_id: str, delivery_id: str) -> Delivery:
        """Make a delivery again, under the same id. Raises `NotFound`."""
        row = await self._redeliver(account=account_id, endpoint=endpoint_id, message=delivery_id)
        if not row:
            raise NotFound("There is no such delivery.")
        return _delivery(delivery_id, pairs(row), "")

    async def _require(self, account_id: str, endpoint_id: str) -> None:
        if endpoint_id == OF_JOBS or not await self._redis.exists(redis_key("webhook", account_id, endpoint_id)):
            raise NotFound(NO_SUCH)

    @property
    def _newest_pepper(self) -> int:
        return next(iter(self._settings.key_peppers))


def signing_secrets(
    settings: Settings, account_id: str, endpoint_id: str, fields: Mapping[str, str], *, at: datetime | None = None
) -> list[str]:
    """Return an endpoint's secrets by its record: the newest, and its predecessor if that still signs at the time `at`.

    A secret whose pepper the settings no longer list is left out. Nobody has seen the secret of the endpoint `jobs`
    before it was asked for, and no version of the pepper is wanted for it.
    """
    salted = [(fields.get("salt", ""), fields.get("pepper") or min(settings.key_peppers))]
    if at is not None and int(fields.get("old_until", 0)) > epoch_ms(at):
        salted.append((fields["old_salt"], fields["old_pepper"]))
    peppers = [(salt, settings.key_peppers.get(int(version))) for salt, version in salted]
    return [_secret(pepper, f"webhook:{account_id}:{endpoint_id}:{salt}") for salt, pepper in peppers if pepper]


def _name(of: str, idempotency_key: str | None) -> str:
    """Return a new random name, or the one that a call with this key gives, whenever it is made."""
    known = f"{of}:{idempotency_key}".encode()
    return secrets.token_hex(13) if idempotency_key is None else hashlib.sha256(known).hexdigest()[:26]


def _secret(pepper: bytes, name: str) -> str:
    return "whsec_" + base64.b64encode(hmac.digest(pepper, name.encode(), "sha256")).decode()


def _endpoint(endpoint_id: str, fields: Mapping[str, str]) -> Endpoint:
    return Endpoint(
        id=endpoint_id,
        url=fields["url"],
        events=[each for each in EVENTS if each in (fields.get("events") or " ".join(EVENTS)).split()],
        status="disabled" if "disabled" in fields else "active",
        created_at=from_epoch_ms(fields["created"]),
    )


def _delivery(message: str, fields: Mapping[str, str], due: Any) -> Delivery:
    return Delivery(
        id=message,
        type=f"job.{fields['ended']}" if fields["job"] else TEST,
        job_id=fields["job"] or None,
        status=cast(Any, fields["state"]),
        attempts=int(fields.get("tries", 0)),
        ended_at=from_epoch_ms(fields["at"]),
        next_attempt_at=from_epoch_ms(str(due).partition(".")[0]) if due else None,
        response_status=int(fields.get("status") or 0) or None,
        error=fields.get("error") or None,
    )
