"""Rendering of an operators' page in the shared layout."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from serve_app.api.operators.formatting import size
from serve_app.api.operators.session import SignedIn
from serve_app.api.site import page_templates
from serve_app.api.site.addresses import root_of, site_of
from serve_app.api.site.form_tokens import form_token
from serve_app.api.site.page import PageResponse
from serve_app.domain.durations import rounded_duration

_TEMPLATES = page_templates(Path(__file__).parent / "templates")

PAGE_SIZE = 50


def render(
    request: Request, template: str, session: SignedIn | None, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """Render a page for operators. `here` names the link in the header that leads to it."""
    shared = {
        "root": root_of(request),
        "site": site_of(request),
        "operator": session.operator if session else None,
        "sign_out_token": form_token(session.token, "sign out") if session else "",
        "here": here,
        "duration": _duration,
        "size": size,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)


def problem_page(request: Request, status: int, title: str, text: str) -> HTMLResponse:
    """Render a page that says what went wrong, and where to go on."""
    return render(request, "problem.html", None, status=status, title=title, text=text)


def _duration(seconds: float) -> str:
    return rounded_duration(timedelta(seconds=seconds))
