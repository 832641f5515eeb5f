"""A loop that stands is told of by a thread beside it, and counted once it goes on."""

import asyncio
import threading
from logging import LogRecord

import pytest
import uvloop

from serve_app.domain import metrics
from serve_app.domain.metrics import field_of
from serve_app.settings import Settings
from serve_app.store.process import STALL_S, open_process, watch_loop
from tests.support import wait_until


@pytest.mark.slow
def test_a_loop_that_stands_says_where_and_is_counted(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    told = threading.Event()
    lines: list[str] = []

    def note(record: LogRecord) -> bool:
        if record.name.endswith("store.process"):
            lines.append(record.getMessage())
            told.set()
        return True

    async def stand() -> float:
        async with open_process(settings) as process:
            end = watch_loop(process.measures)
            await asyncio.sleep(0)
            a_call_that_blocks(told)
            await wait_until(lambda: len(lines) == 2)
            end()
            await process.measures.send()
            return (await process.measures.measured())[field_of(metrics.LOOP_STALLED)]

    caplog.handler.addFilter(note)
    counted_s = uvloop.run(stand())
    assert "a_call_that_blocks" in lines[0], "while it stood, by the thread"
    assert lines[1].startswith("the event loop stood still for ")
    assert counted_s >= STALL_S


def a_call_that_blocks(told: threading.Event) -> None:
    assert told.wait(30)
