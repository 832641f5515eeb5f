"""Who may sign in: accounts, the users that their owners invite, and operators, apart from every account.

An invited user has a name and a role. The account's own user has no record: it is the account itself.
"""

import re
from collections.abc import Mapping, Sequence

from serve_app.accounts.sessions import CUSTOMERS, OPERATORS
from serve_app.accounts.sign_in import LONGEST_NAME, Passwords
from serve_app.domain.accounts import Account, Operator, Role, SignIn, User
from serve_app.domain.durations import from_epoch_ms
from serve_app.domain.errors import InvalidParameter, NotFound
from serve_app.domain.jobs import random_name
from serve_app.domain.requests import Variant
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, read_records
from serve_app.store.script import Script, pairs

MOST = 100
"""One account has at most this many users."""
_USER_NAME = re.compile(r"[^\s@:]+@[^\s@:]+")
_USER_ID = re.compile(r"user_[a-z2-7]{26}")
_OPERATOR_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class UserStore:
    """Keeps invited users in Redis. `AccountStore.set_password` sets their passwords, and the account's own."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._create = Script(redis, "accounts/create_user")
        self._remove = Script(redis, "accounts/remove_user")

    async def create(self, account_id: str, name: str, role: Role) -> User:
        """Create a user, who cannot sign in before a link was used to set a password.

        Raises `InvalidParameter`, `NotFound`.
        """
        name = name.strip()
        if not _USER_NAME.fullmatch(name) or len(name) > 100 or not name.isprintable():
            raise InvalidParameter("name: must be a name like an e-mail address: ann@example, at most 100 characters")
        user_id = f"user_{random_name()}"
        status = await self._create(account=account_id, user=user_id, name=name, role=role, most=MOST)
        if status == "taken":
            raise InvalidParameter("name: is in use")
        if status == "full":
            raise InvalidParameter(f"name: at most {MOST} users of an account")
        found = await self.get(account_id, user_id)
        if found is None:
            raise NotFound(f"no account {account_id!r}")
        return found

    async def list(self, account_id: str) -> Sequence[User]:
        """List the invited users, oldest first."""
        ids: Sequence[str] = await self._redis.zrange(redis_key("users", account_id), 0, -1)
        return [read_user(*each) for each in (await read_records(self._redis, ids, "user", account_id)).items()]

    async def get(self, account_id: str, user_id: str) -> User | None:
        if not _USER_ID.fullmatch(user_id):
            return None
        row: dict[str, str] = await self._redis.hgetall(redis_key("user", account_id, user_id))
        return read_user(user_id, row) if row else None

    async def remove(self, account_id: str, user_id: str) -> bool:
        """End the user's sessions and links, and revoke the keys it made; False when there is none."""
        return bool(await self._remove(account=account_id, user=user_id))


def read_user(user_id: str, row: Mapping[str, str]) -> User:
    return User(
        id=user_id,
        name=row["name"],
        role=Role(row["role"]),
        has_password="password" in row,
        created_at=from_epoch_ms(row["created"]),
    )


class AccountStore:
    """Keeps accounts in Redis, with argon2id hashes of their passwords."""

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._create = Script(redis, "accounts/create_account")
        self._disable = Script(redis, "accounts/disable_account")
        self._find = Script(redis, "accounts/find_account")
        self._find_user = Script(redis, "accounts/find_user")
        self._passwords = Passwords(redis)

    async def create(
        self, name: str, *, plan_a: str = "basic", plan_b: str = "free", password: str | None = None
    ) -> Account:
        """Create an account.

        Raises `InvalidParameter` for a name in use, an unknown plan or a password of a wrong length.
        """
        name = name.strip()
        if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise InvalidParameter("name: must be 1 to 100 printable characters")
        self._check_plans(plan_a, plan_b)
        account_id = f"acct_{random_name()}"
        password_hash = None if password is None else await self._passwords.hash(password)
        status = await self._create(
            account=account_id, name=name, plan_a=plan_a, plan_b=plan_b, password_hash=password_hash
        )
        if status == "taken":
            raise InvalidParameter(f"name: an account called {name!r} exists")
        return await self._existing(account_id)

    async def ids(self) -> Sequence[str]:
        """List the ids of all accounts, oldest first."""
        return await self._redis.zrange(redis_key("accounts"), 0, -1)

    async def list(self) -> Sequence[Account]:
        """List all accounts, oldest first."""
        return [read_account(*each) for each in (await read_records(self._redis, await self.ids(), "account")).items()]

    async def get(self, id_or_name: str) -> Account | None:
        account_id, cells = await self._find(id_or_name=id_or_name)
        return read_account(account_id, pairs(cells)) if cells else None

    async def set_plans(self, account_id: str, plan_a: str | None = None, plan_b: str | None = None) -> Account:
        """Change plans; an open window's count is unchanged. Raises `NotFound`, `InvalidParameter`."""
        self._check_plans(plan_a, plan_b)
        await self._existing(account_id)
        plans = {"plan_a": plan_a, "plan_b": plan_b}
        changed = {field: plan for field, plan in plans.items() if plan is not None}
        if changed:
            await self._redis.hset(redis_key("account", account_id), mapping=changed)
        return await self._existing(account_id)

    async def set_disabled(self, account_id: str, disabled: bool) -> Account:
        """Disable or enable an account.

        A disabled account's keys and password stop working with the next request; its sessions and links end for good.
        """
        await self._existing(account_id)
        if disabled:
            await self._disable(account=account_id)
        else:
            await self._redis.hdel(redis_key("account", account_id), "disabled")
        return await self._existing(account_id)

    async def set_password(self, account_id: str, password: str, *, user_id: str = "") -> str:
        """Set the password of the account's own user, or of an invited one; return the new credential version.

        Every session and link of that user ends. Raises `NotFound`, `InvalidParameter`.
        """
        return await self._passwords.set(CUSTOMERS.holder(account_id, user_id), password)

    async def check_password(self, name: str, password: str, *, owner_of: str = "") -> SignIn | None:
        """Return who signs in, if the password is right.

        `name` is the account's name or id, or an invited user's name. An unknown name takes as long as a wrong
        password: one round trip, one hash. With `owner_of`, whoever is not an owner of that account is unknown.
        """
        account_id, user_id, credential_version, *cells = await self._find_user(id_or_name=name, within=owner_of)
        row, own = pairs(cells[0]), pairs(cells[1])
        matches = await self._passwords.matches((own if user_id else row).get("password"), password)
        if not matches or "disabled" in row:
            return None
        account = read_account(account_id, row)
        user = read_user(user_id, own) if user_id else User.first(account)
        if owner_of and user.role is not Role.OWNER:
            return None
        return SignIn(account=account, user=user, credential_version=credential_version)

    def _check_plans(self, plan_a: str | None, plan_b: str | None) -> None:
        for variant, name in ((Variant.A, plan_a), (Variant.B, plan_b)):
            if name is not None and (variant, name) not in self._settings.plan_table:
                known = ", ".join(plan.name for plan in self._settings.plans_of(variant))
                own = "" if self._settings.plans else " (plans of your own: set ATELIER_PLANS here as for the service)"
                raise InvalidParameter(f"plan_{variant}: must be one of {known}{own}")

    async def _existing(self, account_id: str) -> Account:
        row: dict[str, str] = await self._redis.hgetall(redis_key("account", account_id))
        if not row:
            raise NotFound(f"no account {account_id!r}")
        return read_account(account_id, row)


