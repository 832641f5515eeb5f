"""Webhooks are made and changed through both clients, and their messages are verified without one."""

import json
import time
from base64 import b64encode
from datetime import UTC, datetime

import pytest
from standardwebhooks.webhooks import Webhook as Signer

from serve_app.client import AsyncClient, Client, InvalidRequest, InvalidSignature, NotFound, verify_webhook
from tests.live import Live

URL, SECRET = "https://example.com/atelier", "whsec_" + b64encode(bytes(range(32))).decode()
BODY = json.dumps({"type": "job.failed", "timestamp": "2026-11-26T12:00:08.412Z", "data": {"id": "job_x"}})


def signed(body: str = BODY, *, secret: str = SECRET, ago: float = 0) -> dict[str, str]:
    """The headers of a message, in the case that HTTP/1.1 servers show them."""
    sent = time.time() - ago
    signature = Signer(secret).sign("msg_1", datetime.fromtimestamp(sent, UTC), body)
    return {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(int(sent)), "Webhook-Signature": f"v1,AAAA {signature}"}


def test_a_message_that_the_library_of_standard_webhooks_signed_is_verified() -> None:
    for body in (BODY, BODY.encode()):
        message = verify_webhook(body, signed(), SECRET)
        assert message == json.loads(BODY)


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (BODY + " ", signed(), "no signature is by this secret"),
        (BODY, signed(secret="whsec_" + b64encode(b"another").decode()), "no signature is by this secret"),
        (BODY, {**signed(), "Webhook-Id": "msg_2"}, "no signature is by this secret"),
        (BODY, signed(ago=40_000), "signed more than 300 s ago"),
        (BODY, signed(ago=-40_000), "signed more than 300 s ago or ahead"),
        (BODY, {"Webhook-Id": "msg_1"}, "header 'webhook-timestamp' is missing"),
        (BODY, {**signed(), "Webhook-Signature": "v2,é"}, "no signature"),
    ],
)
def test_any_other_message_is_refused(body: str, headers: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSignature, match=said):
        verify_webhook(body, headers, SECRET)


def test_webhooks_are_made_listed_changed_tested_and_deleted(client: Client) -> None:
    made = client.webhooks.create(URL, events=["job.failed"])
    assert (made.url, made.status, made.events, made.secret[:6]) == (URL, "active", ("job.failed",), "whsec_")
    assert made.secret not in repr(made)
    (listed,) = client.webhooks.list()
    assert listed == client.webhooks.update(made.id)
    assert client.webhooks.update(made.id, enabled=False).status == "disabled"
    changed = client.webhooks.update(made.id, url=f"{URL}/2", events=["job.completed"], enabled=True)
    assert (changed.url, changed.status, changed.events) == (f"{URL}/2", "active", ("job.completed",))
    sent = client.webhooks.test(made.id)
    assert (sent.type, sent.job_id, sent.status) == ("webhook.test", "", "waiting")
    assert [each.id for each in client.webhooks.deliveries(made.id)] == [sent.id]
    client.webhooks.delete(made.id)
    assert client.webhooks.list() == []
    for call in (client.webhooks.delete, client.webhooks.update, client.webhooks.test):
        with pytest.raises(NotFound):
            call(made.id)
    with pytest.raises(InvalidRequest, match="events"):
        client.webhooks.create(URL, events=["job.paused"])


async def test_the_async_client_does_the_same(live: Live, key: str) -> None:
    async with AsyncClient(live.base_url, key, interface="b") as client:
        made = await client.webhooks.create(URL)
        assert [each.id for each in await client.webhooks.list()] == [made.id]
        assert await client.webhooks.deliveries(made.id) == []
        await client.webhooks.delete(made.id)
