"""Adjusts Python's garbage collector in a process that serves requests."""

import gc

THRESHOLDS = (10_000, 20, 50)
"""Python's own, (700, 10, 10) or (2000, 10, 10), let collections take a seventh of the ingress' processor time (`benchmarks/RESULTS.md`)."""


def freeze_startup_objects() -> None:
    """Exempt all objects of now from garbage collection, and collect later ones less often.

    For the end of a server's start: its modules, routes and models are hundreds of thousands of objects that never
    become garbage, and a full collection, which walks them, stops every request for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
