"""Stops the embedded Redis after `serve run`, as a program that waits for the end of its input.

Serve offers no hook for its own end, and none runs in a process that is killed or loses its terminal.
"""

import subprocess
import sys
import time
from pathlib import Path

from serve_app.domain.errors import StoreUnavailable
from serve_app.operations.store_checks import is_service_up
from serve_app.settings import Settings
from serve_app.store.embedded_redis import running_redis, stop_redis
from serve_app.store.redis_client import connect_sync

QUIET_S = 1.0
"""The server is stopped when nobody was connected for this long: a replica that still ends would start it again."""
LEFT_TO_OTHERS_S = 30.0
"""Whoever is still connected after this long belongs to another service on this data directory. A server that is silent
all that time serves nobody."""
POLL_S = 0.1


def stop_redis_after_this_process(settings: Settings) -> None:
    """Start the program, which holds nothing of Ray and outlives this process by seconds."""
    if settings.redis_url:
        return
    command = [sys.executable, "-m", __name__, str(settings.data_dir.resolve())]
    subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # it is open as long as this process lives, and what that starts does not inherit it
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor the end of the terminal is for it
    )


def main(data_dir: Path) -> None:
    sys.stdin.read()
    if _is_unused(data_dir):
        stop_redis(data_dir)


def _is_unused(data_dir: Path) -> bool:
    """Wait until nobody is connected; return False if others go on using the server, or if there is none."""
    deadline = quiet_since = time.monotonic()
    deadline += LEFT_TO_OTHERS_S
    while time.monotonic() - quiet_since < QUIET_S:
        is_late = time.monotonic() > deadline
        try:
            clients = _other_clients(data_dir)
            if clients is None or is_late:
                return False
        except StoreUnavailable:
            if is_late:
                break
            clients = 1
        if clients:
            quiet_since = time.monotonic()
        time.sleep(POLL_S)
    return not is_service_up(Settings(data_dir=data_dir))


def _other_clients(data_dir: Path) -> int | None:
    """Return how many connections the server has besides this one; None without a server.

    Raises `StoreUnavailable` when it does not answer.
    """
    server = running_redis(data_dir)
    if server is None:
        return None
    with connect_sync(server.url) as client:
        return len(client.client_list()) - 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