def read_account(account_id: str, row: Mapping[str, str]) -> Account:
    return Account(
        id=account_id,
        name=row["name"],
        plan_a=row["plan_a"],
        plan_b=row["plan_b"],
        disabled="disabled" in row,
        created_at=from_epoch_ms(row["created"]),
    )


class OperatorStore:
    """Keeps operators in Redis, with argon2id hashes of their passwords."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._passwords = Passwords(redis)

    async def create(self, name: str, *, password: str | None = None) -> Operator:
        """Create an operator.

        Raises `InvalidParameter` for a name in use, and for an invalid name or password.
        """
        if not _OPERATOR_NAME.fullmatch(name):
            raise InvalidParameter("name: must be 1 to 63 of a-z 0-9 . _ -, a letter or digit first")
        hashed = None if password is None else await self._passwords.hash(password)
        seconds, micros = await self._redis.time()
        created = seconds * 1000 + micros // 1000
        pipeline = self._redis.pipeline()
        pipeline.hsetnx(redis_key("operator", name), "created", created)
        pipeline.zadd(redis_key("operators"), {name: created}, nx=True)
        is_new, _ = await pipeline.execute()
        if not is_new:
            raise InvalidParameter(f"name: an operator called {name!r} exists")
        # a version of its own: nothing that was given to an earlier operator of this name is good for this one
        row = {"created": created, "password_changes": created} | ({} if hashed is None else {"password": hashed})
        await self._redis.hset(redis_key("operator", name), mapping=row)
        return _read_operator(name, {field: str(value) for field, value in row.items()})

    async def list(self) -> Sequence[Operator]:
        """List all operators, oldest first."""
        names: list[str] = await self._redis.zrange(redis_key("operators"), 0, -1)
        rows = await read_records(self._redis, names, "operator")
        return [_read_operator(name, row) for name, row in rows.items() if "created" in row]

    async def get(self, name: str) -> Operator | None:
        row = await self._row(name)
        return _read_operator(name, row) if row else None

    async def set_password(self, name: str, password: str) -> str:
        """Set the password, end the operator's sessions and links, and return the new credential version.

        Raises `NotFound`, `InvalidParameter`.
        """
        return await self._passwords.set(OPERATORS.holder(name), password)

    async def check_password(self, name: str, password: str) -> Operator | None:
        """Return the operator if the password is right. An unknown name takes as long as a wrong password."""
        row = await self._row(name if _OPERATOR_NAME.fullmatch(name) else "")
        matches = await self._passwords.matches(row.get("password"), password)
        return _read_operator(name, row) if matches else None

    async def delete(self, name: str) -> bool:
        """Remove an operator, whose sessions and links end; False when there is none."""
        pipeline = self._redis.pipeline()
        pipeline.delete(redis_key("operator", name))
        pipeline.zrem(redis_key("operators"), name)
        deleted, _ = await pipeline.execute()
        return bool(deleted)

    async def _row(self, name: str) -> Mapping[str, str]:
        row: dict[str, str] = await self._redis.hgetall(redis_key("operator", name))
        return row if "created" in row else {}


def _read_operator(name: str, row: Mapping[str, str]) -> Operator:
    return Operator(
        name=name,
        created_at=from_epoch_ms(row["created"]),
        has_password="password" in row,
        credential_version=f"0.{row.get('password_changes', '0')}",  # credential_version.lua writes the same
    )
