"""Reads a customer's file in a process of its own, which limits its memory and its processor time itself."""

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from serve_app.domain.errors import InvalidParameter

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]


async def read_in_process(
    module: str, *arguments: object, kind: str, seconds: float, processor_seconds: float
) -> dict[str, Any]:
    """Run `python -m module` with `arguments`, and return the JSON object of its last line.

    Raises `InvalidParameter` for the parameter `file`, called a `kind`: where it takes longer than `seconds`, where the
    kernel ended it because it took more than the `processor_seconds` that it allowed itself, where it ended otherwise,
    and with the reason that it gives as `refused`.
    """
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", module, *map(str, arguments))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        raise InvalidParameter(f"file: reading it takes longer than {seconds:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGPROF:
        raise InvalidParameter(f"file: reading it takes more than {processor_seconds:g} s of a processor")
    if process.returncode:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        log.warning("%s ended with %d: %s", module, process.returncode, "".join(last)[:200])
        raise InvalidParameter(f"file: it cannot be read as {kind}")
    answer = json.loads(out.splitlines()[-1])
    if "refused" in answer:
        raise InvalidParameter(f"file: {answer['refused']}")
    return answer
