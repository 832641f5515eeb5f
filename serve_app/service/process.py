"""Adjusts a process that serves requests: Python's garbage collector, and how many files it may open."""

import gc
import resource

THRESHOLDS = (10_000, 20, 50)
"""Python's own, (700, 10, 10) or (2000, 10, 10), let collections take a seventh of the ingress' processor time (`benchmarks/RESULTS.md`)."""

OPEN_FILES = 65_536
"""As many as Ray gives its drivers."""


def freeze_startup_objects() -> None:
    """Exempt all objects of now from garbage collection, and collect later ones less often.

    For the end of a server's start: its modules, routes and models are hundreds of thousands of objects that never
    become garbage, and a full collection, which walks them, stops every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def allow_connections() -> None:
    """Raise the process's limit of open files, often 1,024, to what the system allows: a caller holds one.

    HAProxy does so by itself, Ray only in drivers.
    """
    given, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(given, min(most, OPEN_FILES)), most))
