"""What a server's start does to its process, seen in one of its own."""

import subprocess
import sys

PROGRAM = """
import gc
import resource
from serve_app.http_server import OPEN_FILES, THRESHOLDS, allow_connections, freeze_startup_objects
freeze_startup_objects()
assert gc.get_freeze_count() > 5_000, gc.get_freeze_count()
assert gc.get_threshold() == THRESHOLDS
assert gc.isenabled()
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
allow_connections()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(most, OPEN_FILES), most)
"""


def test_a_server_s_start_spares_the_garbage_collector_and_allows_connections() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
