"""Follows a job by the events that the service sends."""

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx

from serve_app.client.errors import WaitTimeout
from serve_app.client.protocol import NextLine, Operation, Service, Sleep, path_of
from serve_app.client.records import Event, JobState, Preview, Record

QUIET_S = 45.0
"""A stream that says nothing for this long is dead: the service sends something every 15 seconds."""
RECONNECT_S = 1.0


class Following:
    """One job's events, through as many streams as that takes; `next` gives them one by one."""

    def __init__(
        self,
        service: Service,
        job: JobState,
        update: Callable[[Record], None],
        lines_of: Callable[[httpx.Response], Any],
    ) -> None:
        """Follow a job, whose newest record `update` takes. `lines_of` is what the client reads a response's lines by."""
        self.response: httpx.Response | None = None
        self._service, self._job, self._update, self._lines_of = service, job, update, lines_of
        self._lines: Any = None
        self._last_id = ""
        self._record = Record(job.id, job.status, job.progress)

    def next(self, timeout: float | None) -> Operation[Event]:
        """Return the next event that tells something new. Raises `WaitTimeout` after `timeout` seconds without one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = QUIET_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(f"{self._job.id} is still {self._job.status} after {timeout:g} s")
            try:
                if self._lines is None:
                    yield from self._open(min(QUIET_S, left))
                sent = yield from self._read()
            except httpx.TransportError:
                self._lines = None
                continue
            if sent is None:
                self._lines = None
                yield Sleep(RECONNECT_S)
            elif (event := self._told(sent)) is not None:
                return event

    def _open(self, seconds: float) -> Operation[None]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": self._last_id} if self._last_id else {})
        call = self._service.call("GET", path_of("/v1/jobs", self._job.id, "events"), headers)
        self.response = yield from self._service.send(replace(call, timeout=seconds, most=seconds, is_stream=True))
        self._lines = self._lines_of(self.response)

    def _read(self) -> Operation[Mapping[str, str] | None]:
        """Read the fields of the next event, none of a comment; None at the end of the stream."""
        fields: dict[str, str] = {}
        while (line := (yield NextLine(self._lines))) is not None:
            assert isinstance(line, str)
            if not line or line.startswith(":"):  # a comment, after which the deadline is looked at
                return fields
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
        return None

    def _told(self, fields: Mapping[str, str]) -> Event | None:
        name, data = fields.get("event"), json.loads(fields.get("data", "{}"))
        self._last_id = fields.get("id", self._last_id)
        if name == "preview":
            preview = Preview(data["index"], data["step"], base64.b64decode(data["image"]))
            return replace(self._job.event, preview=preview)
        before = self._job.event
        if name in ("snapshot", "end"):
            self._record = Record.read(data)
        elif name == "progress":
            self._record = replace(self._record, status=data["status"], progress=data["progress"])
        else:
            return None
        self._update(self._record)
        after = self._job.event
        return after if (after.status, after.progress) != (before.status, before.progress) else None
