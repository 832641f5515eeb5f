"""Pictures in one call, many by `map`, followed by events, and shown in a terminal and a notebook."""

import asyncio
import os
from base64 import b64encode
from pathlib import Path
from typing import Any, Literal

import httpx
import nbformat
import pytest
import redis
from nbclient import NotebookClient
from PIL import Image as PilImage

from serve_app.api.jobs import events as job_events
from serve_app.client import (
    AsyncClient,
    Client,
    Forbidden,
    InvalidRequest,
    JobFailed,
    Unauthorized,
    UnknownLora,
    Unreachable,
    WaitTimeout,
)
from serve_app.client import Preview as SentPreview
from serve_app.client.upload import upload_progress
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Failure, JobKind
from serve_app.jobs.previews import Preview
from serve_app.jobs.queue import new_nonce
from serve_app.settings import Settings
from tests.client.conftest import LORA, PROMPT, CutTransport, RecordingTransport, terminal, with_plan
from tests.live import Live, live_service
from tests.support import ROOT, adapter_id, adapter_of, wait_until


def test_one_call_draws_with_a_lora_by_its_name(client: Client, tmp_path: Path) -> None:
    job = client.generate(PROMPT, loras={"NEON": 0.8}, seed=7, num_images=2)
    assert [(image.seed, image.caption) for image in job.images] == [(7, "seed 7"), (8, "seed 8")]
    assert (job.request["loras"][0]["id"], job.request["loras"][0]["weight"]) == (LORA, 0.8)
    assert {**job.timings, "queue": 0} == {"queue": 0, "load": 0.1, "denoise": 0.3, "store": 0.1}
    assert job.unread_characters == {"prompt": 3, "negative_prompt": 0}
    file = job.images[1].save(tmp_path / "x.png")
    assert file.read_bytes() == job.images[1].download()
    assert client.generate("a red dragon", loras=LORA).unknown_words == ("dragon",)


