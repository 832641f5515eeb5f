"""`atelier jobs`: every account's jobs, and the dead letters."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from serve_app.cli.accounts import find_account
from serve_app.cli.command import Answer, operator, table
from serve_app.cli.ending import Failed
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.service.resources import Resources

app = typer.Typer(no_args_is_help=True, help="Jobs of every account: seen, cancelled, sent back to work.")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="gen_… or up_…", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")]


@operator(app, "list")
async def list_jobs(
    resources: Resources,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    account: Annotated[str | None, typer.Option(help="Only this account's jobs.")] = None,
    limit: Limit = 50,
) -> Answer:
    """The newest jobs."""
    if account is None:
        jobs = await resources.jobs.list_all(state, limit)
    else:
        found = await resources.jobs.list((await find_account(resources, account)).id, limit=limit)
        jobs = [job for job in found if state in (None, job.state)]
    return await _listed(resources, jobs, empty="No such jobs.")


@operator(app, "dead")
async def dead(resources: Resources, limit: Limit = 50) -> Answer:
    """Jobs that failed for good; `requeue` gives one another chance."""
    return await _listed(resources, await resources.jobs.dead(limit), empty="No dead jobs.")


@operator(app, "show")
async def show(resources: Resources, job_id: JobId) -> Answer:
    """All that is recorded of a job. Its prompt is shown only with `--json`."""
    job = await _find(resources, job_id)
    facts = {**_facts(job), "request": _request_facts(job)}
    lines = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        if name not in ("request", "images") and value is not None:
            lines.add_row(name.replace("_", " "), str(value))
    for image in job.images:
        lines.add_row("image", f"{image.image_id} {image.width}x{image.height} {image.image_uri}")
    return Answer(facts=facts, shown=lines)


@operator(app, "cancel")
async def cancel(resources: Resources, job_id: JobId) -> Answer:
    """Stop a job: at once while it waits, within a step when it runs."""
    state = await resources.jobs.cancel(job_id, account_id=None)
    if state is None:
        raise _unknown(job_id)
    words = {JobState.CANCELED: "canceled", JobState.RUNNING: "stops at its next step"}
    return Answer(facts={"id": job_id, "state": state}, shown=f"{job_id}: {words.get(state, f'had already {state}')}")


@operator(app, "requeue")
async def requeue(resources: Resources, job_id: JobId) -> Answer:
    """Send a dead job back to work, with all its attempts."""
    if not await resources.jobs.requeue_dead(job_id):
        raise Failed(f"{job_id} is not a dead job (see: atelier jobs dead)")
    return Answer(facts={"id": job_id, "state": JobState.QUEUED}, shown=f"{job_id}: queued again")


async def _find(resources: Resources, job_id: str) -> Job:
    job = await resources.jobs.show(job_id)
    if job is None:
        raise _unknown(job_id)
    return job


def _unknown(job_id: str) -> Failed:
    return Failed(f"no job {job_id!r} (see: atelier jobs list)")


async def _listed(resources: Resources, jobs: Sequence[Job], *, empty: str) -> Answer:
    names = {account.id: account.name for account in await resources.accounts.accounts()}
    rows = [_row(job, names.get(job.account_id, job.account_id)) for job in jobs]
    columns = ("ID", "STATE", "DONE", "ACCOUNT", "WHAT", "ACCEPTED", "WHY")
    return Answer(facts={"jobs": [_facts(job) for job in jobs]}, shown=table(columns, rows, empty=empty))


def _row(job: Job, account: str) -> tuple[str, ...]:
    why = f"{job.failure.code}: {job.failure.message}" if job.failure else ""
    return job.id, job.state, f"{job.progress} %", account, _what(job), f"{job.created_at:%Y-%m-%d %H:%M:%S}", why


def _what(job: Job) -> str:
    request = job.request
    if isinstance(request, GenerationRequest):
        return f"{request.num_images} x {request.width}x{request.height}, {request.steps} steps"
    return f"upscale to {request.width}x{request.height}"


def _facts(job: Job) -> dict[str, object]:
    """Null is what has not happened (yet)."""
    times = {"created_at": job.created_at, "started_at": job.started_at, "finished_at": job.finished_at}
    return {
        "id": job.id,
        "kind": job.kind,
        "interface": job.variant,
        "account": job.account_id,
        "state": job.state,
        "progress": job.progress,
        "attempt": job.attempt,
        **{name: time.isoformat() if time else None for name, time in times.items()},
        "finish_estimate": job.finish_estimate.isoformat() if job.finish_estimate else None,
        "failure": {"code": job.failure.code, "message": job.failure.message} if job.failure else None,
        "images": [{"image_id": image.image_id, "image_uri": image.image_uri} for image in job.images],
    }


def _request_facts(job: Job) -> dict[str, object]:
    return {**asdict(job.request), "work": job.request.work}
