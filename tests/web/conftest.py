"""The whole application with one account, and browsers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from starlette.types import ASGIApp

from serve_app.domain.accounts import Account
from tests.api.app import Member, TestService, client_of
from tests.composition import Resources
from tests.web.browser import ORIGIN, Browser

PASSWORD = "correct horse battery"


@dataclass(slots=True)
class Browsers:
    """Browsers of one application, each at an address of its own unless one is given."""

    app: ASGIApp
    _opened: list[Browser] = field(default_factory=list[Browser])
    _addresses: "count[int]" = field(default_factory=lambda: count(1))

    def new(self, *, address: str = "", origin: str = ORIGIN, headers: dict[str, str] | None = None) -> Browser:
        address = address or f"203.0.113.{next(self._addresses)}"
        browser = Browser(self.app, address=address, origin=origin, headers=headers)
        self._opened.append(browser)
        return browser

    async def signed_in(self, name: str = "owner", **how: Any) -> Browser:
        """A new one in which this account has signed in."""
        browser = self.new(**how)
        await browser.sign_in(name, PASSWORD)
        return browser

    async def aclose(self) -> None:
        for browser in self._opened:
            await browser.aclose()


@pytest.fixture
async def browsers(resources: Resources) -> AsyncIterator[Browsers]:
    found = Browsers(resources.app())
    yield found
    await found.aclose()


@pytest.fixture
async def owner(resources: Resources) -> Account:
    """An account with a console password."""
    return await resources.accounts.create("owner", password=PASSWORD)


@pytest.fixture
async def browser(browsers: Browsers, owner: Account) -> Browser:
    """A browser in which the owner has signed in."""
    return await browsers.signed_in(owner.name)


@pytest.fixture
async def service(resources: Resources) -> AsyncIterator[TestService]:
    async with client_of(resources.app()) as client:
        yield TestService(resources, client)


@pytest.fixture
async def member(service: TestService, owner: Account) -> Member:
    """The owner's account with an API key."""
    return Member(owner, await service.key(owner))
