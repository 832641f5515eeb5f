"""Runs the service in a child process, so that nothing stays behind whatever ends it.

While Ray starts, its C++ code would answer a signal with a stack trace and leave the processes it has started; later it
ends its whole process when it loses its control service. The supervisor holds nothing of Ray: it stops the child, or
kills it, and then cleans up.
"""

import contextlib
import mmap
import os
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from types import FrameType
from typing import NoReturn

SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
    SIGNALS.append(signal.SIGHUP)


class Child:
    """Holds what the child tells its supervisor, in memory that both share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2)

    @contextlib.contextmanager
    def uninterruptible(self) -> Generator[None]:
        """While it lasts, a signal kills the child instead of interrupting it."""
        self._memory[0] = 1
        try:
            yield
        finally:
            raise_on_signals()  # Ray has put its own handlers in place
            self._memory[0] = 0

    @property
    def is_uninterruptible(self) -> bool:
        return bool(self._memory[0])

    @property
    def has_finished(self) -> bool:
        """The child has ended by itself, with an exit code of its own choice."""
        return bool(self._memory[1])

    def finish(self, code: int) -> NoReturn:
        self._memory[1] = 1
        os._exit(code)  # unloading libraries would only take time


def supervise(
    run: Callable[[Child], int], *, clean_up: Callable[[int], None], on_stop: Callable[[], None], stop_limit_s: float
) -> int | None:
    """Run `run` in a child process and return its exit code; None when the child ended without one.

    A signal interrupts `run` (`KeyboardInterrupt`), or kills it after `stop_limit_s`; the code is then 0. Once the
    child has ended, `clean_up` gets the id of its session, in which its descendants may still run. A child that has
    lost its supervisor calls it itself.
    """
    child = Child()
    lifeline, holder = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        os.close(holder)
        _run_child(run, child, lifeline, clean_up)
    os.close(lifeline)
    stopping = _stop_child_on_signals(pid, child, on_stop, stop_limit_s)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.close(holder)
    clean_up(pid)
    if stopping.is_set():
        return 0
    return os.waitstatus_to_exitcode(status) if child.has_finished else None


def raise_on_signals() -> None:
    """Let each signal raise `KeyboardInterrupt` in this process."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


def _run_child(run: Callable[[Child], int], child: Child, lifeline: int, clean_up: Callable[[int], None]) -> NoReturn:
    os.setsid()  # Ctrl-C on the terminal is for the supervisor alone
    lost = threading.Event()
    code = 1
    try:
        raise_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_stop_with_supervisor, args=[lifeline, lost], daemon=True).start()
        code = run(child)
    except KeyboardInterrupt:
        code = 0
    except BaseException:  # noqa: BLE001 - a defect: the process ends here, so nobody else would print it
        traceback.print_exc()
    if lost.is_set():
        clean_up(os.getpid())
    child.finish(code)


def _stop_with_supervisor(lifeline: int, lost: threading.Event) -> None:
    """Interrupt this process when the supervisor is gone: only it holds the other end of the pipe."""
    os.read(lifeline, 1)
    lost.set()
    os.kill(os.getpid(), signal.SIGTERM)


def _stop_child_on_signals(pid: int, child: Child, on_stop: Callable[[], None], stop_limit_s: float) -> threading.Event:
    """Stop the child at the first signal; the event is set from then on."""
    stopping = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        if stopping.is_set():
            return
        stopping.set()
        on_stop()
        os.kill(pid, signal.SIGKILL if child.is_uninterruptible else signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, stop_limit_s)

    def kill(_number: int, _frame: FrameType | None) -> None:
        os.kill(pid, signal.SIGKILL)

    for number in SIGNALS:
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, kill)
    return stopping
