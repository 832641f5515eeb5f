"""Checks a safetensors file in a process of its own, of limited memory and time.

`python -m serve_app.safetensors_sandbox PATH` prints the reason why the file is not one that this service loads, or nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

from serve_app.process_limits import limit_memory, limit_processor_time
from serve_app.safetensors_file import UnusableFile, check_safetensors

MEMORY = 384 << 20
"""Bytes beyond what Python and numpy take: with them under 512 MB. The worst header of 8 MiB takes 280 MB of it (measured)."""
PROCESSOR_LIMIT_S = 5
"""A file of 2 GiB takes up to two seconds, the worst header one."""
LIMIT_S = 120.0
_ROOT = Path(__file__).resolve().parent.parent


def check_in_subprocess(path: Path) -> None:
    """Run `check_safetensors` in another process.

    Raises UnusableFile with the reason, OSError when no process starts.
    """
    environment = {"PATH": os.defpath, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "serve_app.safetensors_sandbox", str(path))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UnusableFile(f"the file takes longer than {LIMIT_S:g} s to read") from None
    if done.returncode:
        raise UnusableFile(f"the file cannot be read in {MEMORY >> 20} MiB of memory and {PROCESSOR_LIMIT_S} s")
    if done.stdout:
        raise UnusableFile(done.stdout)


def main(path: str) -> None:
    limit_memory(MEMORY)
    limit_processor_time(PROCESSOR_LIMIT_S)
    try:
        check_safetensors(Path(path))
    except UnusableFile as error:
        sys.stdout.write(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
