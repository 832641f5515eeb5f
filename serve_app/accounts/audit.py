"""The audit log: one append-only stream for each account, whose rows are removed by age alone."""

import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from serve_app.domain.audit import Act, Actor, AuditRow, operator
from serve_app.domain.durations import epoch_ms, from_epoch_ms, milliseconds
from serve_app.domain.errors import UnreadableRecord
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import RedisClient, in_parts
from serve_app.store.script import Script, pairs

MAX_ROWS = 10_000
"""An account's log keeps at most this many rows, about 2 MB."""
MAX_FAILED_SIGN_INS = 1_000
"""Failed sign-ins have a log of their own, so that they push out nothing that was done by who can sign in."""
MAX_TEXT = 200
REFUSED = ":refused"
LOOKED_AT_ONCE = 500
"""One call of the script looks at this many rows, which takes a few ms, so that nobody waits behind a search."""
CALLS = 4
"""One page looks at this many times as many rows."""
LOGS_AT_ONCE = 400
"""One call of the script reads this many logs; their rows are put together here."""
MOST_LOGS = 2_000
"""A page over all logs reads at most this many of them: those written last."""
_ROW_ID = re.compile(r"\d{1,15}-\d{1,10}")


class AuditPage(NamedTuple):
    """Rows, and the id before which the next page begins; empty on the last."""

    rows: list[AuditRow]
    next: str


class AuditLog:
    """Appends and lists rows of an account's log.

    A log is named by a pseudonym, so that it may stay when its account is deleted.
    """

    def __init__(self, redis: RedisClient, settings: Settings) -> None:
        self._redis = redis
        self._settings = settings
        self._append = Script(redis, "accounts/append_audit")
        self._recent = Script(redis, "accounts/recent_audit")

    async def record(self, log: str, act: Act, by: Actor, subject: str = "", *, entry: str | None = None) -> None:
        """Append one row; a call that is repeated with its `entry` appends none. Raises `StoreUnavailable`.

        `log` is an account's id, or what `operator` makes of an operator's name for acts upon operators. A failed
        sign-in is recorded only of an account or operator that exists, and takes as long for any other.
        """
        is_refused = act is Act.SIGN_IN_FAILED
        holder = log if log.startswith(operator("")) else f"account:{log}"
        await self._append(
            log=self.pseudonym(log) + (REFUSED if is_refused else ""),
            holder=holder if is_refused else "",
            entry=entry or secrets.token_hex(8),
            actor=by.name[:MAX_TEXT],
            action=act,
            subject=subject[:MAX_TEXT],
            address=by.address[:MAX_TEXT],
            max_rows=MAX_FAILED_SIGN_INS if is_refused else MAX_ROWS,
            life_ms=milliseconds(self._settings.audit_life),
        )

    async def rows(self, account_id: str | None = None, *, since: datetime | None = None) -> list[AuditRow]:
        """List the rows of one account, or of all, oldest first."""
        pseudonym = "" if account_id is None else self.pseudonym(account_id)
        logs = (
            [pseudonym, pseudonym + REFUSED] if pseudonym else await self._redis.zrange(redis_key("audit_logs"), 0, -1)
        )
        oldest = datetime.now(UTC) - self._settings.audit_life
        start_ms = max(0, epoch_ms(oldest if since is None else max(since, oldest)))
        found: list[AuditRow] = []
        for log in logs:
            rows: Sequence[tuple[str, Mapping[str, str]]]
            rows = await self._redis.xrange(redis_key("audit", log), min=start_ms)
            found += [read_audit_row(log, row_id, fields) for row_id, fields in rows]
        return sorted(found, key=lambda row: row.time)

    def pseudonym(self, account_id: str) -> str:
        """Name an account's log; only the pepper connects the name with the account."""
        text = f"audit log of {account_id}".encode()
        return hmac.digest(self._settings.pepper_bytes, text, "sha256").hex()[:32]

    async def page(self, *, log: str = "", act: str = "", before: str = "", limit: int) -> AuditPage:
        """List the newest rows of one log or all, of one act or any, before a row's id.

        A page of a rare act may be short and yet have a next one: the next `CALLS` × `LOOKED_AT_ONCE` rows.
        """
        place = before if _ROW_ID.fullmatch(before) else ""
        found: list[AuditRow] = []
        logs = [log, log + REFUSED] if log else await self._written_last()
        for _ in range(CALLS):
            rows, place = await self._newest(logs, act, place, limit - len(found))
            found += [read_audit_row(name, row_id, pairs(flat)) for name, row_id, flat in rows]
            if not place or len(found) >= limit:
                break
        return AuditPage(found, place)

    async def _written_last(self) -> list[str]:
        return await self._redis.zrevrange(redis_key("audit_logs"), 0, MOST_LOGS - 1)

    async def _newest(
        self, logs: Sequence[str], act: str, before: str, limit: int
    ) -> tuple[list[tuple[str, str, Sequence[str]]], str]:
        """Return about `limit` rows, and the id down to which all of these logs were looked at; empty for the end."""
        found: list[tuple[str, str, Sequence[str]]] = []
        ends: list[str] = []
        for part in in_parts(logs, LOGS_AT_ONCE):
            rows, end = await self._recent(action=act, before=before, limit=limit, most=LOOKED_AT_ONCE, logs=part)
            found += rows
            ends += [end] if end else []
        found.sort(key=lambda row: _place(row[1]), reverse=True)
        if len(found) > limit:
            ends.append(found[limit - 1][1])
        end = max(ends, key=_place, default="")
        return [row for row in found if not end or _place(row[1]) >= _place(end)], end


def _place(row_id: str) -> tuple[int, int]:
    ms, _, number = row_id.partition("-")
    return int(ms), int(number)


def read_audit_row(name: str, row_id: str, fields: Mapping[str, str]) -> AuditRow:
    """Read a row of the log `name`. Raises `UnreadableRecord`."""
    try:
        act = fields["action"]
        return AuditRow(
            time=from_epoch_ms(row_id.partition("-")[0]),
            log=name.removesuffix(REFUSED),
            actor=fields["actor"],
            act=Act(act) if act in set(Act) else act,
            subject=fields["subject"],
            address=fields["address"],
        )
    except KeyError as error:
        raise UnreadableRecord(f"audit row {row_id}: {error}") from error
