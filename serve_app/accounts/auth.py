"""Authentication: API key → account → plan → count, in one script, before any body is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from serve_app.accounts.api_keys import KeyDigest, KeySent, digests_of, is_well_formed, read_adapters, read_scopes
from serve_app.domain.accounts import AuthResult, Caller, Plan, Window, new_rate_token, plan_cells
from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient
from serve_app.store.script import Argument, Script


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthQuery:
    """The arguments that `caller.lua` takes.

    `plans` are the interface's, the lowest first. Without a `rate_token` nothing is counted.
    """

    key: KeyDigest
    older: Sequence[KeyDigest] = ()
    """The digests of the same secret under the older peppers."""
    variant: Variant
    plans: Sequence[Plan]
    rate_token: str = ""
    address: str = ""
    """The address that a counted request came from, for the key's record."""

    @property
    def args(self) -> dict[str, Argument]:
        return {
            "key_id": self.key.id,
            "key_digest": self.key.digest,
            "older_keys": " ".join(f"{key.id} {key.digest}" for key in self.older),
            "interface": self.variant,
            "rate_token": self.rate_token,
            "address": self.address,
            "plans": plan_cells(self.plans),
        }

    def read(self, answer: Sequence[Any]) -> AuthResult:
        return _read_caller(answer, self.plans, rate_token=self.rate_token)


class Authenticator:
    """Authenticates API keys and counts requests in the plan's window."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._authenticate = Script(redis, "accounts/authenticate")
        self._count_owner = Script(redis, "accounts/count_owner")

    async def authenticate(self, secret: KeySent, variant: Variant, *, counted: bool, address: str = "") -> AuthResult:
        """Identify the caller and count the request, in one script; store the `address` of the key's last use.

        An unknown, revoked, expired or disabled key, or one of the other interface, gives no caller and the lowest
        plan's window; nothing is counted.
        """
        rate_token = new_rate_token() if counted else ""
        query = auth_query(secret, variant, self._settings, rate_token=rate_token, address=address)
        if query is None:
            return anonymous(variant, self._settings)
        return query.read(await self._authenticate(**query.args))

    async def count_owner(self, account_id: str, variant: Variant) -> AuthResult:
        """Count a request of the account's owner, who has no key, as a request with a key is counted.

        A disabled account gives no caller.
        """
        plans, rate_token = self._settings.plans_of(variant), new_rate_token()
        answer = await self._count_owner(
            account_id=account_id, interface=variant, rate_token=rate_token, plans=plan_cells(plans)
        )
        return _read_caller(answer, plans, rate_token=rate_token)

    async def window(self, account_id: str, variant: Variant) -> Window:
        """Return the account's use of its plan; counts nothing."""
        pipeline = self._redis.pipeline()
        pipeline.hget(redis_key("account", account_id), f"plan_{variant}")
        pipeline.zcard(redis_key("rate", account_id, variant))
        pipeline.zrange(redis_key("rate", account_id, variant), 0, 0, withscores=True)
        pipeline.time()
        plan_name, used, first, (seconds, micros) = await pipeline.execute()
        plan = self._settings.plan_named(variant, plan_name)
        now = from_epoch_ms(seconds * 1000 + micros // 1000)
        resets_at = from_epoch_ms(first[0][1]) if first else now + plan.window
        return Window.at(plan, used=used, resets_at=resets_at, asked_at=now)


def auth_query(
    secret: KeySent, variant: Variant, settings: Settings, *, rate_token: str = "", address: str = ""
) -> AuthQuery | None:
    """Return the arguments for a key; None for a text that cannot be one."""
    if isinstance(secret, str) and not is_well_formed(secret):
        return None
    key, *older = digests_of(secret, settings)
    plans = settings.plans_of(variant)
    return AuthQuery(key=key, older=older, variant=variant, plans=plans, rate_token=rate_token, address=address)


def anonymous(variant: Variant, settings: Settings) -> AuthResult:
    """Return the result for a text that cannot be a key: the same as for an unknown key."""
    window = Window.unopened(settings.plans_of(variant)[0], datetime.now(UTC))
    return AuthResult(caller=None, window=window, limited=False)


def _read_caller(answer: Sequence[Any], plans: Sequence[Plan], *, rate_token: str) -> AuthResult:
    status, account_id, account_name, plan_name, used, ends, now, scopes, adapters, limit, key_id = answer
    plan = next(plan for plan in plans if plan.name == plan_name)
    of_key = plan if limit in ("", plan.limit) else replace(plan, limit=limit)
    window = Window.at(of_key, used=used, resets_at=from_epoch_ms(ends), asked_at=from_epoch_ms(now))
    if status in ("unknown", "other_interface"):
        is_of_other = status == "other_interface"
        return AuthResult(caller=None, window=window, limited=False, is_of_other_interface=is_of_other)
    caller = Caller(
        account_id=account_id,
        account_name=account_name,
        key_id=key_id,
        variant=plan.variant,
        plan=plan,
        rate_token=rate_token,
        scopes=read_scopes(scopes),
        adapters=read_adapters(adapters),
    )
    return AuthResult(caller=caller, window=window, limited=status == "limited")
