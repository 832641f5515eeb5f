"""The whole service, started by one command: both interfaces, kills, a restart."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from deployments.runtime import runtime_home
from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.canary import FOLDER
from serve_app.settings import Settings
from serve_app.store.embedded_redis import ensure_redis
from serve_app.store.storage import FINDINGS
from tests.attack.raw import breach, exchange
from tests.composition import open_resources
from tests.deployments.service import STOP_LIMIT_S, Event, Service
from tests.processes import descendants, is_alive

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.timeout(400)]

USUAL = {"GET /healthz": 200, "POST /v1/generate": 401}
"""What these requests are answered without a key."""
SERVED_S = 3.0
"""An ingress that has answered as usual for this long serves again."""


def body(service: Service, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a red circle above a blue square", "lora_id": service.lora_id, "steps": 20, **fields}


def is_denoising(record: dict[str, Any]) -> bool:
    return record["status"] == "processing" and record["progress"] > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="pasting a curl line takes curl")
def test_the_printed_curl_lines_work_when_pasted(service: Service) -> None:
    generate_a, poll_a, generate_b, poll_b = re.findall(r"^curl .*$", service.output.read_text(), flags=re.MULTILINE)
    request_id, run_id = pasted(generate_a)["request_id"], pasted(generate_b)["run_id"]
    polls = [poll_a.replace("REQUEST_ID", request_id), poll_b.replace("RUN_ID", run_id)]
    for poll in polls:
        service.until(lambda poll=poll: pasted(poll)["status"] == "completed")
    urls = [pasted(polls[0])["images"][0]["url"], pasted(polls[1])["image_url"]]
    for url in urls:
        png = service.client.get(url).raise_for_status().content
        assert Image.open(BytesIO(png)).size == (512, 512)


def pasted(line: str) -> dict[str, Any]:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_the_same_request_twice_gives_the_same_bytes(service: Service) -> None:
    first, second = [service.post(body(service, seed=2**64 - 1)) for _ in range(2)]
    assert first != second
    assert service.pngs(service.result(first)) == service.pngs(service.result(second))


def test_four_images_equal_four_single_requests(service: Service) -> None:
    together = service.post(body(service, seed=-1, num_images=4))
    alone = [service.post(body(service, seed=-1 + index)) for index in range(4)]
    four = service.pngs(service.result(together))
    assert len(set(four)) == 4
    assert four == [png for request_id in alone for png in service.pngs(service.result(request_id))]


def test_an_upscale_follows_a_generation(service: Service) -> None:
    drawn = service.result(service.post(body(service)))
    image_id = drawn["images"][0]["image_id"]
    enlarged = service.result(service.post({"image_id": image_id, "scale_factor": 4}, path="/v1/upscale"))
    (png,) = service.pngs(enlarged)
    assert Image.open(BytesIO(png)).size == (2048, 2048)


async def test_an_operator_has_the_machines_compared_from_the_browser(service: Service) -> None:
    url = ensure_redis(service.data_dir).url
    async with open_resources(Settings(data_dir=service.data_dir, redis_url=url)) as resources:
        await resources.operators.create("alice")
        link = f"/operators/links/{await resources.operator_links.create('alice', LinkPurpose.SIGN_IN)}"
    origin = {"Sec-Fetch-Site": "same-origin"}
    async with httpx.AsyncClient(base_url=service.client.base_url, headers=origin, timeout=90) as browser:
        for path in (link, "/operators/checks"):
            page = await browser.get(path)
            token = page.text.rpartition('name="form_token" value="')[2].partition('"')[0]
            page = await browser.post(path, data={"form_token": token})
    assert "the same on 1 node" in page.text


def test_no_request_writes_a_line_of_an_access_log(service: Service) -> None:
    """Serve's own access log was a quarter of the handler's time."""
    assert service.client.get("/v1/models", headers={"X-API-Key": service.ready["keys"]["both"]}).is_success
    logs = [path for path in runtime_home(service.data_dir).glob("ray/session_latest/logs/**/*") if path.is_file()]
    assert any("replica_atelier_ingress" in path.name for path in logs), "Serve's log of the ingress is among them"
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
    assert [line for line in lines if re.search(r"(GET|POST) /\S* \d{3}|CALL /?\S+ OK", line)] == []


def test_a_killed_generator_costs_a_job_no_more_than_time(service: Service) -> None:
    request_id = service.post(body(service, steps=50, seed=3))
    events = service.events(request_id)
    preview = next(event for event in events if event.name == "preview")
    assert preview.data["step"] >= 3
    assert Image.open(BytesIO(base64.b64decode(preview.data["image"]))).format == "PNG"
    service.kill("ServeReplica:atelier:generator")
    rest = list(events)
    assert {event.data["attempt"] for event in rest if event.name == "progress"} >= {2}
    assert (rest[-1].name, rest[-1].data["status"]) == ("end", "completed")
    again = service.post(body(service, steps=50, seed=3))
    assert service.pngs(service.result(request_id)) == service.pngs(service.result(again))
    found = {folder.name for folder in (service.data_dir / "images" / FINDINGS).iterdir()}
    assert len(found - {FOLDER}) == 1, "both replicas found the same circumstances"
    assert len([*(service.data_dir / "images" / FINDINGS / FOLDER).iterdir()]) == 1, "and drew the same at their start"


def test_a_killed_ingress_loses_no_accepted_job_and_callers_get_a_503_at_worst(service: Service) -> None:
    for line, usual in USUAL.items():  # and HAProxy has a connection to reuse
        assert [answer.status for answer in exchange(service.port, bare(service, line))] == [usual]
    request_id = service.post(body(service, steps=50))
    events = service.events(request_id)
    told = [next(event for event in events if event.name == "progress")]
    service.kill("ServeReplica:atelier:ingress")
    with ThreadPoolExecutor() as threads:
        faults = [threads.submit(faults_until_served, service, line, usual) for line, usual in USUAL.items()]
        with pytest.raises(httpx.TransportError):
            told.extend(events)  # which keeps what came before
    assert [found.result() for found in faults] == [[], []]
    rest: list[Event] = []

    def is_resumed() -> bool:
        with suppress(httpx.HTTPError):
            rest[:] = service.events(request_id, told[-1].id)
        return bool(rest)

    service.until(is_resumed)
    assert "snapshot" not in [event.name for event in rest]
    assert (rest[-1].name, rest[-1].data["status"]) == ("end", "completed")
    assert len(service.pngs(service.result(request_id))) == 1
    errors = 'atelier_proxy_errors_total{status="5xx"}'
    service.until(lambda: metric(service, errors) > 0, why=lambda: "what HAProxy answered meanwhile is not counted")


def bare(service: Service, line: str) -> bytes:
    """Return a request without a body or a key."""
    headers = f"Host: 127.0.0.1:{service.port}\r\nContent-Length: 0\r\nConnection: close"
    return f"{line} HTTP/1.1\r\n{headers}\r\n\r\n".encode()


def faults_until_served(service: Service, line: str, usual: int) -> list[str]:
    """Ask until the answer has been the usual one for a while; return what broke the contract."""
    faults: list[str] = []
    served_since, deadline = None, time.monotonic() + 60
    while served_since is None or time.monotonic() - served_since < SERVED_S:
        assert time.monotonic() < deadline, "no ingress serves"
        answers = exchange(service.port, bare(service, line), timeout=30)
        faults += [fault for answer in answers if (fault := breach(answer))] if answers else ["no answer"]
        is_served = [answer.status for answer in answers] == [usual]
        served_since = (served_since or time.monotonic()) if is_served else None
    return faults


def test_a_killed_redis_is_back_and_the_job_completes(service: Service) -> None:
    request_id = service.post(body(service, steps=30))
    service.wait(request_id, is_denoising)
    before = ensure_redis(service.data_dir).pid
    os.kill(before, signal.SIGKILL)
    assert len(service.pngs(service.result(request_id))) == 1
    assert ensure_redis(service.data_dir).pid != before


def test_a_restart_keeps_everything_and_goes_on(service: Service) -> None:
    keys = service.ready["keys"]
    finished = service.result(service.post(body(service, seed=1)))
    pngs = service.pngs(finished)
    counts = (4, 4, 1)  # the last waits: a generator draws eight at once
    waiting = {service.post(body(service, num_images=count, seed=seed)): count for seed, count in enumerate(counts)}
    service.wait(next(iter(waiting)), is_denoising)
    images: dict[str, Any] = {
        "url": "/openai/v1/images/generations",
        "json": {"prompt": "a red circle", "response_format": "url"},
    }
    images |= {"headers": {**service.bearer, "Idempotency-Key": "over-a-restart"}, "timeout": 120}
    accepted, canceled = (f'atelier_jobs_total{{event="{event}"}}' for event in ("accepted", "canceled"))
    before, canceled_before = metric(service, accepted), metric(service, canceled)
    with httpx.Client(base_url=service.ready["base_url"]) as client, ThreadPoolExecutor() as threads:
        asked = threads.submit(client.post, **images)
        service.until(lambda: metric(service, accepted) > before or asked.done())
        code, seconds = service.stop()
        told = asked.result()
    assert (told.status_code, told.headers["retry-after"], told.json()["error"]["code"]) == (503, "5", "unavailable")
    assert code == 0
    assert seconds < STOP_LIMIT_S
    assert not service.processes

    service.start()
    assert service.ready["keys"] == keys
    assert "First image" not in service.output.read_text()
    assert service.pngs(service.record(finished["request_id"])) == pngs
    assert {request_id: len(service.pngs(service.result(request_id))) for request_id in waiting} == waiting
    assert len(service.client.post(**images).raise_for_status().json()["data"]) == 1
    assert metric(service, canceled) == canceled_before


def test_ray_that_dies_ends_the_service(dying: Service) -> None:
    """Nothing of Ray can be stopped in an orderly way then, and nothing of it is left nevertheless."""
    below = descendants(dying.pid)
    dying.kill("/gcs_server ")
    code, seconds = dying.wait_for_its_end()
    assert (code, seconds < STOP_LIMIT_S) == (1, True), dying.output.read_text()
    assert re.match(r"atelier: Ray has died \((gcs_server|raylet), exit code -?\d+\) \(logs: ", dying.complaint)
    assert not [below[pid] for pid in below if is_alive(pid)]
    assert not dying.processes


def metric(service: Service, series: str) -> float:
    """Return a number of `/metrics`."""
    headers = {"Authorization": f"Bearer {(service.data_dir / 'operator-token').read_text().strip()}"}
    rows = service.client.get("/metrics", headers=headers).raise_for_status().text.splitlines()
    return next(float(row.removeprefix(series)) for row in rows if row.startswith(f"{series} "))
