"""Moderation is asked before acceptance and before storage, and fails as the setting says."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.accounts import BUILTIN_PLANS, Caller
from serve_app.domain.errors import FailureCode, InvalidParameter, StoreUnavailable
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import GenerationDraft, LoraUse, Variant
from serve_app.jobs.moderation import BadModeration, Moderation
from serve_app.settings import Settings
from tests.composition import Resources, open_resources
from tests.made_jobs import accept, failure_of
from tests.support import adapter_id, free_port
from tests.worker.scripted_executor import ScriptedExecutor, until, working

PROMPT = "a boat on a lake of glass"
DRAFT = GenerationDraft(
    prompt=PROMPT, negative_prompt="rain", loras=(LoraUse(adapter_id("outline")),), seed=1, interface=Variant.A
)
ALLOWED, REFUSED = b'{"allowed": true}', b'{"allowed": false, "reason": "too   plain"}'
GARBAGE = (
    b"",
    b"no",
    b"[]",
    b"{}",
    b'{"allowed": 1}',
    b'{"allowed": "true"}',
    b'{"allowed": true, "reason": 7}',
    b'{"allowed": true, "reason": "' + b"x" * 70_000 + b'"}',
)


@dataclass
class Service:
    """A real HTTP server of one answer, which remembers the questions; an answer of None never comes."""

    answer: bytes | None
    status: int = 200
    questions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        self.questions.append(json.loads(await reader.readexactly(length)))
        if self.answer is None:
            await reader.read()  # until the caller gives up
        else:
            start = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.answer)}\r\nConnection: close\r\n\r\n"
            writer.write(start.encode() + self.answer)
        writer.close()


@asynccontextmanager
async def moderated(settings: Settings, service: Service | None = None, **changes: Any) -> AsyncGenerator[Resources]:
    """Stores whose moderation is the service; without one, a port at which nobody listens."""
    if service is None:
        changes = {"moderation_url": f"http://127.0.0.1:{free_port()}/", **changes}
        async with open_resources(settings.model_copy(update=changes)) as resources:
            yield resources
        return
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/check"
    async with open_resources(settings.model_copy(update={"moderation_url": url, **changes})) as resources:
        yield resources
    server.close()


def caller(variant: Variant = Variant.A) -> Caller:
    plan = next(plan for plan in BUILTIN_PLANS if plan.variant is variant)
    return Caller(account_id="acct_a", account_name="a", key_id="key_a", variant=variant, plan=plan)


def stored(resources: Resources) -> list[Path]:
    return list((resources.settings.data_dir / "images").rglob("*.png"))


async def test_without_moderation_nothing_is_asked(resources: Resources) -> None:
    assert (await resources.submission.submit(caller(), DRAFT)).job.state is JobState.QUEUED


@pytest.mark.parametrize(("variant", "name"), [(Variant.A, "prompt"), (Variant.B, "positive_prompt")])
async def test_a_refused_prompt_is_not_accepted(
    settings: Settings, resources: Resources, caplog: pytest.LogCaptureFixture, variant: Variant, name: str
) -> None:
    service = Service(REFUSED)
    async with moderated(settings, service) as moderated_resources:
        with pytest.raises(InvalidParameter, match=rf"^{name}: refused by this service's moderation: too plain$"):
            await moderated_resources.submission.submit(caller(variant), replace(DRAFT, interface=variant))
    [question] = service.questions
    job_id = question.pop("job")
    assert job_id.startswith("gen_")
    assert question == {"stage": "prompt", "account": "acct_a", "prompt": PROMPT, "negative_prompt": "rain"}
    assert await resources.jobs.find(job_id) is None
    assert PROMPT not in caplog.text


async def test_an_allowed_prompt_is_accepted_under_the_id_that_was_asked_about(
    settings: Settings, resources: Resources
) -> None:
    service = Service(ALLOWED)
    async with moderated(settings, service) as moderated_resources:
        accepted = await moderated_resources.submission.submit(caller(), DRAFT)
    assert service.questions[0]["job"] == accepted.job.id


FAILURES = [
    pytest.param(None, id="dead"),
    pytest.param(Service(None), id="slow"),
    pytest.param(Service(ALLOWED, status=500), id="an error"),
    *(pytest.param(Service(text), id=f"garbage {text[:30]!r}") for text in GARBAGE),
]


@pytest.mark.parametrize("service", FAILURES)
@pytest.mark.parametrize("fails", ["closed", "open"])
async def test_without_an_answer_the_setting_decides(
    settings: Settings, resources: Resources, caplog: pytest.LogCaptureFixture, service: Service | None, fails: str
) -> None:
    limit = timedelta(seconds=0.3 if service and service.answer is None else 30)
    changes = {"moderation_timeout": limit, "moderation_fails": fails}
    async with moderated(settings, service, **changes) as moderated_resources:
        if fails == "open":
            assert await moderated_resources.submission.submit(caller(), DRAFT)
        else:
            with pytest.raises(StoreUnavailable):
                await moderated_resources.submission.submit(caller(), DRAFT)
    assert "moderation of job gen_" in caplog.text
    assert PROMPT not in caplog.text


async def test_a_refused_image_is_not_stored_and_its_job_fails(settings: Settings, resources: Resources) -> None:
    service = Service(REFUSED)
    async with moderated(settings, service) as moderated_resources:
        job_id = await accept(moderated_resources)
        async with working(moderated_resources, ScriptedExecutor()):
            await until(moderated_resources, job_id, JobState.FAILED)
        assert stored(moderated_resources) == []
    failure = await failure_of(resources, job_id)
    assert (failure.code, "moderation" in failure.message) == (FailureCode.GENERATION_FAILED, True)
    [question] = service.questions
    assert (question["stage"], question["job"]) == ("image", job_id)
    assert base64.b64decode(question["image"]).startswith(b"\x89PNG")


async def test_an_allowed_image_is_stored(settings: Settings, resources: Resources) -> None:
    async with moderated(settings, Service(ALLOWED)) as moderated_resources:
        job_id = await accept(moderated_resources)
        async with working(moderated_resources, ScriptedExecutor()):
            await until(moderated_resources, job_id, JobState.COMPLETED)
        assert len(stored(moderated_resources)) == 1


@pytest.mark.parametrize(("fails", "state"), [("closed", JobState.FAILED), ("open", JobState.COMPLETED)])
async def test_an_image_that_could_not_be_checked_is_tried_again_or_let_through(
    settings: Settings, resources: Resources, fails: str, state: JobState
) -> None:
    async with moderated(settings, moderation_fails=fails, max_attempts=1) as moderated_resources:
        job_id = await accept(moderated_resources)
        async with working(moderated_resources, ScriptedExecutor()):
            await until(moderated_resources, job_id, state)
        assert len(stored(moderated_resources)) == (state is JobState.COMPLETED)


@pytest.mark.parametrize("fails", ["closed", "open"])
async def test_a_function_is_asked_in_place_of_a_service(
    settings: Settings, resources: Resources, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def moderation(name: str) -> Moderation:
        changes = {"moderation_callable": f"tests.jobs.moderators:{name}", "moderation_fails": fails}
        return Moderation(settings.model_copy(update=changes))

    prompt = {"account_id": "acct_a", "job_id": "gen_x", "prompt": PROMPT, "negative_prompt": ""}
    assert await moderation("refuses_boats").prompt(**prompt) == (False, "no boats")
    assert (await moderation("refuses_images").prompt(**prompt)).allowed
    assert await moderation("refuses_images").image(account_id="a", job_id="b", content=b"png") == (False, "no images")
    if fails == "open":
        assert (await moderation("breaks").prompt(**prompt)).allowed
    else:
        with pytest.raises(StoreUnavailable):
            await moderation("breaks").prompt(**prompt)
    assert PROMPT not in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"moderation_callable": "no.such.module:check"},
        {"moderation_callable": "tests.jobs.moderators:nothing"},
        {"moderation_callable": "json:__name__"},
        {"moderation_callable": ":"},
        {"moderation_url": "http://moderation.example", "moderation_callable": "json:dumps"},
    ],
    ids=str,
)
def test_a_moderation_that_cannot_be_used_stops_by_name(settings: Settings, changes: dict[str, str]) -> None:
    with pytest.raises(BadModeration, match="ATELIER_MODERATION_"):
        Moderation(settings.model_copy(update=changes))
