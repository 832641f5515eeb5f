"""Takes from HAProxy's admin socket how many errors it has answered itself since the last call.

It is also a program, which the wrapper runs before a new HAProxy takes the place of an old one: what the old one has
counted is kept in a file until it is taken. Nothing but the standard library is imported, for a start in milliseconds.
"""

import fcntl
import json
import re
import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

TABLE = "atelier_answers"
"""The stick table of `answers.cfg`; `frontend.cfg` counts in it under one key."""
_COMMANDS = f"show table {TABLE}; set table {TABLE} key errors data.gpc0 0 data.gpc1 0\n".encode()
_LIMIT_S = 1.0


def take(admin_socket: Path, *, keep: bool = False) -> Counter[str]:
    """Return what was answered since the last call on this machine, by whichever HAProxy, as `4xx` and `5xx`.

    With `keep` the next call returns it as well. Blocks for a second at most while HAProxy does not answer. Raises
    `OSError` where there is no folder for its socket yet.
    """
    with admin_socket.with_suffix(".answers").open("a+") as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        kept.seek(0)
        found = Counter(json.loads(kept.read() or "{}")) + _count(admin_socket)
        kept.truncate(0)
        if keep:
            json.dump(found, kept)
        return found


def _count(admin_socket: Path) -> Counter[str]:
    """Return what the HAProxy that runs has counted, and set it back; nothing where none answers."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_LIMIT_S)
        connection.connect(str(admin_socket))
        connection.sendall(_COMMANDS)
        text = b"".join(iter(partial(connection.recv, 4096), b"")).decode()
        if row := re.search(r"gpc0=([0-9]+) gpc1=([0-9]+)", text):
            return Counter({"4xx": int(row[1]), "5xx": int(row[2])})
    return Counter()


if __name__ == "__main__":
    take(Path(sys.argv[1]), keep=True)
