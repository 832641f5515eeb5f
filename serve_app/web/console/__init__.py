"""The console: the web pages of an account, rendered by the server, which work without JavaScript.

app.mount("/console", console_app(resources))
"""

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_app.api.openapi import new_app
from serve_app.resources import Resources
from serve_app.web.console.history import router as history_router
from serve_app.web.console.keys import router as keys_router
from serve_app.web.console.loras import router as loras_router
from serve_app.web.console.pages import SignInRequired, problem_page
from serve_app.web.console.playground import router as compare_router
from serve_app.web.console.playground import router as playground_router
from serve_app.web.console.settings import router as delete_account_router
from serve_app.web.console.settings import router as sessions_router
from serve_app.web.console.sign_in import router
from serve_app.web.console.sign_in import router as account_router
from serve_app.web.console.usage import router as usage_router
from serve_app.web.console.users import router as users_router
from serve_app.web.site.forms import redirect, root_of
from serve_app.web.site.pages import Protection, answer_with_pages

ROUTES = (
    *account_router.routes,  # before the keys pages, whose address is /settings/{slug}
    *delete_account_router.routes,
    *router.routes,
    *sessions_router.routes,
    *users_router.routes,
    *keys_router.routes,
    *playground_router.routes,
    *compare_router.routes,
    *history_router.routes,
    *loras_router.routes,
    *usage_router.routes,
)


def console_app(resources: Resources) -> ASGIApp:
    """Build the console's application, whose pages are protected against forms of other sites."""
    app = new_app(resources, routes=[*ROUTES])
    app.add_exception_handler(SignInRequired, _to_sign_in)
    answer_with_pages(app, problem_page)
    return Protection(app, public_url=resources.settings.public_url)  # outermost: a 500 and a 413 need its headers too


async def _to_sign_in(request: Request, _error: Exception) -> Response:
    """Send the browser to the sign-in page, and on to the playground where that was asked for."""
    wanted = request.url.path.removeprefix(f"{root_of(request)}/")
    sign_in = redirect(request, "sign-in?next=playground" if wanted.startswith("playground") else "sign-in")
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": sign_in.headers["location"]})
    return sign_in
