"""What a server's start does to the garbage collector, seen in a process of its own."""

import subprocess
import sys

PROGRAM = """
import gc
from serve_app.service.process import THRESHOLDS, freeze_startup_objects
freeze_startup_objects()
assert gc.get_freeze_count() > 5_000, gc.get_freeze_count()
assert gc.get_threshold() == THRESHOLDS
assert gc.isenabled()
"""


def test_what_a_server_loaded_at_its_start_is_not_walked_by_the_garbage_collector_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
