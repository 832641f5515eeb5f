"""Reads pages of the audit log for operators, newest first, a bounded part at a time."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from redis.asyncio import Redis

from serve_app.domain.audit import AuditRow
from serve_app.stores.audit_log import read_audit_row
from serve_app.stores.script import Script

LOOKED_AT_ONCE = 500
"""Rows that one call of the script looks at: a few ms, so that nobody waits behind a search."""
CALLS = 4
"""Of one page."""
MOST_LOGS = 2_000
"""Logs that a page over all is made of: those written last."""
_ROW_ID = re.compile(r"\d{1,15}-\d{1,10}")


class AuditPage(NamedTuple):
    """Rows, and the id before which the next page begins; empty on the last."""

    rows: list[AuditRow]
    next: str


class AuditReader:
    """Reads the audit log by pages. May raise `StoreUnavailable`."""

    def __init__(self, redis: Redis) -> None:
        self._recent = Script(redis, "recent_audit")

    async def page(self, *, log: str = "", act: str = "", before: str = "", limit: int) -> AuditPage:
        """List the newest rows of one log or all, of one act or any, before a row's id.

        A page of a rare act may be short and yet have a next one: the next `CALLS` × `LOOKED_AT_ONCE` rows.
        """
        place = before if _ROW_ID.fullmatch(before) else ""
        found: list[AuditRow] = []
        for _ in range(CALLS):
            rows, place = await self._recent(
                log=log,
                action=act,
                before=place,
                limit=limit - len(found),
                most=LOOKED_AT_ONCE,
                max_logs=MOST_LOGS,
            )
            found += [read_audit_row(name, row_id, _fields(flat)) for name, row_id, flat in rows]
            if not place or len(found) >= limit:
                break
        return AuditPage(found, place)


def _fields(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
