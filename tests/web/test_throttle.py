"""Tries to sign in: others wait, longer each time; the owner gets in."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.accounts.sign_in import EVERYWHERE, HERE, KnownDevice
from serve_app.domain.accounts import Account
from serve_app.store.keys import redis_key
from serve_app.web.console.pages import COOKIE, LIFE, signed
from tests.audit import key_problems
from tests.composition import Resources
from tests.support import plain_redis
from tests.web.browser import Browser, Page
from tests.web.conftest import PASSWORD, Browsers

pytestmark = pytest.mark.slow

WRONG = "a wrong password"
BOUND_S = int(EVERYWHERE.longest.total_seconds())


@pytest.mark.parametrize("name", ["owner", "nobody at all"])
async def test_the_sixth_guess_waits_even_if_it_is_right(browsers: Browsers, owner: Account, name: str) -> None:
    browser = browsers.new()
    for _ in range(HERE.free):
        assert (await browser.sign_in(name, WRONG)).status == 403
    page = await browser.sign_in(name, PASSWORD)
    assert page.status == 429
    assert 0 < int(page.answer.headers["Retry-After"]) <= 15
    assert "Try again in" in page.text
    elsewhere = await browsers.new().sign_in("owner", PASSWORD)
    assert elsewhere.status == 200, "someone else's guesses do not lock the account's owner out"


async def test_each_wait_of_an_address_is_twice_the_one_before(
    browsers: Browsers, owner: Account, redis_db: Any
) -> None:
    browser = browsers.new()
    waits: list[int] = []
    for _ in range(HERE.free + 9):
        await browser.sign_in("owner", WRONG)
        waits.append(_wait_s(await browser.sign_in("owner", WRONG)) if len(waits) >= HERE.free - 1 else 0)
        _let_waits_end(redis_db)
    assert waits[HERE.free - 1 :] == [15, 30, 60, 120, 240, 480, 900, 900, 900, 900]


async def test_guesses_sent_at_once_are_counted_too(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    form = (await browser.open("/console/sign-in")).form("Sign in")
    pages = await asyncio.gather(*(browser.send(form, name="owner", password=WRONG) for _ in range(12)))
    assert sorted(page.status for page in pages) == [403] * 5 + [429] * 7


async def test_the_owner_on_a_known_device_signs_in_while_others_guess(
    browser: Browser, browsers: Browsers, owner: Account
) -> None:
    """The owner gets in even from the address from which the guesses come."""
    browser.http.cookies.delete("atelier_session")
    await _guess_from_many_addresses(browsers, "owner", count=50)
    attacker = browsers.new(address="203.0.113.1")
    assert (await attacker.sign_in("owner", WRONG)).status == 429
    assert (await browser.sign_in("owner", PASSWORD)).status == 200


async def test_the_owner_on_a_new_device_waits_no_longer_than_the_bound_whatever_others_do(
    browsers: Browsers, owner: Account, redis_db: Any
) -> None:
    await _guess_from_many_addresses(browsers, "owner", count=50)
    new_device = browsers.new()
    page = await new_device.sign_in("owner", PASSWORD)
    assert 0 < _wait_s(page) <= BOUND_S
    _let_waits_end(redis_db)
    await _guess_from_many_addresses(browsers, "owner")
    assert (await new_device.sign_in("owner", PASSWORD)).status == 200, "its turn is its own"


async def test_many_addresses_do_not_guess_faster_than_the_waits(
    browsers: Browsers, owner: Account, redis_db: Any
) -> None:
    assert await _guess_from_many_addresses(browsers, "owner", count=EVERYWHERE.free) == EVERYWHERE.free
    _let_waits_last(redis_db, 3600)
    assert await _guess_from_many_addresses(browsers, "owner") == 0
    _let_waits_end(redis_db)
    again = browsers.new(address=f"198.51.100.{EVERYWHERE.free + 1}")
    assert (await again.sign_in("owner", WRONG)).status == 403
    assert 0 < _wait_s(await again.sign_in("owner", WRONG)) <= BOUND_S, "each address's next try waits again"


async def test_a_name_and_its_id_share_their_tries(browsers: Browsers, owner: Account) -> None:
    browser = browsers.new()
    for number in range(HERE.free):
        assert (await browser.sign_in(owner.id if number % 2 else "owner", WRONG)).status == 403
    for name in ("owner", owner.id):
        assert (await browser.sign_in(name, WRONG)).status == 429


@pytest.mark.parametrize("spoil", ["", "signature", "account", "expired", "nonsense", "another account's"])
async def test_a_device_that_was_not_made_known_is_unknown(
    browsers: Browsers, resources: Resources, owner: Account, spoil: str
) -> None:
    await _guess_from_many_addresses(browsers, "owner")
    other = await resources.accounts.create("other", password=PASSWORD)
    ends = LIFE.total_seconds() + 4e9
    cookies = {
        "": signed(resources.settings, KnownDevice(owner.id, "x"), ends=ends),
        "signature": signed(resources.settings, KnownDevice(owner.id, "x"), ends=ends)[:-1] + "g",
        "account": signed(resources.settings, KnownDevice(other.id, "x"), ends=ends).replace(other.id, owner.id),
        "expired": signed(resources.settings, KnownDevice(owner.id, "x"), ends=1),
        "nonsense": "a.b.c.d",
        "another account's": signed(resources.settings, KnownDevice(other.id, "x"), ends=ends),
    }
    attacker = browsers.new(headers={"Cookie": f"{COOKIE}={cookies[spoil]}"})
    assert await _status(attacker, "owner") == (429 if spoil else 403), "a device that is not spoilt is known"


async def test_right_passwords_use_up_no_tries_and_forgive_those_of_no_other_address(
    browsers: Browsers, owner: Account
) -> None:
    await _guess_from_many_addresses(browsers, "owner", count=EVERYWHERE.free - 2)
    home = browsers.new()
    assert (await home.sign_in("owner", WRONG)).status == 403
    for _ in range(2):
        home.http.cookies.clear()  # each time it is an unknown device
        assert (await home.sign_in("owner", PASSWORD)).status == 200
    last, waiting = browsers.new(), browsers.new()
    assert (await last.sign_in("owner", WRONG)).status == 403
    assert (await last.sign_in("owner", WRONG)).status == 403, "the twentieth"
    assert (await waiting.sign_in("owner", WRONG)).status == 429, "the others' guesses are still counted"


async def test_a_known_device_has_tries_of_its_own_and_they_end_too(
    browser: Browser, browsers: Browsers, owner: Account
) -> None:
    browser.http.cookies.delete("atelier_session")
    for _ in range(HERE.free):
        assert (await browser.sign_in("owner", WRONG)).status == 403
    assert (await browser.sign_in("owner", PASSWORD)).status == 429
    assert (await browsers.new(address="203.0.113.1").sign_in("owner", PASSWORD)).status == 200


async def test_the_device_cookie_cannot_be_read_by_scripts_and_stays_the_same_device(
    browser: Browser, owner: Account
) -> None:
    first = browser.http.cookies[COOKIE]
    assert owner.id in first
    browser.http.cookies.delete("atelier_session")
    browser.http.follow_redirects = False
    page = await browser.sign_in("owner", PASSWORD)
    line = next(line for line in page.answer.headers.get_list("set-cookie") if line.startswith(COOKIE))
    assert {"HttpOnly", "SameSite=lax", "Path=/", f"Max-Age={90 * 24 * 3600}"} <= set(line.split("; "))
    assert browser.http.cookies[COOKIE].split(".")[:2] == first.split(".")[:2]


async def test_addresses_of_one_ipv6_network_share_their_tries(browsers: Browsers, owner: Account) -> None:
    for number in range(HERE.free):
        assert (await browsers.new(address=f"2001:db8::{number}").sign_in("owner", WRONG)).status == 403
    assert (await browsers.new(address="2001:db8::ffff:1").sign_in("owner", WRONG)).status == 429


async def test_an_unknown_name_costs_as_many_round_trips_as_a_known_one(
    browsers: Browsers, resources: Resources, owner: Account
) -> None:
    server = plain_redis(resources.redis_url)
    browser = browsers.new()
    form = (await browser.open("/console/sign-in")).form("Sign in")

    async def round_trips(ask: Callable[[], Awaitable[object]]) -> int:
        before = server.info("stats")["total_reads_processed"]
        await ask()
        return server.info("stats")["total_reads_processed"] - before - 1

    names = ("owner", owner.id, "nobody", "acct_nobody", "n" * 500)
    tries = [
        lambda name=name, password=password: browser.send(form, name=name, password=password)
        for password in (WRONG, "p" * 500)
        for name in names
    ]
    await tries[0]()  # the first try loads the scripts
    assert {await round_trips(each) for each in tries} == {3}
    server.close()


async def test_tries_leave_only_keys_that_are_known(browsers: Browsers, owner: Account, redis_db: Any) -> None:
    await _guess_from_many_addresses(browsers, "owner")
    await browsers.new().sign_in("nobody", WRONG)
    assert key_problems(redis_db) == []


async def _guess_from_many_addresses(browsers: Browsers, name: str, count: int = EVERYWHERE.free + 4) -> int:
    """Guess from many addresses, and return how many guesses were looked at."""
    pages = [await browsers.new(address=f"198.51.100.{number}").sign_in(name, WRONG) for number in range(count)]
    assert {page.status for page in pages} <= {403, 429}
    return sum(page.status == 403 for page in pages)


async def _status(browser: Browser, name: str) -> int:
    """Return the status of a try by a browser that sends a cookie of its own beside the form's."""
    page = await browser.open("/console/sign-in")
    cookie = browser.http.headers["Cookie"] + "; atelier_session_form=" + browser.http.cookies["atelier_session_form"]
    browser.http.headers["Cookie"] = cookie
    browser.http.cookies.clear()
    return (await browser.send(page.form("Sign in"), name=name, password=WRONG)).status


def _wait_s(page: Page) -> int:
    assert page.status == 429, page.text
    return int(page.answer.headers["Retry-After"])


def _let_waits_last(client: Any, seconds: int) -> None:
    """Move the end of every wait on: the shortest are a second, and a slow machine would see them pass."""
    now = client.time()[0]
    for name in client.scan_iter(redis_key("sign_in", "*")):
        if client.hexists(name, "next"):
            client.hset(name, "next", str((now + seconds) * 1000))


def _let_waits_end(client: Any) -> None:
    """Move the end of every wait to the past."""
    for name in client.scan_iter(redis_key("sign_in", "*")):
        if client.hexists(name, "next"):
            client.hset(name, "next", "1")
