"""Accounts, their API keys, and the gate that every request passes."""

import secrets
from datetime import timedelta
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from serve_app.domain.accounts import Account, ApiKey, Gate, Plan, Window
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.jobs import Job
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.stores.api_keys import base32, hint_of, is_well_formed, name_of, new_secret, read_key
from serve_app.stores.gate import Question, ms, stranger
from serve_app.stores.passwords import Passwords
from serve_app.stores.records import pairs, read_snapshot, when
from serve_app.stores.redis import Rewrite, Script, key

NAME_LENGTH = range(1, 101)


class Poll(NamedTuple):
    """Who is calling, and the job asked for: None for who may not see it."""

    gate: Gate
    job: Job | None


class AccountStore:
    """Who may call, and how often. Secrets are kept as HMAC-SHA256 under a pepper that Redis does not hold."""

    def __init__(self, redis: Redis, settings: Settings, *, rewrite: Rewrite | None = None) -> None:
        self._redis = cast(Any, redis)  # redis-py types every answer as "value or awaitable of it"
        self._settings = settings
        self._gate = Script(redis, "gate", rewrite)
        self._poll = Script(redis, "poll", rewrite)
        self._open_account = Script(redis, "open_account")
        self._make_key = Script(redis, "make_key", rewrite)
        self._roll_key = Script(redis, "roll_key", rewrite)
        self._passwords = Passwords()

    async def create_account(
        self, name: str, *, plan_a: str = "basic", plan_b: str = "free", password: str | None = None
    ) -> Account:
        """A new account. Raises `InvalidParameter` for a name in use, an unknown plan, a password of a wrong length."""
        name = name.strip()
        if len(name) not in NAME_LENGTH or not name.isprintable():
            raise InvalidParameter("name: must be 1 to 100 printable characters")
        self._check_plans(plan_a, plan_b)
        account_id = "acct_" + base32(secrets.token_bytes(16))
        password_hash = await self._passwords.hash(password) if password is not None else ""
        if await self._open_account(account_id, name, plan_a, plan_b, password_hash) == "taken":
            raise InvalidParameter(f"name: an account called {name!r} exists")
        return await self._existing(account_id)

    async def accounts(self) -> list[Account]:
        """All accounts, oldest first."""
        ids: list[str] = await self._redis.zrange(key("accounts"), 0, -1)
        found = [await self._read(account_id) for account_id in ids]
        return [account for account in found if account is not None]

    async def account(self, id_or_name: str) -> Account | None:
        found = await self._read(id_or_name)
        if found is not None:
            return found
        account_id = await self._redis.get(key("name", id_or_name))
        return await self._read(account_id) if account_id else None

    async def set_plans(self, account_id: str, plan_a: str | None = None, plan_b: str | None = None) -> Account:
        """Change plans; the window that is open keeps its count. Raises `NotFound`, `InvalidParameter`."""
        self._check_plans(plan_a, plan_b)
        await self._existing(account_id)
        changes = {"plan_a": plan_a, "plan_b": plan_b}
        wanted = {field: plan for field, plan in changes.items() if plan is not None}
        if wanted:
            await self._redis.hset(key("account", account_id), mapping=wanted)
        return await self._existing(account_id)

    async def set_disabled(self, account_id: str, disabled: bool) -> Account:
        """A disabled account's keys and password stop working with the next request."""
        await self._existing(account_id)
        if disabled:
            await self._redis.hset(key("account", account_id), "disabled", "1")
        else:
            await self._redis.hdel(key("account", account_id), "disabled")
        return await self._existing(account_id)

    async def set_password(self, account_id: str, password: str) -> None:
        await self._existing(account_id)
        await self._redis.hset(key("account", account_id), "password", await self._passwords.hash(password))

    async def check_password(self, name: str, password: str) -> Account | None:
        """The account of a right password. An unknown name costs the same time as a wrong password."""
        account = await self.account(name)
        stored = await self._redis.hget(key("account", account.id), "password") if account else None
        matches = await self._passwords.matches(stored, password)
        return account if matches and account is not None and not account.disabled else None

    async def create_key(
        self, account_id: str, *, name: str = "", interfaces: frozenset[Variant], expires_in: timedelta | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is never readable again. Raises `InvalidParameter`, `NotFound`."""
        if not interfaces:
            raise InvalidParameter("interfaces: must name at least one of a, b")
        if expires_in is not None and expires_in <= timedelta():
            raise InvalidParameter("expires_in: must be longer than nothing")
        secret = new_secret()
        named = name_of(secret, self._settings.pepper_bytes)
        letters, life = "".join(sorted(interfaces)), "" if expires_in is None else ms(expires_in)
        title = name.strip()[: NAME_LENGTH.stop]
        row = await self._make_key(named.id, named.digest, hint_of(secret), account_id, title, letters, life)
        if not row:
            raise NotFound(f"no account {account_id!r}")
        return read_key(named.id, pairs(row)), secret

    async def roll_key(self, key_id: str, *, grace: timedelta) -> tuple[ApiKey, str]:
        """A successor with the same name, interfaces and length of life; the old key stops after `grace`, everywhere.

        Raises `NotFound` for a key that does not work any more.
        """
        secret = new_secret()
        named = name_of(secret, self._settings.pepper_bytes)
        row = await self._roll_key(key_id, named.id, named.digest, hint_of(secret), ms(grace))
        if not row:
            raise NotFound(f"no key {key_id!r} that works")
        return read_key(named.id, pairs(row)), secret

    async def keys(self, account_id: str) -> list[ApiKey]:
        """The account's keys, revoked and expired ones too, oldest first."""
        ids: list[str] = await self._redis.zrange(key("keys", account_id), 0, -1)
        pipeline = self._redis.pipeline()
        for key_id in ids:
            pipeline.hgetall(key("key", key_id))
        rows: list[dict[str, str]] = await pipeline.execute() if ids else []
        return [read_key(key_id, row) for key_id, row in zip(ids, rows, strict=True) if row]

    async def revoke_key(self, key_id: str) -> bool:
        """True if there is such a key; it stops working with the next request, everywhere."""
        if not await self._redis.exists(key("key", key_id)):
            return False
        await self._redis.hset(key("key", key_id), "revoked", "1")
        return True

    async def gate(self, secret: str, variant: Variant, *, counted: bool) -> Gate:
        """Who is calling and whether the plan has room, in one script. A counted request is counted before its body is read.

        An unknown, revoked, expired, disabled or wrong-interface key has no caller and the lowest plan's window; nothing is counted.
        """
        if not is_well_formed(secret):
            return stranger(self._plans(variant)[0])
        question = self._question(secret, variant, receipt=secrets.token_urlsafe(12) if counted else "")
        return question.read(await self._gate(*question.words))

    async def poll(self, secret: str, variant: Variant, job_id: str, *, of: Variant | None) -> Poll:
        """The gate without counting, and the job if it is the account's (and was made on `of`): one script."""
        if not is_well_formed(secret):
            return Poll(stranger(self._plans(variant)[0]), None)
        question = self._question(secret, variant)
        caller, snapshot = await self._poll(*question.words, job_id, of or "")
        return Poll(question.read(caller), read_snapshot(snapshot))

    async def window(self, account_id: str, variant: Variant) -> Window:
        """Where the account stands now; counts nothing."""
        pipeline = self._redis.pipeline()
        pipeline.hget(key("account", account_id), f"plan_{variant}")
        pipeline.zcard(key("counted", account_id, variant))
        pipeline.zrange(key("counted", account_id, variant), 0, 0, withscores=True)
        pipeline.time()
        plan_name, used, first, (seconds, micros) = await pipeline.execute()
        plan = self._settings.plan_table.get((variant, plan_name or ""), self._plans(variant)[0])
        now = when(seconds * 1000 + micros // 1000)
        resets_at = when(first[0][1]) if first else now + plan.window
        return Window.at(plan, used=used, resets_at=resets_at, asked_at=now)

    def _question(self, secret: str, variant: Variant, receipt: str = "") -> Question:
        named = name_of(secret, self._settings.pepper_bytes)
        return Question(key=named, variant=variant, plans=self._plans(variant), receipt=receipt)

    def _plans(self, variant: Variant) -> list[Plan]:
        return [plan for plan in self._settings.plan_table.values() if plan.variant == variant]

    def _check_plans(self, plan_a: str | None, plan_b: str | None) -> None:
        for variant, name in ((Variant.A, plan_a), (Variant.B, plan_b)):
            if name is not None and (variant, name) not in self._settings.plan_table:
                known = ", ".join(plan.name for plan in self._plans(variant))
                raise InvalidParameter(f"plan_{variant}: must be one of {known}")

    async def _existing(self, account_id: str) -> Account:
        found = await self._read(account_id)
        if found is None:
            raise NotFound(f"no account {account_id!r}")
        return found

    async def _read(self, account_id: str) -> Account | None:
        row: dict[str, str] = await self._redis.hgetall(key("account", account_id))
        if not row:
            return None
        return Account(
            id=account_id,
            name=row["name"],
            plan_a=row["plan_a"],
            plan_b=row["plan_b"],
            disabled="disabled" in row,
            created_at=when(row["created"]),
        )
