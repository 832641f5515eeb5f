"""The supervisor of `atelier up`: whatever ends its child, it cleans up and has an exit code."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import is_alive
from tests.support import ROOT, until

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from deployments.supervisor import supervise

home, body = Path(sys.argv[1]), sys.argv[2]

def say(name, text=""):
    (home / (name + ".draft")).write_text(str(text))
    (home / (name + ".draft")).rename(home / name)

def run(child):
    scope = globals() | {"child": child, "code": 0}
    exec(body, scope)
    return scope["code"]

def clean_up(session):
    say("cleaned", session)

say("code", supervise(run, clean_up=clean_up, on_stop=lambda: say("stopping"), stop_limit_s=1.0))
"""
FOREVER = "say('ready', os.getpid())\nwhile True: time.sleep(0.05)"


class Supervised:
    def __init__(self, home: Path, body: str, *, has_terminal: bool = True) -> None:
        self.home = home
        before = ["env", "--default-signal=HUP"] if has_terminal else ["nohup"]
        self.process = subprocess.Popen([*before, sys.executable, "-c", PROGRAM, str(home), body], cwd=ROOT)

    def said(self, name: str) -> str:
        """What was said, once it was said."""
        until((self.home / name).exists, 30, why=lambda: f"never said {name}")
        return (self.home / name).read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.said("ready")
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    ready = tmp_path / "ready"
    if ready.exists():
        assert not is_alive(int(ready.read_text())), "the child has outlived its supervisor"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("code = 3", "3"),
        ("pass", "0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "None"),
        ("os._exit(7)", "None"),
        ("os.abort()", "None"),
    ],
)
def test_a_child_that_ends_is_cleaned_up_after(home: Path, body: str, code: str) -> None:
    supervised = Supervised(home, body)
    assert supervised.said("code") == code
    assert supervised.said("cleaned")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_child(home: Path, number: signal.Signals) -> None:
    supervised = Supervised(home, f"try:\n exec({FOREVER!r})\nfinally:\n say('interrupted')")
    supervised.stop(number)
    assert supervised.said("code") == "0"
    supervised.said("interrupted")
    supervised.said("stopping")
    supervised.said("cleaned")


def test_it_outlives_its_terminal_under_nohup(home: Path) -> None:
    supervised = Supervised(home, FOREVER, has_terminal=False)
    supervised.stop(signal.SIGHUP)
    assert not (home / "stopping").exists()
    supervised.stop()
    assert supervised.said("code") == "0"


@pytest.mark.parametrize(
    "body",
    [
        f"with child.uninterruptible():\n exec({FOREVER!r})",
        f"while True:\n try:\n  exec({FOREVER!r})\n except KeyboardInterrupt: pass",
    ],
    ids=["it must not be interrupted", "it does not stop in time"],
)
def test_a_child_is_killed(home: Path, body: str) -> None:
    supervised = Supervised(home, body)
    supervised.stop()
    assert supervised.said("code") == "0"
    supervised.said("cleaned")


def test_a_child_that_has_lost_its_supervisor_stops_and_cleans_up_itself(home: Path) -> None:
    supervised = Supervised(home, FOREVER)
    child = int(supervised.said("ready"))
    supervised.end()
    assert int(supervised.said("cleaned")) == child
    until(lambda: not is_alive(child), 30)


def test_the_clean_up_gets_the_session_of_what_the_child_started(home: Path) -> None:
    body = "import subprocess\nsay('grandchild', subprocess.Popen(['sleep', '60']).pid)"
    supervised = Supervised(home, body)
    grandchild = int(supervised.said("grandchild"))
    try:
        assert os.getsid(grandchild) == int(supervised.said("cleaned"))
    finally:
        os.kill(grandchild, signal.SIGKILL)
