"""Use cases of operators, by command or in the browser: each act on accounts and jobs is recorded."""

from typing import TYPE_CHECKING

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor
from serve_app.domain.jobs import JobState

if TYPE_CHECKING:
    from serve_app.resources import Resources


async def set_plans(
    resources: "Resources", account: Account, by: Actor, *, plan_a: str | None = None, plan_b: str | None = None
) -> Account:
    """Change plans, effective from the next request. Raises `InvalidParameter`, `NotFound`."""
    changed = await resources.accounts.set_plans(account.id, plan_a=plan_a, plan_b=plan_b)
    await _record(resources, account.id, Act.PLANS_CHANGED, by, f"a:{changed.plan_a} b:{changed.plan_b}")
    return changed


async def disable(resources: "Resources", account: Account, by: Actor) -> Account:
    """Reject the account's keys and end its console sessions at once; its jobs and images stay."""
    changed = await resources.accounts.set_disabled(account.id, True)
    await resources.sessions.revoke_all(account.id)
    await _record(resources, account.id, Act.ACCOUNT_DISABLED, by)
    return changed


async def enable(resources: "Resources", account: Account, by: Actor) -> Account:
    changed = await resources.accounts.set_disabled(account.id, False)
    await _record(resources, account.id, Act.ACCOUNT_ENABLED, by)
    return changed


async def make_sign_in_link(resources: "Resources", account: Account, by: Actor, purpose: LinkPurpose) -> str:
    """Return the path of a link to the console that works once, within a day."""
    token = await resources.sign_in_links.create(account.id, purpose)
    await _record(resources, account.id, Act.SIGN_IN_LINK_MADE, by)
    return f"/console/links/{token}"


async def cancel_job(resources: "Resources", job_id: str, by: Actor) -> JobState | None:
    """Cancel any account's job; return its state after the call, or None when there is no such job."""
    state = await resources.queue.cancel(job_id, account_id=None)
    if state is not None:
        await _record_job(resources, job_id, Act.JOB_CANCELED, by)
    return state


async def requeue_job(resources: "Resources", job_id: str, by: Actor) -> bool:
    """Queue a failed job again, with all its attempts; False when it has not failed."""
    if not await resources.dead_letters.requeue(job_id):
        return False
    await _record_job(resources, job_id, Act.JOB_REQUEUED, by)
    return True


async def drop_job(resources: "Resources", job_id: str, by: Actor) -> bool:
    """Take a failed job off the operators' list; False when it is not on the list.

    It stays failed, for its account too.
    """
    if not await resources.dead_letters.drop(job_id):
        return False
    await _record_job(resources, job_id, Act.JOB_DROPPED, by)
    return True


async def _record_job(resources: "Resources", job_id: str, act: Act, by: Actor) -> None:
    job = await resources.jobs.find(job_id)
    if job is not None:  # its retention may end meanwhile
        await _record(resources, job.account_id, act, by, job_id)


async def _record(resources: "Resources", account_id: str, act: Act, by: Actor, subject: str = "") -> None:
    await resources.audit.record(account_id, act, actor=by.name, subject=subject, address=by.address)