@pytest.mark.parametrize(("output_format", "suffix"), [("png", ".png"), ("jpeg", ".jpg"), ("webp", ".webp")])
async def test_a_file_is_named_and_shown_as_what_it_is(
    live: Live,
    key: str,
    output_format: Literal["png", "jpeg", "webp"],
    suffix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    media_type = f"image/{output_format}"
    with Client(live.base_url, key) as client:
        job = client.generate(PROMPT, output_format=output_format)
        (image,) = job.images
        assert image.save() == Path(f"{image.image_id}{suffix}")
        with PilImage.open(image.save()) as picture:
            assert (picture.format, image.pil().format) == (output_format.upper(),) * 2
        other, name = ("jpg", "jpeg") if output_format != "jpeg" else ("webp", "webp")
        for file in (f"x.{other}", f"x.{other.upper()}", "x.gif"):
            with pytest.raises(
                ValueError, match=rf"the image is {output_format.upper()}: save it as x{suffix}"
            ) as said:
                image.save(file)
            assert (f"output_format='{name}'" in str(said.value)) == ("gif" not in file)
        assert image.save(f"x{suffix}").read_bytes() == image.save("no image's name.final").read_bytes()
        shown = {media_type: b64encode(image.download()).decode()}
        assert image._repr_mimebundle_() == shown  # pyright: ignore[reportPrivateUsage]
        assert f"data:{media_type};base64,{shown[media_type]}" in (job._repr_html_() or "")  # pyright: ignore[reportPrivateUsage]
    async with AsyncClient(live.base_url, key) as client:
        (image,) = (await client.run(job.id)).images
        os.remove(name := f"{image.image_id}{suffix}")
        assert await image.save() == Path(name)
        assert name in os.listdir()


def test_several_loras_one_or_none_are_drawn_with(client: Client) -> None:
    def drawn(loras: Any = None, **options: Any) -> list[tuple[str, float]]:
        job = client.generate(PROMPT, loras=loras, wait=False, **options)
        return [(lora["id"], lora["weight"]) for lora in job.request["loras"]]

    outline = adapter_id("outline")
    assert drawn({"neon": 0.8, outline: 0.4}) == [(LORA, 0.8), (outline, 0.4)]
    assert drawn() == drawn({}) == []
    assert drawn("neon", lora_weight=0.3) == drawn(lora_id=LORA, lora_weight=0.3) == [(LORA, 0.3)]
    assert drawn("neon") == [(LORA, 0.75)]
    for loras in ({"neon": 0.8}, None):
        with pytest.raises(TypeError, match="lora_weight: is for one LoRA"):
            drawn(loras, lora_weight=0.3)
    with pytest.raises(InvalidRequest, match="loras"):
        drawn(lora_id="")
    with pytest.raises(InvalidRequest, match=r"loras: .*4"):
        drawn(dict.fromkeys(("neon", "outline", "stripes", "mosaic", "sepia"), 0.2))


async def test_the_async_client_does_the_same(live: Live, key: str) -> None:
    async with AsyncClient(live.base_url, key) as client:
        job = await client.generate(PROMPT, loras="neon", seed=7)
        (image,) = job.images
        assert (await image.upscale()).width == 1024
        assert httpx.URL(image.url).path in (job._repr_html_() or "")  # pyright: ignore[reportPrivateUsage]
        assert image._repr_html_().endswith("seed 7</figcaption></figure></div>")  # pyright: ignore[reportPrivateUsage]
        assert [event.status async for event in job.events()] == ["completed"]


def test_a_started_job_is_returned_at_once_when_wanted(live: Live, client: Client) -> None:
    live.outcome = "leave"
    assert not client.generate(PROMPT, loras="neon", wait=False).done
    live.outcome = "complete"
    assert client.generate(PROMPT, lora_id=LORA, wait=True).done


def test_steps_and_guidance_are_those_that_the_lora_wants_unless_they_are_given(live: Live) -> None:
    """The service fills them in, so that a LoRA given by its id has them too."""
    account, key = live.member()
    quick = adapter_of(account.id, name="Quick", steps=8, guidance=1.5)
    live.run(live.resources.adapter_registry.register(quick))

    def drawn(client: Client, name: str, **options: Any) -> tuple[int, float]:
        request = client.generate(PROMPT, loras=name, wait=False, **options).request
        return request["steps"], request["guidance_scale"]

    with Client(live.base_url, key) as client, Client(live.base_url, key, interface="b") as of_b:
        found = client.loras.find("quick")
        assert (found.recommended_steps, found.recommended_guidance) == (8, 1.5)
        assert client.loras.find("neon").recommended_steps is None
        assert drawn(client, "quick", guidance_scale=None) == drawn(of_b, quick.id) == (8, 1.5)
        assert drawn(client, "quick", steps=25, guidance_scale=2.0) == (25, 2.0)
        assert drawn(client, "neon") == (30, 7.5)


def test_a_name_is_looked_up_once_and_an_id_never(live: Live, key: str) -> None:
    transport = RecordingTransport()
    with Client(live.base_url, key, transport=transport) as client:
        client.generate(PROMPT, loras=LORA, wait=False)
        assert [request.method for request in transport.requests] == ["POST"]
        for _ in range(2):
            client.generate(PROMPT, loras="Neon", wait=False)
    assert [request.url.path for request in transport.requests[1:]] == ["/v1/loras", "/v1/jobs", "/v1/jobs"]


def test_a_name_that_another_lora_has_now_is_looked_up_again(live: Live) -> None:
    account, key = live.member()
    old, new = (adapter_of(account.id, name="Ink", file=name) for name in ("old", "new"))
    live.run(live.resources.adapter_registry.register(old))
    with Client(live.base_url, key) as client:
        assert client.generate(PROMPT, loras="ink").request["loras"][0]["id"] == old.id
        client.loras.delete(old.id)
        live.run(live.resources.adapter_registry.register(new))
        with pytest.raises(Forbidden):
            client.generate(PROMPT, loras="ink")
        assert client.generate(PROMPT, loras="ink").request["loras"][0]["id"] == new.id


def test_a_lora_that_cannot_be_meant_is_refused_before_a_job_is_made(live: Live) -> None:
    account, key = live.member()
    twins = [adapter_of(account.id, name="Ink", file=name) for name in ("one", "two")]
    for twin in twins:
        live.run(live.resources.adapter_registry.register(twin))
    with Client(live.base_url, key) as client:
        with pytest.raises(UnknownLora, match=r"no LoRA 'neno' .*available: .*Neon, Outline"):
            client.generate(PROMPT, loras="neno")
        with pytest.raises(UnknownLora, match=rf"2 LoRAs are called 'ink'.*{twins[0].id}"):
            client.generate(PROMPT, loras={"ink": 1})
        with pytest.raises(TypeError, match="guidence_scale"):
            client.generate(PROMPT, loras="neno", guidence_scale=None)  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError, match=r"a name, or \{name: weight\}, not \['neon'\]"):
            client.generate(PROMPT, loras=["neon"])  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="either loras or lora_id"):
            client.generate(PROMPT, loras="neon", lora_id=LORA)
        assert client.jobs() == []


def test_an_image_is_enlarged_by_itself(client: Client) -> None:
    image = client.generate(PROMPT, loras="neon").images[0]
    larger = image.upscale(4)
    assert (larger.width, larger.height, larger.seed, larger.caption) == (2048, 2048, None, "2048 × 2048")
    assert larger.download() != image.download()


