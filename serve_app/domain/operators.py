"""Operators: people who look after the service in the browser. They are no accounts."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    name: str
    created_at: datetime
    has_password: bool
    """Without one, only a one-time link lets them in."""
    credential_version: str
    """For a session that is opened now; another when the password has changed."""
