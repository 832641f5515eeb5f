"""Draws many: starts jobs as the plan and the queue allow, and waits for them. A job that was started is never lost."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.client.display import Show
from serve_app.client.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    RateLimited,
    ServiceError,
    Unreachable,
)
from serve_app.client.protocol import BACKOFF_CAP_S, Operation, Service, Sleep
from serve_app.client.records import Record

OF_ONE = (InvalidRequest, Forbidden, NotFound, Conflict)
"""Refusals of one request or job, which say nothing of the others. Any other error would meet all that follow."""


@dataclass(kw_only=True)
class Drawing:
    """The jobs of one call of `map`: `records` holds them in the order of the requests."""

    service: Service
    create: Callable[[dict[str, Any]], Operation[Record]]
    requests: Sequence[dict[str, Any]]
    concurrency: int
    show: Show | None
    records: list[Record] = field(default_factory=list[Record], init=False)
    _open: deque[int] = field(default_factory=deque[int], init=False)
    """The places of the jobs that are not known to have ended, the oldest first."""
    _stopped: ServiceError | Unreachable | None = field(default=None, init=False)
    """Why no more jobs are started."""

    def draw(self) -> Operation[None]:
        """Start all and wait for the oldest whenever no more may be open.

        Raises what stops all requests, as a wrong key does, if no job was started; else the rest come back with it.
        """
        for options in self.requests:
            record = yield from self._started(options)
            if not record.is_final:
                self._open.append(len(self.records))
            self.records.append(record)
        while self._open:
            yield from self._end_oldest()

    def _started(self, options: dict[str, Any]) -> Operation[Record]:
        asked = Record("", "queued", 0, request=options)
        while self._stopped is None:
            if len(self._open) >= self.concurrency:
                yield from self._end_oldest()
                continue
            try:
                return (yield from self.create(options))
            except RateLimited as limited:
                yield from self._make_room(limited)
            except OF_ONE as refusal:
                return _failed(asked, refusal)
            except (ServiceError, Unreachable) as error:
                if not any(record.id for record in self.records):
                    raise
                self._stopped = error
        return _failed(asked, self._stopped)

    def _make_room(self, limited: RateLimited) -> Operation[None]:
        """Wait for a place in the queue, or for the plan's next window."""
        if self._open and limited.code == "queue_full":
            yield from self._end_oldest()
            return
        again = time.monotonic() + (limited.retry_after or BACKOFF_CAP_S)
        while self._open and time.monotonic() < again:
            yield from self._end_oldest()
        if self._stopped is None:
            self._report(limited.message)
            yield Sleep(max(0.0, again - time.monotonic()))

    def _end_oldest(self) -> Operation[None]:
        """Wait for the oldest job; where that cannot be done, leave all open ones as they were last known."""
        place = self._open.popleft()
        known = self.records[place]
        try:
            self.records[place] = yield from self.service.watch(known, None, shows_progress=False)
        except OF_ONE as refusal:
            self.records[place] = _failed(known, refusal)
        except (ServiceError, Unreachable) as error:
            self._stopped = error
            self._open.clear()
        self._report(f"Drawing {len(self.requests)} jobs")

    def _report(self, text: str) -> None:
        if self.show is not None:
            self.show(text, (len(self.records) - len(self._open)) / len(self.requests))


def _failed(record: Record, error: ServiceError | Unreachable) -> Record:
    code, message = (error.code, error.message) if isinstance(error, ServiceError) else ("unreachable", str(error))
    return replace(record, status="failed", error_code=code, error_message=message)