def test_a_notebook_shows_pictures_with_their_seeds_and_escapes_the_prompt(client: Client) -> None:
    job = client.generate("<script>", loras="neon", seed=7, num_images=2)
    page = job._repr_html_() or ""  # pyright: ignore[reportPrivateUsage]
    assert page.count("data:image/png;base64,") == 2
    assert all(words in page for words in ("seed 7<", "seed 8<", "&lt;script&gt;"))
    assert "<script>" not in page
    many: Any = client.map("a boat", loras="neon", seeds=range(5), num_images=4)
    page = many._repr_html_()
    assert page.count("<img ") == 20
    assert "data:" not in page, "so many pictures are linked to"


def test_many_are_drawn_in_order_with_one_lora_for_all_or_each(client: Client) -> None:
    jobs = client.map(["a boat", "a flower"], loras="neon", seeds=[5, 9])
    assert [(job.request["prompt"], job.images[0].seed) for job in jobs] == [("a boat", 5), ("a flower", 9)]
    jobs = client.map("a boat", loras=[{"neon": 0.5}, "outline"], seed=3, steps=20)
    assert [job.request["loras"][0]["id"] for job in jobs] == [LORA, adapter_id("outline")]
    assert [(job.request["loras"][0]["weight"], job.images[0].seed) for job in jobs] == [(0.5, 3), (0.75, 3)]
    (job,) = client.map("a boat", loras={"neon": 0.5, "outline": 0.5})
    assert len(job.request["loras"]) == 2
    assert client.map([], loras="neon") == []
    with pytest.raises(ValueError, match="3 prompts, 2 seeds: give lists of one length"):
        client.map(["a boat"] * 3, loras="neon", seeds=[1, 2])


def test_a_failed_one_of_many_says_why_and_a_refused_one_stands_in_its_place(live: Live, client: Client) -> None:
    jobs = client.map(["", "a boat", "", "a flower"], loras="neon", concurrency=1)
    assert [job.status for job in jobs] == ["failed", "completed", "failed", "completed"]
    assert [job.request["prompt"] for job in jobs] == ["", "a boat", "", "a flower"]
    assert [job.error.split(":")[0] for job in jobs] == ["prompt", "", "prompt", ""]
    assert (jobs[2].id, jobs[2].images, jobs[2].done) == ("", [], True)
    with pytest.raises(JobFailed, match="no job was started: prompt: "):
        jobs[2].wait()
    assert len(client.jobs()) == 2
    live.outcome = "fail"
    (job,) = client.map("a boat", loras="neon")
    assert (job.status, job.error, job.images) == ("failed", "the brush broke", [])
    with pytest.raises(JobFailed, match="the brush broke"):
        job.wait()


def test_a_wrong_name_key_or_option_of_many_is_found_before_any_is_started(live: Live, client: Client) -> None:
    with pytest.raises(UnknownLora, match="noen"):
        client.map("a boat", loras=["neon", "noen"])
    with pytest.raises(TypeError, match="lora_weight"):
        client.map("a boat", loras=["neon", {"neon": 1}], lora_weight=0.5)
    with Client(live.base_url, "wrong") as stranger, pytest.raises(Unauthorized):
        stranger.map(["a boat", "a flower"], loras=LORA)
    with (
        Client(live.base_url, "k", retry_budget=0, transport=CutTransport(requests=0)) as cut,
        pytest.raises(Unreachable),
    ):
        cut.map("a boat", loras=LORA)
    assert client.jobs() == []


@pytest.mark.parametrize("concurrency", [1, 2, 32])
def test_jobs_started_before_a_lost_connection_come_back_with_their_ids(live: Live, key: str, concurrency: int) -> None:
    transport = CutTransport(requests=2)
    with Client(live.base_url, key, retry_budget=0, transport=transport) as client:
        live.outcome = "leave"
        jobs = client.map(["", "a boat", "a flower"], loras=LORA, concurrency=concurrency)
        assert [(bool(job.id), job.done) for job in jobs] == [(False, True), (True, False), (False, True)]
        assert "no answer from" in jobs[2].error
        live.outcome = "complete"
        live.run(live.hint(JobKind.GENERATION, ""))
        transport.left = 1000
        assert jobs[1].wait().images


