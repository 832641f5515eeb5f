"""How many replicas the backlog asks for: read in a thread of its own, answered from memory."""

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from serve_app.domain.jobs import Backlog, JobKind
from serve_app.settings import Settings
from serve_app.stores.backlog import read_backlog
from serve_app.stores.embedded import ensure_redis

log = logging.getLogger(__name__)

READ_EVERY_S, STALE_AFTER_S = 0.5, 10.0


class Reading(NamedTuple):
    backlog: Backlog
    at: float


class BacklogPolicy:
    """A Serve autoscaling policy. It runs on the controller's loop ten times a second, for every application at once:
    it never blocks and never raises, and without a fresh reading it leaves the number of replicas as it is.
    """

    def __init__(
        self,
        kind: str,
        target_s: float,
        *,
        stale_after_s: float = STALE_AFTER_S,
        read: Callable[[JobKind], Backlog] | None = None,
    ) -> None:
        self._target_s = target_s
        self._stale_after_s = stale_after_s
        self._shelf: list[Reading] = []
        stop = threading.Event()
        watch = threading.Thread(
            target=_watch, args=(JobKind(kind), read or _read, self._shelf, stop), name=f"{kind}-backlog", daemon=True
        )
        watch.start()
        weakref.finalize(self, stop.set)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        reading = self._shelf[-1] if self._shelf else None
        if reading is None or time.monotonic() - reading.at > self._stale_after_s:
            return context.target_num_replicas, {}
        return wanted_replicas(reading.backlog, self._target_s), {}


def wanted_replicas(backlog: Backlog, target_s: float) -> int:
    """Enough replicas to bring the work down to `target_s` seconds each; one as soon as there is any, none when there is none."""
    if backlog.ready + backlog.leased + backlog.delayed == 0:
        return 0
    return max(1, math.ceil(backlog.seconds / target_s))


def _watch(kind: JobKind, read: Callable[[JobKind], Backlog], shelf: list[Reading], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            shelf[:] = [Reading(read(kind), time.monotonic())]
        except Exception as error:  # noqa: BLE001 - the watch must outlive any outage; a stale reading holds the target
            log.warning("the backlog cannot be read: %r", error)
        stop.wait(READ_EVERY_S)


def _read(kind: JobKind) -> Backlog:
    settings = Settings()
    return read_backlog(settings.redis_url or ensure_redis(settings.data_dir).url, kind)
