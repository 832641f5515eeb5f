"""Watches a process's event loop: while it stands nobody is answered, and nothing that runs on it can say so."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from serve_app.domain import metrics
from serve_app.store.measures import Measures

log = logging.getLogger(__name__)

STALL_S = 1.0
"""A loop that stands for this long is reported. Serve gives a replica 7 s to answer a health check."""
BEAT_S = 0.25
_TOLD_AT = {round(seconds / BEAT_S) + 2 for seconds in (STALL_S, 10, 100, 1000)}
"""After these numbers of missed beats the log says where the loop stands."""


def watch_loop(measures: Measures) -> Callable[[], None]:
    """Watch the running event loop until what is returned is called.

    While it stands, the log says for how long and by which call; once it goes on, log and `measures` say how long it
    stood. Where the whole process stood, stopped or without a processor, there is no call to name.
    """
    watch = _Watch(measures)
    threading.Thread(target=watch.look_forever, name="event loop watch", daemon=True).start()
    return watch.is_over.set


class _Watch:
    def __init__(self, measures: Measures) -> None:
        self._measures = measures
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._missed, self._beat_at = 0, time.monotonic()
        self.is_over = threading.Event()
        self._loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        """Note by how much this beat is late; it runs on the loop."""
        if self.is_over.is_set():
            return
        now = time.monotonic()
        stood = now - self._beat_at - BEAT_S
        self._missed, self._beat_at = 0, now
        if stood >= STALL_S:
            log.warning("the event loop stood still for %.1f s", stood)
            self._measures.count(metrics.LOOP_STALLED, by=stood)
        self._loop.call_later(BEAT_S, self._beat)

    def look_forever(self) -> None:
        """Runs in a thread, and counts its own rounds instead of time: a process that was stopped has made none."""
        while not self.is_over.wait(BEAT_S):
            self._missed += 1
            if self._missed in _TOLD_AT:
                frame = sys._current_frames().get(self._thread_id)  # pyright: ignore[reportPrivateUsage]
                stood, stack = time.monotonic() - self._beat_at - BEAT_S, "".join(traceback.format_stack(frame))
                log.warning("the event loop has stood still for %.1f s:\n%s", stood, stack)
