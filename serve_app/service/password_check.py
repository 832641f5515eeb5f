"""Check the password of who asks for what a session or an API key alone may not do."""

from math import ceil

from serve_app.domain.accounts import SignIn
from serve_app.domain.errors import TooManyTries
from serve_app.service.resources import Resources
from serve_app.stores.passwords import LENGTH
from serve_app.stores.sign_ins import KnownDevice


async def check_password(
    resources: Resources, name: str, password: str, *, address: str, device: KnownDevice | None = None
) -> SignIn | None:
    """Return who has this name and password.

    Tries are counted with those to sign in. Raises `TooManyTries`.
    """
    counted = await resources.sign_ins.count(name, address, device)
    if counted.wait:
        raise TooManyTries(ceil(counted.wait.total_seconds()))
    who = await resources.accounts.check_password(name, password[: LENGTH.stop])
    if who is not None:
        await resources.sign_ins.forget(counted)
    return who
