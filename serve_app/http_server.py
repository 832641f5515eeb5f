"""Adjusts a process that serves requests: garbage collector, open files, what counts as a header."""

import gc
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

THRESHOLDS = (10_000, 20, 50)
"""Python's own thresholds, (700, 10, 10) or (2000, 10, 10), let collections take a seventh of the ingress' processor
time (`benchmarks/RESULTS.md`)."""

OPEN_FILES = 65_536
"""An ingress may have as many files open as Ray gives its drivers."""

_on_header = HttpToolsProtocol.on_header


def drop_trailers() -> None:
    """Keep every HTTP server of this process from adding a request's trailers to its headers.

    uvicorn 0.54 appends them to the list that the application reads, where they pass for headers that nobody in front
    has seen: a credential, or what a proxy removes. Its other parser, h11, keeps them apart.
    """
    HttpToolsProtocol.on_header = _on_header_alone


def _on_header_alone(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
    if "method" not in self.scope:  # it is set when the headers are complete
        _on_header(self, name, value)


def freeze_startup_objects() -> None:
    """Exempt all present objects from garbage collection, and collect later ones less often.

    A server calls it once it has started: its modules, routes and models are hundreds of thousands of objects that
    never become garbage, and a full collection, which walks them, stops every request for a tenth of a second.
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
