"""What operators do to accounts and jobs, by command or in the browser; each act is recorded."""

from dataclasses import dataclass

from serve_app.accounts.accounts import AccountStore
from serve_app.accounts.audit import AuditLog
from serve_app.accounts.sessions import SessionStore
from serve_app.accounts.sign_in import LinkPurpose, SignInLinks
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, Actor
from serve_app.domain.jobs import JobState
from serve_app.jobs.history import DeadLetters, JobReader
from serve_app.jobs.queue import JobQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorActs:
    """What operators do to accounts and jobs. Every method may raise `StoreUnavailable`."""

    accounts: AccountStore
    sessions: SessionStore
    links: SignInLinks
    queue: JobQueue
    jobs: JobReader
    dead_letters: DeadLetters
    audit: AuditLog

    async def set_plans(
        self, account: Account, by: Actor, *, plan_a: str | None = None, plan_b: str | None = None
    ) -> Account:
        """Change plans, effective from the next request. Raises `InvalidParameter`, `NotFound`."""
        changed = await self.accounts.set_plans(account.id, plan_a=plan_a, plan_b=plan_b)
        await self.audit.record(account.id, Act.PLANS_CHANGED, by, f"a:{changed.plan_a} b:{changed.plan_b}")
        return changed

    async def disable(self, account: Account, by: Actor) -> Account:
        """Reject the account's keys and end its console sessions at once; its jobs and images stay."""
        changed = await self.accounts.set_disabled(account.id, True)
        await self.sessions.revoke_all(account.id)
        await self.audit.record(account.id, Act.ACCOUNT_DISABLED, by)
        return changed

    async def enable(self, account: Account, by: Actor) -> Account:
        changed = await self.accounts.set_disabled(account.id, False)
        await self.audit.record(account.id, Act.ACCOUNT_ENABLED, by)
        return changed

    async def make_sign_in_link(self, account: Account, by: Actor, purpose: LinkPurpose) -> str:
        """Return the path of a link to the console that works once, within a day."""
        token = await self.links.create(account.id, purpose)
        await self.audit.record(account.id, Act.SIGN_IN_LINK_MADE, by)
        return f"/console/links/{token}"

    async def cancel_job(self, job_id: str, by: Actor) -> JobState | None:
        """Cancel any account's job; return its state after the call, or None when there is no such job."""
        state = await self.queue.cancel(job_id, account_id=None)
        if state is not None:
            await self._record_job(job_id, Act.JOB_CANCELED, by)
        return state

    async def requeue_job(self, job_id: str, by: Actor) -> bool:
        """Queue a failed job again, with all its attempts; False when it has not failed."""
        if not await self.dead_letters.requeue(job_id):
            return False
        await self._record_job(job_id, Act.JOB_REQUEUED, by)
        return True

    async def drop_job(self, job_id: str, by: Actor) -> bool:
        """Take a failed job off the operators' list; False when it is not on the list.

        It stays failed, for its account too.
        """
        if not await self.dead_letters.drop(job_id):
            return False
        await self._record_job(job_id, Act.JOB_DROPPED, by)
        return True

    async def _record_job(self, job_id: str, act: Act, by: Actor) -> None:
        job = await self.jobs.find(job_id)
        if job is not None:  # the job's record may expire meanwhile
            await self.audit.record(job.account_id, act, by, job_id)
