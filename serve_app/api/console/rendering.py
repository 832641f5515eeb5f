"""Rendering of a console page in the shared layout."""

from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from serve_app.api.console.key_page import ALL_KEY_PAGES
from serve_app.api.console.roles import may_open
from serve_app.api.console.session import SignedIn
from serve_app.api.site import page_templates
from serve_app.api.site.addresses import root_of, site_of
from serve_app.api.site.form_tokens import form_token
from serve_app.api.site.page import PageResponse

_TEMPLATES = page_templates(Path(__file__).parent / "templates")


def render(
    request: Request, template: str, session: SignedIn | None, *, here: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """A page of the console. `here` names the link in the header that leads to it."""
    shared = {
        "root": root_of(request),
        "site": site_of(request),
        "account": session.account if session else None,
        "user": session.user if session else None,
        "may_open": partial(may_open, session.user.role) if session else None,
        "sign_out_token": form_token(session.token, "sign out") if session else "",
        "key_pages": ALL_KEY_PAGES,
        "in_settings": here in {*(page.slug for page in ALL_KEY_PAGES), "password", "users"},
        "here": here,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)
