"""Who signs in to the operators' pages, and how these are rendered."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.responses import HTMLResponse

from serve_app.accounts import sessions
from serve_app.accounts.sessions import Holder
from serve_app.api.dependencies import accounts_of, caller_address, operations_of
from serve_app.domain.accounts import Operator
from serve_app.domain.audit import ANYONE, Actor, operator
from serve_app.domain.durations import rounded_duration
from serve_app.web.site import page_templates
from serve_app.web.site.forms import SignedIn
from serve_app.web.site.pages import PageResponse
from serve_app.web.site.sign_in import Realm, SignInRequired, page_values

OperatorSession = SignedIn[Operator]

PAGE_SIZE = 50
_TEMPLATES = page_templates(Path(__file__).parent / "templates")


def render(
    request: Request,
    template: str,
    session: OperatorSession | None,
    *,
    here: str = "",
    status: int = 200,
    **values: Any,
) -> HTMLResponse:
    """Render a page for operators. `here` names the link in the header that leads to it."""
    shared = {
        **page_values(request, session),
        "for_operators": True,
        "operator": session.who if session else None,
        "here": here,
        "duration": _duration,
    }
    return PageResponse(_TEMPLATES.get_template(template), shared | values, status)


def _duration(seconds: float) -> str:
    return rounded_duration(timedelta(seconds=seconds))


async def _find(request: Request, holder: Holder) -> Operator | None:
    return await operations_of(request).operators.get(holder.id)


async def _check(request: Request, name: str, password: str) -> Operator | None:
    """Check a password. Tries are counted apart from those for accounts, whose names have no line break."""
    look = partial(operations_of(request).operators.check_password, name, password)
    by = Actor(ANYONE, caller_address(request))
    return await accounts_of(request).sign_ins.check(look, f"operator\n{name}", by, log=operator(name))


async def _set_password(request: Request, who: Operator, password: str) -> str:
    return await operations_of(request).operators.set_password(who.name, password)


OPERATORS = Realm(
    sessions=sessions.OPERATORS,
    cookie="atelier_operator",
    same_site="strict",
    is_whole_site=False,
    parts=operations_of,
    find=_find,
    check=_check,
    set_password=_set_password,
    page_of=lambda _who, wanted: wanted,
    greet=lambda _request, _response, _who: None,
    render=render,
)


async def live_session(request: Request) -> OperatorSession:
    """Return the session of a page that refreshes itself, without extending it. Raises `SignInRequired`."""
    session = await OPERATORS.read(request, extends=False)
    if session is None:
        raise SignInRequired
    return session


PageSession = Annotated[OperatorSession, Depends(OPERATORS.page_session)]
LiveSession = Annotated[OperatorSession, Depends(live_session)]
FormSession = Annotated[OperatorSession, Depends(OPERATORS.form_session)]
