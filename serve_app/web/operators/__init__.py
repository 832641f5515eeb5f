"""The operators' pages: the service's state, accounts, failed jobs, LoRAs and the audit log.

They work without JavaScript.

app.mount("/operators", operators_app())
"""

from fastapi import FastAPI, Request
from starlette.responses import Response

from serve_app.api.openapi import new_app
from serve_app.web.operators.accounts import router as accounts_router
from serve_app.web.operators.jobs import router as jobs_router
from serve_app.web.operators.overview import router as overview_router
from serve_app.web.operators.pages import SignInRequired, problem_page
from serve_app.web.operators.sign_in import router as sign_in_router
from serve_app.web.site.forms import redirect, root_of
from serve_app.web.site.pages import answer_with_pages

ROUTES = (
    *sign_in_router.routes,
    *overview_router.routes,
    *accounts_router.routes,
    *jobs_router.routes,
)


def operators_app() -> FastAPI:
    """Build the pages' application, which `Protection` goes around as around the console.

    No session of a customer opens one.
    """
    app = new_app(routes=[*ROUTES])
    app.add_exception_handler(SignInRequired, _to_sign_in)
    answer_with_pages(app, problem_page)
    return app


async def _to_sign_in(request: Request, _error: Exception) -> Response:
    """Redirect to the sign-in page, also from a part of a page that refreshes itself."""
    if "hx-request" in request.headers:
        return Response(headers={"HX-Redirect": f"{root_of(request)}/sign-in"})
    return redirect(request, "sign-in")
