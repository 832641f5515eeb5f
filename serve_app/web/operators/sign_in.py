"""Signs operators in and out: by their password, or by a link that works once."""

from math import ceil
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.accounts.sign_in import LENGTH, LinkPurpose, SignInLink
from serve_app.api.dependencies import accounts_of, caller_address, operations_of
from serve_app.domain import audit
from serve_app.domain.audit import ANYONE, Act
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import NotFound
from serve_app.web.operators.pages import FormSession, record, render
from serve_app.web.operators.session import anonymous_token, drop_session, read_session, set_anonymous, set_session
from serve_app.web.site.forms import Form, check_form, form_token, is_form_token, redirect
from serve_app.web.site.pages import LINK_GONE

NAME_LENGTH = 63
_SIGN_IN, _LINK = "operator sign in", "operator link"

router = APIRouter()


@router.get("/sign-in")
async def open_sign_in(request: Request) -> Response:
    return _sign_in_page(request) if await read_session(request) is None else redirect(request, "")


@router.post("/sign-in")
async def sign_in(request: Request, form: Form) -> Response:
    """Sign in an operator, or answer with the form again.

    Tries are counted by name and address, apart from those for accounts; operators have no known devices.
    """
    name, password = form.get("name", "").strip(), form.get("password", "")
    if not is_form_token(anonymous_token(request), _SIGN_IN, form.get("form_token", "")):
        return _sign_in_page(request, status=403, problem="The page has expired. Please try again.", name=name)
    sign_ins = accounts_of(request).sign_ins
    counted = await sign_ins.count(f"operator\n{name[:NAME_LENGTH]}", caller_address(request), None)
    if counted.wait:
        seconds = ceil(counted.wait.total_seconds())
        problem = f"Too many attempts. Try again in {wait_text(counted.wait)}."
        response = _sign_in_page(request, status=429, problem=problem, name=name)
        response.headers["Retry-After"] = str(seconds)
        return response
    found = await operations_of(request).operators.check_password(name, password[: LENGTH.stop])
    if found is None:
        await record(request, name, Act.SIGN_IN_FAILED, actor=ANYONE)
        return _sign_in_page(request, status=403, problem="Wrong name or password.", name=name)
    await sign_ins.forget(counted)
    return await _signed_in(request, found.name, found.credential_version)


@router.post("/sign-out")
async def sign_out(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, "sign out")
    await operations_of(request).sessions.revoke(session.token)
    name = session.operator.name
    await record(request, name, Act.SIGNED_OUT, actor=audit.operator(name))
    response = redirect(request, "sign-in")
    drop_session(request, response)
    return response


async def live_link(request: Request, token: str) -> SignInLink:
    """Return the link of the address. Raises 404 for one used or too old, or its operator gone."""
    link = await operations_of(request).links.get(token)
    if link is None or await operations_of(request).operators.get(link.account_id) is None:
        raise HTTPException(404, LINK_GONE)
    return link


Link = Annotated[SignInLink, Depends(live_link)]


@router.get("/links/{token}")
async def open_link(request: Request, link: Link) -> Response:
    """Show a button, so that a program that opens links in advance does not use this one up."""
    return _link_page(request, link)


@router.post("/links/{token}")
async def use_link(request: Request, token: str, link: Link, form: Form) -> Response:
    if not is_form_token(anonymous_token(request), _LINK, form.get("form_token", "")):
        return _link_page(request, link, status=403, problem="The page has expired. Please try again.")
    name = link.account_id
    password = form.get("new_password", "") if link.purpose is LinkPurpose.NEW_PASSWORD else None
    if password is not None and password != form.get("new_password_again", ""):
        return _link_page(request, link, status=400, problem="The two new passwords differ.")
    if password is not None and len(password) not in LENGTH:
        problem = f"A password has {LENGTH.start} to {LENGTH.stop - 1} characters."
        return _link_page(request, link, status=400, problem=problem)
    used = await operations_of(request).links.use(token)
    if used is None:
        raise HTTPException(404, LINK_GONE)
    credential_version = used.credential_version
    if password is not None:
        try:
            credential_version = await operations_of(request).operators.set_password(name, password)
        except NotFound:  # deleted meanwhile
            raise HTTPException(404, LINK_GONE) from None
        await operations_of(request).sessions.revoke_all(name)
        await record(request, name, Act.PASSWORD_SET, actor=audit.operator(name))
    return await _signed_in(request, name, credential_version)


async def _signed_in(request: Request, name: str, credential_version: str) -> Response:
    await record(request, name, Act.SIGNED_IN, actor=audit.operator(name))
    response = redirect(request, "")
    token = await operations_of(request).sessions.create(name, credential_version=credential_version)
    set_session(request, response, token)
    return response


def _sign_in_page(request: Request, *, status: int = 200, problem: str = "", name: str = "") -> Response:
    browser = anonymous_token(request)
    response = render(
        request,
        "sign_in.html",
        None,
        status=status,
        problem=problem,
        name=name[:NAME_LENGTH],
        form_token=form_token(browser, _SIGN_IN),
    )
    set_anonymous(request, response, browser)
    return response


def _link_page(request: Request, link: SignInLink, *, status: int = 200, problem: str = "") -> Response:
    browser = anonymous_token(request)
    response = render(
        request,
        "link.html",
        None,
        status=status,
        problem=problem,
        name=link.account_id,
        needs_password=link.purpose is LinkPurpose.NEW_PASSWORD,
        token=request.path_params["token"],
        length=LENGTH,
        form_token=form_token(browser, _LINK),
    )
    set_anonymous(request, response, browser)
    return response
