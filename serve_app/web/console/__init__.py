"""Serves the console: the web pages of an account, rendered on the server, which work without JavaScript.

The site mounts it with `app.mount("/console", console_app())`.
"""

from fastapi import FastAPI, Request
from starlette.responses import Response

from serve_app.api.openapi import new_app
from serve_app.web.console.history import router as history_router
from serve_app.web.console.keys import router as keys_router
from serve_app.web.console.loras import router as loras_router
from serve_app.web.console.pages import SignInRequired, problem_page
from serve_app.web.console.playground import router as playground_router
from serve_app.web.console.settings import router as settings_router
from serve_app.web.console.sign_in import router as sign_in_router
from serve_app.web.console.usage import router as usage_router
from serve_app.web.console.users import router as users_router
from serve_app.web.site.forms import redirect, root_of
from serve_app.web.site.pages import answer_with_pages

ROUTES = (
    *sign_in_router.routes,
    *settings_router.routes,  # before the keys pages, whose address is /settings/{slug}
    *users_router.routes,
    *keys_router.routes,
    *playground_router.routes,
    *history_router.routes,
    *loras_router.routes,
    *usage_router.routes,
)


def console_app() -> FastAPI:
    """Build the console's application. `Protection` goes around it, against forms of other sites."""
    app = new_app(routes=[*ROUTES])
    app.add_exception_handler(SignInRequired, _to_sign_in)
    answer_with_pages(app, problem_page)
    return app


async def _to_sign_in(request: Request, _error: Exception) -> Response:
    """Send the browser to the sign-in page, and on to the playground where that was asked for."""
    wanted = request.url.path.removeprefix(f"{root_of(request)}/")
    sign_in = redirect(request, "sign-in?next=playground" if wanted.startswith("playground") else "sign-in")
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": sign_in.headers["location"]})
    return sign_in
