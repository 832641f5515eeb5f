from datetime import UTC, datetime, timedelta

import pytest

from serve_app.domain.accounts import BUILTIN_PLANS, Plan, Window
from serve_app.domain.requests import Variant


def test_the_six_plans_are_those_of_the_documents() -> None:
    limits = {(plan.variant.value, plan.name): (plan.limit, plan.window.total_seconds()) for plan in BUILTIN_PLANS}
    assert limits == {
        ("a", "basic"): (50, 3600),
        ("a", "professional"): (200, 3600),
        ("a", "enterprise"): (1000, 3600),
        ("b", "free"): (10, 60),
        ("b", "basic"): (30, 60),
        ("b", "premium"): (100, 60),
    }


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(Variant.A, "basic", 50, timedelta(hours=1)), "a-hourly"),
        (Plan(Variant.B, "free", 10, timedelta(minutes=1)), "b-minute"),
        (Plan(Variant.B, "trial", 10, timedelta(seconds=2)), "b-2s"),
    ],
)
def test_a_policy_is_named_by_interface_and_window(plan: Plan, name: str) -> None:
    assert plan.policy_name == name


def test_a_window_never_ends_before_it_says() -> None:
    ends = datetime(2026, 11, 21, 12, 0, 0, 1, tzinfo=UTC)
    for asked_at, seconds_left in ((ends - timedelta(seconds=1.5), 2), (ends + timedelta(seconds=5), 0)):
        window = Window.at(BUILTIN_PLANS[0], used=60, resets_at=ends, asked_at=asked_at)
        assert (window.reset_unix, window.seconds_left) == (int(ends.timestamp()) + 1, seconds_left)
        assert window.remaining == 0
