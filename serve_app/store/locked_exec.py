"""A program that takes a lock and becomes another: `locked_exec.py DESCRIPTOR COMMAND [ARGUMENT ...]`.

Its caller's child ends as soon as COMMAND runs, or could not take the lock of the open file DESCRIPTOR. COMMAND is
nobody's child then: Ray ends the children of a worker that ends.
"""

import fcntl
import os
import sys


def locked_command(descriptor: int, command: list[str]) -> list[str]:
    """Return how to run `command` under the lock, without the packages that a server does not need."""
    return [sys.executable, "-I", "-S", __file__, str(descriptor), *command]


def _become(descriptor: int, command: list[str]) -> None:
    until_exec, closed_by_exec = os.pipe()
    if os.fork():
        os.close(closed_by_exec)
        os.read(until_exec, 1)
        os._exit(0)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
