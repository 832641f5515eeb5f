"""Limits of the process that reads a customer's file, set by that process itself."""

import math
import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Allow this many bytes of address space beyond what the process takes now, and no core dumps."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_processor_time(seconds: int) -> None:
    """Allow this much processor time from now on; then the kernel ends the process by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
