"""Webhooks: `client.webhooks` makes and changes them, and `verify_webhook` checks the messages that they send.

The type variables are what the methods return: a webhook for `Client`, a coroutine that returns one for `AsyncClient`.
"""

import base64
import hmac
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from serve_app.client.errors import InvalidSignature
from serve_app.client.protocol import Operation, Service, checked_key, path_of, then, without_none
from serve_app.client.records import Row

TOLERANCE_S = 300.0
"""A message may have been signed this long ago: an older one may be somebody's copy, sent again."""
PATH = "/v1/webhooks"

WebhookT = TypeVar("WebhookT")
WebhooksT = TypeVar("WebhooksT")
DeliveryT = TypeVar("DeliveryT")
DeliveriesT = TypeVar("DeliveriesT")
NoneT = TypeVar("NoneT")


@dataclass(frozen=True)
class Webhook(Row):
    """Where the account is told of the ends of its jobs, or of those that `events` names.

    `status` is `active` or `disabled`. Its `secret` is known only when it is created.
    """

    id: str
    url: str
    status: str
    created_at: datetime
    events: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Delivery(Row):
    """A message to a webhook, and what has become of it: `waiting`, `delivered` or `failed`."""

    id: str
    type: str
    status: str
    attempts: int
    ended_at: datetime
    job_id: str = ""
    next_attempt_at: datetime | None = None
    response_status: int | None = None
    error: str = ""


def verify_webhook(body: bytes | str, headers: Mapping[str, str], secret: str) -> dict[str, Any]:
    """Return `type`, `timestamp` and `data` of a webhook's message, if the secret has signed it (Standard Webhooks).

    `body` is as it came, before any JSON was read, and `headers` are all of the request's. `data` is the job as the API
    shows it, and `client.run(data["id"])` follows it. The same `webhook-id` may come more than once. Needs no client.
    Raises `InvalidSignature` for a message that is not the service's, or was signed more than five minutes ago.
    """
    content = body.encode() if isinstance(body, str) else body
    given = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, sent, signatures = (given[f"webhook-{name}"] for name in ("id", "timestamp", "signature"))
    except KeyError as missing:
        raise InvalidSignature(f"the header {missing} is missing") from None
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = "v1," + base64.b64encode(hmac.digest(key, f"{message_id}.{sent}.".encode() + content, "sha256")).decode()
    if not any(hmac.compare_digest(each.encode(), expected.encode()) for each in signatures.split()):
        raise InvalidSignature("no signature is by this secret, of the body as it came")
    if abs(time.time() - float(sent)) > TOLERANCE_S:
        raise InvalidSignature(f"signed more than {TOLERANCE_S:g} s ago or ahead: is this machine's clock right?")
    return json.loads(content)


class WebhookCalls(Generic[WebhookT, WebhooksT, DeliveryT, DeliveriesT, NoneT]):
    """The account's webhooks, with either interface's key."""

    verify = staticmethod(verify_webhook)

    def __init__(self, service: Service, execute: Callable[[Operation[Any]], Any]) -> None:
        self._service, self._execute = service, execute

    def list(self) -> WebhooksT:
        """List the webhooks, oldest first."""
        asked = self._service.ask("GET", PATH)
        return self._execute(then(asked, lambda body: [Webhook.read(row) for row in body["webhooks"]]))

    def create(self, url: str, *, events: Sequence[str] | None = None, idempotency_key: str | None = None) -> WebhookT:
        """Be told at `url` when jobs end, or of `events` alone, as `["job.failed"]`: keep the `secret` it returns."""
        return self._ask(Webhook, "POST", body={"url": url, "events": events}, key=checked_key(idempotency_key))

    def update(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        enabled: bool | None = None,
    ) -> WebhookT:
        """Change what is given; `enabled=True` tells a disabled one again. Raises `NotFound`."""
        return self._ask(Webhook, "PATCH", webhook_id, body={"url": url, "events": events, "enabled": enabled})

    def delete(self, webhook_id: str) -> NoneT:
        """Delete a webhook; what waits for it is not delivered. Raises `NotFound`."""
        return self._execute(self._service.delete(path_of(PATH, webhook_id)))

    def test(self, webhook_id: str) -> DeliveryT:
        """Send a message of the type `webhook.test`, once; `deliveries` says what became of it. Raises `NotFound`."""
        return self._ask(Delivery, "POST", webhook_id, "test", key=checked_key(None))

    def deliveries(self, webhook_id: str) -> DeliveriesT:
        """List the messages that wait, and the newest that have ended; `"jobs"` is for the addresses of single jobs."""
        asked = self._service.ask("GET", path_of(PATH, webhook_id, "deliveries"))
        return self._execute(then(asked, lambda body: [Delivery.read(row) for row in body["deliveries"]]))

    def _ask(
        self, kind: type[Row], method: str, *place: str, body: dict[str, Any] | None = None, key: str | None = None
    ) -> Any:
        given = None if body is None else without_none(body)
        headers = without_none({"Idempotency-Key": key})
        return self._execute(then(self._service.ask(method, path_of(PATH, *place), given, headers), kind.read))
