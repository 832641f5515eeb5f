"""Console passwords are hashed at a cost that is worth a thief's while to avoid."""

from serve_app.stores import passwords

SHIPPED = (passwords.MEMORY_KIB, passwords.PASSES, passwords.LANES)
"""Read while tests are collected: the session lowers the memory."""


async def test_a_hash_costs_at_least_what_owasp_asks() -> None:
    memory, passes, lanes = SHIPPED
    assert memory >= 19 * 1024
    assert passes >= 2
    made = await passwords.Passwords().hash("correct horse battery")
    assert made.startswith("$argon2id$v=19$")
    assert f"t={passes},p={lanes}" in made


async def test_only_the_right_password_matches() -> None:
    hashes = passwords.Passwords()
    stored = await hashes.hash("correct horse battery")
    assert await hashes.matches(stored, "correct horse battery")
    assert not await hashes.matches(stored, "correct horse batterx")
    assert not await hashes.matches(None, "correct horse battery")
