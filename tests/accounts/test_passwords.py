"""Passwords are hashed at a cost that makes guessing stolen hashes slow."""

import time

import pytest

from serve_app.accounts import sign_in as passwords
from serve_app.settings import Settings
from serve_app.store.redis_client import connect

SHIPPED = (passwords.MEMORY_KIB, passwords.PASSES, passwords.LANES)
"""These are read while tests are collected, before the test session lowers the memory."""


async def test_a_hash_costs_at_least_what_owasp_asks(settings: Settings) -> None:
    memory, passes, lanes = SHIPPED
    assert memory >= 19 * 1024
    assert passes >= 2
    made = await passwords.Passwords(connect(settings.redis_url)).hash("correct horse battery")
    assert made.startswith("$argon2id$v=19$")
    assert f"t={passes},p={lanes}" in made


async def test_no_password_takes_as_long_as_a_wrong_one(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time must not tell which accounts there are; an answer without a hash would take a thousandth."""
    monkeypatch.setattr(passwords, "MEMORY_KIB", SHIPPED[0])
    hashes = passwords.Passwords(connect(settings.redis_url))
    stored = await hashes.hash("correct horse battery")
    await hashes.matches(None, "wrong")

    async def seconds(hashed: str | None) -> float:
        began = time.process_time()
        assert not await hashes.matches(hashed, "wrong")
        return time.process_time() - began

    wrong = min([await seconds(stored) for _ in range(3)])
    nothing = min([await seconds(None) for _ in range(3)])
    assert nothing > wrong / 10
