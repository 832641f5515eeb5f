"""What `caller.lua` is asked and what it answers, as the domain's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from serve_app.domain.accounts import Caller, Gate, Plan, Window
from serve_app.domain.requests import Variant
from serve_app.stores.api_keys import KeyName
from serve_app.stores.records import when


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Whose key is this, on one interface? `plans` are the interface's, the lowest first; no receipt counts nothing."""

    key: KeyName
    variant: Variant
    plans: Sequence[Plan]
    receipt: str = ""

    @property
    def words(self) -> tuple[str | int, ...]:
        table = (word for plan in self.plans for word in (plan.name, plan.limit, ms(plan.window)))
        return (self.key.id, self.key.digest, self.variant, self.receipt, len(self.plans), *table)

    def read(self, answer: Sequence[Any]) -> Gate:
        status, account_id, account_name, plan_name, used, ends, now = answer
        plan = next(plan for plan in self.plans if plan.name == plan_name)
        window = Window.at(plan, used=used, resets_at=when(ends), asked_at=when(now))
        if status == "unknown":
            return Gate(caller=None, window=window, limited=False)
        caller = Caller(
            account_id=account_id,
            account_name=account_name,
            key_id=self.key.id,
            variant=self.variant,
            plan=plan,
            receipt=self.receipt,
        )
        return Gate(caller=caller, window=window, limited=status == "limited")


def stranger(lowest: Plan) -> Gate:
    """The answer to what cannot be a key: the same as to one that is unknown."""
    return Gate(caller=None, window=Window.unopened(lowest, datetime.now(UTC)), limited=False)


def ms(duration: timedelta) -> int:
    return round(duration.total_seconds() * 1000)
