"""`atelier jobs` lists, shows, cancels, requeues, drops and deletes the jobs of every account."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from serve_app.accounts.accounts import AccountStore
from serve_app.api.parts import AccountParts, JobParts, OperationParts
from serve_app.cli.accounts import find_account, this_operator
from serve_app.cli.command import Failed, Result, command, listing
from serve_app.domain.errors import NotFound
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest

app = typer.Typer(no_args_is_help=True, help="List, show, cancel, requeue, drop and delete jobs of every account.")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="gen_…, job_… or up_…", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of jobs.")]


@command(app, "list")
async def list_jobs(
    accounts: AccountParts,
    jobs: JobParts,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    account: Annotated[str | None, typer.Option(help="Only jobs of this account.")] = None,
    limit: Limit = 50,
) -> Result:
    """List the newest jobs; with --url or --key your own there."""
    if account is None:
        found = await jobs.history.list_all(state, limit)
    else:
        newest = await jobs.history.list((await find_account(accounts.store, account)).id, limit=limit)
        found = [job for job in newest if state in (None, job.state)]
    return await _job_list(accounts.store, found, empty="No such jobs.")


@command(app, "dead")
async def dead(accounts: AccountParts, jobs: JobParts, limit: Limit = 50) -> Result:
    """List jobs that failed permanently; `requeue` retries one."""
    return await _job_list(accounts.store, await jobs.dead_letters.list(limit), empty="No dead jobs.")


@command(app, "show")
async def show(jobs: JobParts, operations: OperationParts, job_id: JobId) -> Result:
    """Show a job's record. The prompt is included only with `--json`."""
    job = await jobs.reader.find(job_id)
    if job is None:
        raise _unknown(job_id)
    request = {} if job.request is None else {**asdict(job.request), "work": job.request.work}
    facts = {**_facts(job), "request": request}
    lines = Table(box=None, show_header=False, pad_edge=False)
    names = await operations.reader.account_names([job.account_id])
    for name, value in {**facts, "account": names.get(job.account_id, job.account_id)}.items():
        if name not in ("request", "images") and value is not None:
            lines.add_row(name.replace("_", " "), value.isoformat() if isinstance(value, datetime) else str(value))
    for image in job.images:
        lines.add_row("image", f"{image.image_id} {image.width}x{image.height} {image.image_uri}")
    return Result(facts=facts, shown=lines)


@command(app, "cancel")
async def cancel(operations: OperationParts, job_id: JobId) -> Result:
    """Cancel a job: at once while it is queued, at its next step while it runs; with --url or --key one of your own."""
    state = await operations.acts.cancel_job(job_id, this_operator())
    if state is None:
        raise _unknown(job_id)
    words = {JobState.CANCELED: "canceled", JobState.RUNNING: "will stop at its next step"}
    return Result(facts={"id": job_id, "state": state}, shown=f"{job_id}: {words.get(state, f'already {state}')}")


@command(app, "delete")
async def delete(
    jobs: JobParts,
    job_id: JobId,
    image: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Only this image: img_…; with its last image the job goes.", show_default=False
        ),
    ] = None,
) -> Result:
    """Delete a job that has ended, with its prompt and its images; with --image one of its images."""
    if image is not None:
        return await _delete_image(jobs, job_id, image)
    try:
        await jobs.deletion.delete_job(job_id, account_id=None, by=this_operator())
    except NotFound:
        raise _unknown(job_id) from None
    return Result(facts={"id": job_id, "deleted": True}, shown=f"{job_id}: deleted")


async def _delete_image(jobs: JobParts, job_id: str, image_id: str) -> Result:
    try:
        await jobs.deletion.delete_image(job_id, image_id, account_id=None, by=this_operator())
    except NotFound:
        raise Failed(f"no image {image_id!r} of a job {job_id!r} (see: atelier jobs show {job_id})") from None
    is_kept = await jobs.reader.find(job_id) is not None
    shown = f"{image_id}: deleted" if is_kept else f"{image_id}: deleted, and with its last image {job_id}"
    return Result(facts={"id": job_id, "image_id": image_id, "deleted": True, "job_deleted": not is_kept}, shown=shown)


@command(app, "requeue")
async def requeue(operations: OperationParts, job_id: JobId) -> Result:
    """Requeue a dead job with a full set of attempts."""
    if not await operations.acts.requeue_job(job_id, this_operator()):
        raise Failed(f"{job_id} is not a dead job (see: atelier jobs dead)")
    return Result(facts={"id": job_id, "state": JobState.QUEUED}, shown=f"{job_id}: queued again")


@command(app, "drop")
async def drop(operations: OperationParts, job_id: JobId) -> Result:
    """Remove a dead job from the list of `dead`; it remains failed, also for its account."""
    if not await operations.acts.drop_job(job_id, this_operator()):
        raise Failed(f"{job_id} is not a dead job (see: atelier jobs dead)")
    return Result(facts={"id": job_id, "dropped": True}, shown=f"{job_id}: off the list")


def _unknown(job_id: str) -> Failed:
    return Failed(f"no job {job_id!r} (see: atelier jobs list)")


async def _job_list(accounts: AccountStore, jobs: Sequence[Job], *, empty: str) -> Result:
    names = {account.id: account.name for account in await accounts.list()}

    def row(job: Job) -> tuple[str, ...]:
        account, accepted = names.get(job.account_id, job.account_id), f"{job.created_at:%Y-%m-%d %H:%M:%S}"
        why = f"{job.failure.code}: {job.failure.message}" if job.failure else ""
        return job.id, job.state, f"{job.progress} %", account, _what(job), accepted, why

    columns = ("ID", "STATE", "DONE", "ACCOUNT", "WHAT", "ACCEPTED", "WHY")
    return listing("jobs", jobs, _facts, columns, row, empty=empty)


def _what(job: Job) -> str:
    request = job.request
    if request is None:
        return "unreadable"
    if isinstance(request, GenerationRequest):
        return f"{request.num_images} x {request.width}x{request.height}, {request.steps} steps"
    return f"upscale to {request.width}x{request.height}"


def _facts(job: Job) -> dict[str, object]:
    """The job's record for `--json`; a time that has not come is null."""
    return {
        "id": job.id,
        "kind": job.kind,
        "interface": job.variant,
        "account": job.account_id,
        "state": job.state,
        "progress": job.progress,
        "attempt": job.attempt,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "finish_estimate": job.finish_estimate,
        "failure": asdict(job.failure) if job.failure else None,
        "images": [{"image_id": image.image_id, "image_uri": image.image_uri} for image in job.images],
    }
