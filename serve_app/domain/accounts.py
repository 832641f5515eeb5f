"""Who pays, what they send to prove it, and what their plan allows."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from typing import Literal

from serve_app.domain.requests import Variant


@dataclass(frozen=True, slots=True)
class Plan:
    """At most `limit` counted requests in a fixed window that the first counted request opens."""

    variant: Variant
    name: str
    limit: int
    window: timedelta

    @property
    def policy_name(self) -> str:
        """The window's name in the `RateLimit-Policy` header: `a-hourly`, `b-minute`."""
        period = {timedelta(hours=1): "hourly", timedelta(minutes=1): "minute"}.get(self.window)
        return f"{self.variant}-{period or f'{self.window.total_seconds():g}s'}"


HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
SEED_PLANS: tuple[Plan, ...] = (
    Plan(Variant.A, "basic", 50, HOUR),
    Plan(Variant.A, "professional", 200, HOUR),
    Plan(Variant.A, "enterprise", 1000, HOUR),
    Plan(Variant.B, "free", 10, MINUTE),
    Plan(Variant.B, "basic", 30, MINUTE),
    Plan(Variant.B, "premium", 100, MINUTE),
)
"""The six plans of the two documents. Operators add their own through `configs/plans.yaml`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    id: str
    name: str
    plan_a: str
    plan_b: str
    disabled: bool
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """An API key as it may be shown again: never the secret, only its first and last characters."""

    id: str
    account_id: str
    name: str
    hint: str
    interfaces: frozenset[Variant]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked: bool

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """To be shown; what a key may do is decided at the gate, by the store's clock."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """A valid key at the door of one variant. `receipt` names the counted request in its window, so that it can be given back."""

    account_id: str
    account_name: str
    key_id: str
    variant: Variant
    plan: Plan
    receipt: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Where a caller stands in the plan's window, for the rate headers. Both times are of the store's clock."""

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
class Gate:
    """The gate's answer: no caller means an unknown, revoked, expired or disabled key; `limited` means over the plan."""

    caller: Caller | None
    window: Window
    limited: bool
