"""The account's jobs and usage, through both clients."""

from datetime import UTC, datetime, timedelta

import pytest

from serve_app.client import AsyncClient, Client, JobCanceled, NotFound
from serve_app.domain.requests import Variant
from tests.client.conftest import LORA
from tests.live import Live


def test_jobs_of_both_keys_are_listed_newest_first_over_pages(
    live: Live, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.client.lora_calls.PAGE", 2)
    with Client(live.base_url, key) as a, Client(live.base_url, key, interface="b") as b:
        ids = [
            client.generate(f"boat {n}", lora_id=LORA).wait(timeout=20).id for n, client in enumerate((a, b, a, b, a))
        ]
        assert [job.id for job in a.jobs()] == ids[::-1]
        newest = b.jobs(limit=3)
    assert [job.id for job in newest] == ids[:1:-1]
    assert [(job.status, job.progress, job.request["prompt"]) for job in newest] == [
        ("completed", 100, "boat 4"),
        ("completed", 100, "boat 3"),
        ("completed", 100, "boat 2"),
    ]
    assert newest[1].completed_at is not None


def test_a_key_of_one_interface_lists_and_polls_the_jobs_of_both(live: Live) -> None:
    account, key = live.member()
    _, only_b = live.run(live.resources.api_keys.create(account.id, interfaces=frozenset({Variant.B})))
    with Client(live.base_url, key) as a, Client(live.base_url, only_b, interface="b") as b:
        for maker, reader in ((a, b), (b, a)):
            made = maker.generate("a boat", lora_id=LORA)
            listed = reader.jobs()[0].wait(timeout=20)
            assert listed.images[0].image_id == made.wait(timeout=20).images[0].image_id
            assert listed.images[0].download() == made.images[0].download()
            assert listed.refresh().status == "completed"
            assert listed.request["prompt"] == made.request["prompt"] == "a boat"


def test_a_job_is_canceled_by_itself_and_by_its_id(live: Live, key: str) -> None:
    live.outcome = "leave"
    with Client(live.base_url, key, interface="b") as client:
        first, second = (client.generate("a boat", lora_id=LORA) for _ in range(2))
        assert first.cancel().status == "canceled"
        assert client.cancel(second.id).done
        for job in (first, client.run(second.id)):
            with pytest.raises(JobCanceled):
                job.wait(timeout=20)
            assert (job.status, job.error_code) == ("canceled", "canceled")
        assert first.cancel().done, "once more changes nothing"
        with pytest.raises(NotFound):
            client.cancel("gen_" + "a" * 26)


async def test_the_async_client_does_the_same(live: Live, key: str) -> None:
    async with AsyncClient(live.base_url, key) as client:
        job = await (await client.generate("a boat", lora_id=LORA, num_images=2)).wait(timeout=20)
        await client.delete_image(job.id, job.images[0].image_id)
        (listed,) = await client.jobs()
        assert len(listed.images) == 1
        (row,) = await client.usage(days=2)
        assert (row.lora_id, row.images, row.key_id[:4]) == (LORA, 2, "key_")
        assert datetime.now(UTC).date() - row.day < timedelta(days=2)
        live.outcome = "leave"
        waiting = await client.generate("a boat", lora_id=LORA)
        assert (await waiting.cancel()).done
        assert (await client.cancel(waiting.id)).id == waiting.id
