"""Form tokens: by them only the session that was given a form can send it."""

import hmac
import secrets
from collections.abc import Mapping
from typing import Protocol

from fastapi import HTTPException

EXPIRED_FORM = "The page has expired. Go back, reload it, and try again."


class Session(Protocol):
    """A live session, of an account or of an operator."""

    @property
    def token(self) -> str: ...


def check_form(session: Session, form: Mapping[str, str], purpose: str) -> None:
    """Raises 403 when the form was not given to this session."""
    if not is_form_token(session.token, purpose, form.get("form_token", "")):
        raise HTTPException(403, EXPIRED_FORM)


def form_token(session: str, purpose: str) -> str:
    """Return the token of a form, by which only this session can send a form of this purpose."""
    return hmac.digest(session.encode(errors="replace"), f"form: {purpose}".encode(), "sha256").hex()


def is_form_token(session: str, purpose: str, given: str) -> bool:
    return hmac.compare_digest(form_token(session, purpose).encode(), given.encode(errors="replace"))


def single_use_token(session: str, purpose: str) -> str:
    """A form token that differs on every page, to be accepted only once."""
    nonce = secrets.token_urlsafe(12)
    return f"{nonce}.{form_token(session, f'{purpose} {nonce}')}"


def nonce_of(session: str, purpose: str, given: str) -> str | None:
    """Return a single-use token's nonce; None for a token of another session or purpose."""
    nonce, _, proof = given.partition(".")
    return nonce if is_form_token(session, f"{purpose} {nonce}", proof) else None