@pytest.mark.parametrize("most", ["asked for", "the service's"])
async def test_no_more_jobs_are_open_than_were_asked_for_or_the_service_takes(
    settings: Settings, redis_db: redis.Redis, most: str
) -> None:
    queued = 2 if most == "the service's" else 1000
    with live_service(settings.model_copy(update={"max_queued_per_account": queued})) as live:
        live.outcome = "leave"
        account, key = live.member()
        async with AsyncClient(live.base_url, key, retry_budget=0) as client:
            concurrency = 2 if most == "asked for" else 32
            drawing = asyncio.create_task(client.map("a boat", loras="neon", seeds=range(5), concurrency=concurrency))
            await wait_until(lambda: live.resources.waits.count == 1)
            assert len(live.run(live.resources.job_history.list(account.id))) == 2
            live.outcome = "complete"
            await asyncio.to_thread(live.run, live.hint(JobKind.GENERATION, ""))
            async with asyncio.timeout(4.5):  # the service says to ask again in 5 s, but an ended job makes room
                assert [job.images[0].seed for job in await drawing] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_the_plans_next_window_is_waited_for_without_asking_meanwhile(
    settings: Settings, redis_db: redis.Redis, tmp_path: Path
) -> None:
    with live_service(with_plan(settings, tmp_path, limit=3, window_s=2)) as live:
        _, key = live.member(plan_a="tiny")
        transport = RecordingTransport()
        with Client(live.base_url, key, retry_budget=0, transport=transport) as client:
            jobs = client.map("a boat", loras=LORA, seeds=range(7))
        assert [job.images[0].seed for job in jobs] == [*range(7)]
        posts = [request for request in transport.requests if request.method == "POST"]
        assert len(posts) == 7 + 2, "one try too many in each of the first two windows"


def test_events_tell_each_change_and_end_with_the_job(
    live: Live, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_events, "HEARTBEAT_S", 0.1)  # no silence is as long as the shorter of the two timeouts
    live.outcome = "leave"
    job = client.generate(f"{PROMPT},\u2028by night\x85or by day", lora_id=LORA)  # httpx ends lines at these too
    events = job.events(timeout=20)
    assert (next(events).progress, job.status) == (0, "queued")
    (claim,) = live.run(claims(live))
    live.run(live.resources.queue.heartbeat(claim.lease, progress=40))
    event = next(events)
    assert (event.status, event.progress) == ("running", 40)
    assert event.estimated_completion_time is not None
    previews = live.resources.previews
    live.run(previews.put(job.id, {1: Preview(3, b"PNG")}))
    assert next(events).preview == SentPreview(1, 3, b"PNG")
    with pytest.raises(WaitTimeout):
        list(job.events(timeout=0.3))
    with live.ingress_down():
        live.run(previews.put(job.id, {1: Preview(4, b"next")}))
    assert next(events).preview == SentPreview(1, 4, b"next"), "neither lost nor repeated"
    failure = Failure(code=FailureCode.GENERATION_FAILED, message="the brush broke")
    live.run(live.resources.queue.fail(claim.lease, failure, retry=False))
    assert [event.status for event in events] == ["failed"]


async def claims(live: Live) -> list[Claim]:
    return list(await live.resources.queue.claim("live", pool=JobKind.GENERATION, nonce=new_nonce(), limit=1))


def test_a_terminal_shows_a_bar_and_a_log_none(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal() as shown:
        client.generate("a boat\nin the morning, with a long sail over still water", loras="neon")
        written = shown()
        assert "\r\x1b[2KDrawing a boat in the morning, w ────" in written
        assert written.endswith("\r\x1b[2K"), "the bar's line is erased"
        client.map("a boat", loras="neon", seeds=[1, 2])
        assert "Drawing 2 jobs ━━━━━━━━━━━━━━────────────── 50 %, " in shown()
        client.generate("a boat", loras="neon", progress=False)
        assert shown() == ""
    client.generate("a boat", loras="neon")
    assert capsys.readouterr().err == ""


def test_the_bar_of_an_upload_ends_with_the_check_and_leaves_nothing_behind() -> None:
    with terminal() as shown, upload_progress("ink [bold]", None, shows_bar=True) as on_progress:
        assert on_progress is not None
        on_progress(1, 2)
        on_progress(2, 2)
        written = shown()
    assert "Uploading ink [bold] ━━━━━━━━━━━━━━────────────── 50 %, 0 s left" in written
    assert "Checking ink [bold] ━" in written


@pytest.mark.slow
def test_a_notebook_shows_a_bar_and_then_the_pictures(live: Live, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_URL", live.base_url)
    monkeypatch.setenv("ATELIER_KEY", key)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    drawn = "from serve_app.client import Client\njob = Client().generate('a boat', loras='neon', seed=7)"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (drawn, "job", "job.images[0]")]
    )
    NotebookClient(notebook, timeout=60).execute()
    bar, grid, picture = (cell.outputs for cell in notebook.cells)
    assert [output.data["text/plain"] for output in bar] == [""], "the bar came, and is gone"
    assert "seed 7" in grid[0].data["text/html"]
    assert picture[0].data["image/png"]
