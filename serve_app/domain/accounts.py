"""Accounts, API keys, plans and rate windows; and operators, who look after the service and have no account."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil
from typing import ClassVar, Literal

from serve_app.domain import audit
from serve_app.domain.durations import milliseconds
from serve_app.domain.requests import Variant

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: at most `limit` counted requests in a fixed window, and `max_loras` LoRAs of its own.

    The first counted request opens the window. An account has two plans, and may own as many LoRAs as the larger
    one allows.
    """

    variant: Variant
    name: str
    limit: int
    window: timedelta
    loras: int = 10
    lora_bytes: int = 2 * GIB
    """The account's LoRA files have at most this many bytes together."""

    def requests_in(self, period: timedelta) -> int:
        """Return how many requests the plan admits in `period`, when no window is open at its start."""
        return self.limit * ceil(period / self.window)

    @property
    def policy_name(self) -> str:
        """Return the window's name in the `RateLimit-Policy` header: `a-hourly`, `b-minute`."""
        period = {timedelta(hours=1): "hourly", timedelta(minutes=1): "minute"}.get(self.window)
        return f"{self.variant}-{period or f'{self.window.total_seconds():g}s'}"


def plan_cells(plans: Iterable[Plan]) -> list[str | int]:
    """Return an interface's plans as `window.lua` takes them."""
    return [cell for plan in plans for cell in (plan.name, plan.limit, milliseconds(plan.window))]


def new_rate_token() -> str:
    """Return a name for a counted request, by which it can be refunded."""
    return secrets.token_urlsafe(12)


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
BUILTIN_PLANS: tuple[Plan, ...] = (
    Plan(Variant.A, "basic", 50, HOUR),
    Plan(Variant.A, "professional", 200, HOUR, loras=50, lora_bytes=10 * GIB),
    Plan(Variant.A, "enterprise", 1000, HOUR, loras=500, lora_bytes=100 * GIB),
    Plan(Variant.B, "free", 10, MINUTE),
    Plan(Variant.B, "basic", 30, MINUTE, loras=50, lora_bytes=10 * GIB),
    Plan(Variant.B, "premium", 100, MINUTE, loras=500, lora_bytes=100 * GIB),
)
"""The six plans of the two documents. Operators add their own through the file that `ATELIER_PLANS` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    id: str
    name: str
    plan_a: str
    plan_b: str
    disabled: bool
    created_at: datetime


class Role(StrEnum):
    """A user's role in the console.

    An owner may do everything; a member draws, and has LoRAs and keys of its own; billing looks at the usage.
    """

    OWNER = "owner"
    MEMBER = "member"
    BILLING = "billing"


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A person who signs in to an account.

    Its first user, with the id '', is the account itself: its name and its password.
    """

    id: str
    name: str
    role: Role
    has_password: bool
    created_at: datetime

    @classmethod
    def first(cls, account: Account) -> "User":
        return cls(id="", name=account.name, role=Role.OWNER, has_password=True, created_at=account.created_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignIn:
    """A user of an account who signs in or is signed in, and the credential version of the session."""

    account: Account
    user: User
    credential_version: str

    @property
    def id(self) -> str:
        """The account's id, which also names its audit log."""
        return self.account.id

    log = id

    @property
    def user_id(self) -> str:
        return self.user.id

    @property
    def actor(self) -> str:
        """The user's name in the audit log."""
        return audit.user(self.user.id) if self.user.id else audit.OWNER


class Scope(StrEnum):
    """A permission of an API key.

    It lets a key read jobs and models; or generate, upscale, cancel and delete; or add, share and remove LoRAs.
    """

    READ = "read"
    GENERATE = "generate"
    LORAS = "loras"


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """An API key without its secret.

    `hint` has the first and last characters. `adapters` are the only ones that it may use.
    """

    id: str
    account_id: str
    name: str
    hint: str
    interfaces: frozenset[Variant]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked: bool
    scopes: frozenset[Scope] = ALL_SCOPES
    adapters: frozenset[str] | None = None
    user_id: str = ""
    """The invited user who made the key; empty when no invited user did."""
    limit: int | None = None
    """The key may make this many counted requests in a window of its plan; None is as many as the plan has."""
    last_used_from: str = ""
    """The address that used the key when its last use was recorded."""

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """Return the state for display; authentication decides by the store's clock."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The holder of a valid key on one interface.

    `rate_token` names the counted request, so that it can be refunded; `adapters` are the only ones that the key may
    use.
    """

    account_id: str
    account_name: str
    key_id: str
    variant: Variant
    plan: Plan
    rate_token: str = ""
    scopes: frozenset[Scope] = ALL_SCOPES
    adapters: frozenset[str] | None = None

    def may_use(self, lora_id: str) -> bool:
        """Return whether the key may use this adapter, given that its account may."""
        return self.adapters is None or lora_id in self.adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Use of a plan's window, for the rate headers. Both times are of the store's clock."""

    plan: Plan
    remaining: int
    resets_at: datetime
    asked_at: datetime

    @classmethod
    def at(cls, plan: Plan, *, used: int, resets_at: datetime, asked_at: datetime) -> "Window":
        return cls(plan=plan, remaining=max(0, plan.limit - used), resets_at=resets_at, asked_at=asked_at)

    @classmethod
    def unopened(cls, plan: Plan, asked_at: datetime) -> "Window":
        return cls(plan=plan, remaining=plan.limit, resets_at=asked_at + plan.window, asked_at=asked_at)

    @property
    def reset_unix(self) -> int:
        return ceil(self.resets_at.timestamp())

    @property
    def seconds_left(self) -> int:
        return max(0, ceil((self.resets_at - self.asked_at).total_seconds()))


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthResult:
    """The result of authentication.

    No caller: the key is unknown, revoked, expired or disabled; `limited`: over the plan. `is_of_other_interface`: no
    caller, because the key works on the other interface alone.
    """

    caller: Caller | None
    window: Window
    limited: bool
    is_of_other_interface: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Somebody who signs in to the operators' pages."""

    name: str
    created_at: datetime
    has_password: bool
    """An operator without a password signs in by a one-time link alone."""
    credential_version: str
    """A session that is opened now gets this version, which changes with the password."""

    user_id: ClassVar[str] = ""
    """Operators invite no users."""

    @property
    def id(self) -> str:
        return self.name

    @property
    def actor(self) -> str:
        """The operator's name in the audit log, and the name of the log of what is done to them."""
        return audit.operator(self.name)

    log = actor
