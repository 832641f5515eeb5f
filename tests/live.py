"""Runs the real application on a real port in its own thread, with a worker that answers each job."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from serve_app.domain.accounts import Account
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, Failure, Timings, Unread
from serve_app.domain.requests import GenerationRequest, Variant
from serve_app.jobs.queue import new_nonce
from serve_app.settings import Settings
from tests.served import Served, served
from tests.support import store_image

Outcome = Literal["complete", "fail", "leave"]


@dataclass(slots=True)
class Live(Served):
    """A running service. Its worker ends each job as soon as it is accepted, as `outcome` says."""

    outcome: Outcome = "complete"

    def member(self, name: str = "acme", **plans: str) -> tuple[Account, str]:
        """Create an account and its key for both interfaces."""
        account = self.run(self.resources.accounts.create(name, **plans))
        _, secret = self.run(self.resources.api_keys.create(account.id, interfaces=frozenset(Variant)))
        return account, secret

    async def hint(self, kind: str, job_id: str) -> None:
        if self.outcome == "leave":
            return
        for claim in await self.resources.queue.claim("live", pool=kind, nonce=new_nonce(), limit=16):
            await self._work(claim)

    async def _work(self, claim: Claim) -> None:
        await self.resources.queue.heartbeat(claim.lease, progress=50)
        if self.outcome == "fail":
            failure = Failure(code=FailureCode.GENERATION_FAILED, message="the brush broke")
            await self.resources.queue.fail(claim.lease, failure, retry=False)
            return
        rows = claim.request.num_images if isinstance(claim.request, GenerationRequest) else 1
        images = [await store_image(self.resources.images, claim, index) for index in range(rows)]
        timings = Timings(load=0.1, denoise=0.3, store=0.1)
        await self.resources.queue.finish(claim.lease, images, seconds=0.5, timings=timings, unread=Unread(prompt=3))


@contextmanager
def live_service(settings: Settings) -> Generator[Live]:
    """Run the application on a free port until the block ends."""
    with served(Live(), settings) as live:
        yield live
