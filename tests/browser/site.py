"""The whole service in one process on a real port, without Ray."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from playwright.async_api import Page

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.domain.accounts import Account
from serve_app.engine import Engine, EngineOptions
from serve_app.settings import Settings
from serve_app.upscale.upscaler import Upscaler
from serve_app.worker.generation import GenerationExecutor
from serve_app.worker.upscale import UpscaleExecutor
from serve_app.worker.worker import Worker
from tests.served import Served, served
from tests.support import POCKET

ACCOUNT, PASSWORD = "demo", "correct horse battery"
OPERATOR = "alice"


@dataclass(slots=True)
class Site(Served):
    """A running service with one account, which draws."""

    account: Account = field(init=False)
    options: EngineOptions = field(default_factory=lambda: EngineOptions(device="cpu", max_rows=16, exact=False))
    _workers: list[Worker] = field(default_factory=list[Worker])

    def sign_in_url(
        self, account: Account | None = None, user_id: str = "", purpose: LinkPurpose = LinkPurpose.SIGN_IN
    ) -> str:
        """Return the address that signs a user in once, of the demo account unless another is given."""
        account_id = (account or self.account).id
        token = self.run(self.resources.sign_in_links.create(account_id, purpose, user_id=user_id))
        return f"{self.base_url}/console/links/{token}"

    def operator_url(self) -> str:
        """Return the address that signs the operator in once."""
        token = self.run(self.resources.operator_links.create(OPERATOR, LinkPurpose.SIGN_IN))
        return f"{self.base_url}/operators/links/{token}"

    async def account_without_loras(self, name: str) -> Account:
        account = await self.resources.accounts.create(name)
        for lora in await self.resources.catalog.adapters(account.id):
            await self.resources.adapter_grants.revoke(lora.id, account.id)
        return account

    async def hint(self, kind: str, job_id: str) -> None:
        for worker in self._workers:
            worker.hint()

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        accounts = self.resources.accounts
        self.account = await accounts.create(ACCOUNT, password=PASSWORD, plan_a="enterprise", plan_b="premium")
        await self.resources.operators.create(OPERATOR)
        engine = Engine.load({"pocket": POCKET}, self.options)
        upscaler = Upscaler.load(POCKET / "upscaler", device="cpu")
        executors = (
            GenerationExecutor(engine, self.resources.catalog, self.resources.weights, self.resources.images),
            UpscaleExecutor(upscaler, self.resources.images),
        )
        for executor in executors:
            self._workers.append(Worker(self.resources.for_workers, executor, name=executor.pool))
            self._workers[-1].start()
        yield
        for worker in self._workers:
            await worker.drain(timedelta(seconds=2))


async def sign_in(page: Page, address: str) -> None:
    """Sign a browser in by the address of a link."""
    await page.goto(address)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url(lambda url: "/links/" not in url)


@contextmanager
def open_site(settings: Settings, options: EngineOptions | None = None) -> Generator[Site]:
    """Run the service on a free port until the block ends."""
    with served(Site() if options is None else Site(options=options), settings) as site:
        yield site
