"""The request's id goes with the job to its worker, and stands in what both log."""

import json

from serve_app.domain.jobs import JobState
from serve_app.domain.requests import Variant
from tests.api.app import BODY_A, client_of
from tests.composition import Resources
from tests.test_log import logging_to_stderr
from tests.worker.scripted_executor import ScriptedExecutor, until, working


async def test_the_lines_of_a_worker_name_the_request_that_asked(resources: Resources) -> None:
    account = await resources.accounts.create("acme")
    _, key = await resources.api_keys.create(account.id, interfaces=frozenset(Variant))
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "the-callers-own-id"}
    with logging_to_stderr("json") as stream:
        async with client_of(resources.app()) as client:
            answer = await client.post("/v1/generate", json=BODY_A, headers=headers)
        job_id = answer.json()["request_id"]
        async with working(resources, ScriptedExecutor()):  # a process of its own knows only the record
            await until(resources, job_id, JobState.COMPLETED)
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    ids = {"request_id": "the-callers-own-id", "account_id": account.id, "job_id": job_id}
    (accepted,) = [line for line in lines if line["logger"] == "serve_app.jobs.submit"]
    (worked,) = [line for line in lines if line["logger"] == "serve_app.worker.attempt"]
    assert accepted | ids == accepted
    assert worked | ids | {"attempt": "1"} == worked
