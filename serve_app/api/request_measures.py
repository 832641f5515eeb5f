"""Counts requests for `/metrics`, by the pattern of their route.

An address would be a label for each job.
"""

from starlette.routing import Route
from starlette.types import Scope

from serve_app.api.context import RequestContext
from serve_app.domain import metrics
from serve_app.stores.measures import Measures

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD, NO_ROUTE, NO_INTERFACE = "other", "unmatched", "none"


class RequestMeasures:
    def __init__(self, measures: Measures) -> None:
        self._measures = measures

    def add(self, scope: Scope, context: RequestContext, *, status: int, seconds: float) -> None:
        """Count a request after its answer; `scope` is the applications' own, which names the route."""
        route = context.route or route_pattern(scope)
        variant = context.caller.variant if context.caller else context.variant
        interface = variant or NO_INTERFACE
        method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        self._measures.count(metrics.HTTP_REQUESTS, interface, method, route, str(status))
        self._measures.observe(metrics.HTTP_SECONDS, seconds, route)
        if context.error_code:
            self._measures.count(metrics.HTTP_ERRORS, interface, context.error_code)


def route_pattern(scope: Scope) -> str:
    """Return a request's pattern, as `/v1/jobs/{job_id}`, with the prefix of the application that has it.

    Of files, and of paths that no application has, it is the prefix alone.
    """
    root: str = scope.get("root_path", "")
    mounted = root.removeprefix(scope.get("app_root_path", root))
    route = scope.get("route")
    return mounted + route.path if isinstance(route, Route) else mounted or NO_ROUTE
