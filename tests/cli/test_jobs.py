"""`atelier jobs`: list, show, cancel, requeue, delete."""

import pytest

from tests.cli.conftest import Atelier
from tests.composition import Resources
from tests.made_jobs import accept, claim, fail_all, finish

PROMPT = "a lighthouse that nobody else may read"


@pytest.mark.slow
def test_jobs_are_listed_by_state_and_by_account(atelier: Atelier) -> None:
    first, second = _job(atelier, "acme"), _job(atelier, "zeta")
    assert _ids(atelier.json("jobs", "list")) == [second, first]
    assert _ids(atelier.json("jobs", "list", "--account", "acme")) == [first]
    assert _ids(atelier.json("jobs", "list", "--state", "queued", "--limit", "1")) == [second]
    assert _ids(atelier.json("jobs", "list", "--state", "failed")) == []
    table = atelier("jobs", "list").out
    assert "acme" in table
    assert "2 x 512x768, 30 steps" in table


def test_a_job_is_shown_whole_and_its_prompt_only_in_json(atelier: Atelier) -> None:
    job_id = _job(atelier, "acme")
    shown = atelier.json("jobs", "show", job_id)
    assert (shown["state"], shown["interface"], shown["progress"]) == ("queued", "a", 0)
    assert shown["request"]["prompt"] == PROMPT
    assert shown["request"]["seeds"] == [7, 8]
    for human in (atelier("jobs", "show", job_id).out, atelier("jobs", "list").out):
        assert job_id in human
        assert PROMPT not in human
        assert ("acme" in human, shown["account"] in human) == (True, False)


@pytest.mark.slow
def test_a_waiting_job_is_canceled_at_once(atelier: Atelier) -> None:
    job_id = _job(atelier, "acme")
    assert atelier.json("jobs", "cancel", job_id) == {"id": job_id, "state": "canceled"}
    again = atelier("jobs", "cancel", job_id)
    assert (again.code, again.out.strip()) == (0, f"{job_id}: canceled")
    assert atelier.json("jobs", "show", job_id)["state"] == "canceled"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "state", "recorded"), [("requeue", "queued", "job_requeued"), ("drop", "failed", "job_dropped")]
)
def test_a_dead_job_is_queued_again_or_dropped(atelier: Atelier, act: str, state: str, recorded: str) -> None:
    job_id = _job(atelier, "acme")
    assert atelier("jobs", act, job_id).code == 1, "it is waiting, not dead"
    atelier.stores(fail_all)
    assert _ids(atelier.json("jobs", "dead")) == [job_id]
    assert "the brush broke" in atelier("jobs", "dead").out
    assert atelier("jobs", act, job_id).code == 0
    assert atelier.json("jobs", "show", job_id)["state"] == state
    assert _ids(atelier.json("jobs", "dead")) == []
    assert [row["act"] for row in atelier.json("audit", "--account", "acme")["rows"]] == [recorded]


def _job(atelier: Atelier, account_name: str) -> str:
    async def work(resources: Resources) -> str:
        account = await resources.accounts.get(account_name) or await resources.accounts.create(account_name)
        return await accept(resources, account.id, prompt=PROMPT, seeds=(7, 8), height=768)

    return atelier.stores(work)


def _ids(answer: dict[str, list[dict[str, str]]]) -> list[str]:
    return [job["id"] for job in answer["jobs"]]


@pytest.mark.slow
def test_a_job_is_deleted_once_it_has_ended(atelier: Atelier) -> None:
    job_id = _job(atelier, "acme")
    refused = atelier("jobs", "delete", job_id)
    assert refused.code == 1
    assert "cancel it first" in refused.err
    atelier("jobs", "cancel", job_id)
    assert atelier.json("jobs", "delete", job_id) == {"id": job_id, "deleted": True}
    for words in (("show", job_id), ("delete", job_id), ("cancel", job_id)):
        assert atelier("jobs", *words).code == 1
    [row] = [row for row in atelier.json("audit")["rows"] if row["act"] == "job_deleted"]
    assert row["subject"] == job_id


async def _complete(resources: Resources) -> list[str]:
    (claimed,) = await claim(resources)
    return [image.image_id for image in await finish(resources, claimed)]


@pytest.mark.slow
def test_one_image_of_a_job_is_deleted_and_with_the_last_one_the_job(atelier: Atelier) -> None:
    job_id = _job(atelier, "acme")
    first, last = atelier.stores(_complete)
    for refused in (("delete", job_id, "--image", "img_nothing"), ("delete", "gen_nothing", "--image", first)):
        assert atelier("jobs", *refused).code == 1
    deleted = {"id": job_id, "image_id": first, "deleted": True, "job_deleted": False}
    assert atelier.json("jobs", "delete", job_id, "--image", first) == deleted
    assert [image["image_id"] for image in atelier.json("jobs", "show", job_id)["images"]] == [last]
    assert f"with its last image {job_id}" in atelier("jobs", "delete", job_id, "--image", last).out
    assert atelier("jobs", "show", job_id).code == 1
    assert not list(atelier.settings.data_dir.glob("images/**/*.png"))
    rows = [row["subject"] for row in atelier.json("audit")["rows"] if row["act"] == "image_deleted"]
    assert rows == [first, last]
