"""Check a password: of who signs in, or asks for what a session or an API key alone may not do."""

from math import ceil

from serve_app.domain.accounts import Role, SignIn
from serve_app.domain.audit import Act
from serve_app.domain.errors import TooManyTries
from serve_app.service.resources import Resources
from serve_app.stores.passwords import LENGTH
from serve_app.stores.sign_ins import KnownDevice


async def check_password(
    resources: Resources,
    name: str,
    password: str,
    *,
    actor: str,
    address: str,
    device: KnownDevice | None = None,
    owner_of: str = "",
) -> SignIn | None:
    """Return who has this name and password; None for a wrong one, which the account's audit log keeps.

    With `owner_of`, only owners of that account pass, and its log keeps every failure: a name of another account is treated
    as an unknown one. Tries are counted until the right password takes them back. Raises `TooManyTries`.
    """
    counted = await resources.sign_ins.count(name, address, device, within=owner_of)
    if counted.wait:
        raise TooManyTries(ceil(counted.wait.total_seconds()))
    who = await resources.accounts.check_password(name, password[: LENGTH.stop], within=owner_of)
    if who is None or (owner_of and who.user.role is not Role.OWNER):
        await resources.audit.record(owner_of or counted.account_id, Act.SIGN_IN_FAILED, actor=actor, address=address)
        return None
    await resources.sign_ins.forget(counted)
    return who
