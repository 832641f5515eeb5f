"""Signs users of the console in and out, by password or by a link that works once.

A link for a new password asks for one before it signs in.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from starlette.responses import HTMLResponse

from serve_app.accounts.sign_in import LENGTH, LinkPurpose, SignInLink, check_password
from serve_app.api.dependencies import accounts_of, caller_address
from serve_app.domain.accounts import SignIn, User
from serve_app.domain.audit import ANYONE, OWNER, Act
from serve_app.domain.audit import user as user_actor
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import InvalidParameter, TooManyTries
from serve_app.web.console.navigation import home_of, may_open
from serve_app.web.console.pages import FormSession, render
from serve_app.web.console.session import (
    SESSION,
    anonymous_token,
    browser_name,
    drop_cookie,
    read_device,
    read_session,
    set_anonymous,
    set_device,
    set_session,
)
from serve_app.web.site.forms import Form, check_form, form_token, is_form_token, redirect
from serve_app.web.site.pages import LINK_GONE

NAME_LENGTH = 100
"""Characters of an account's name."""


def sign_in_page(
    request: Request,
    *,
    status: int = 200,
    problem: str = "",
    name: str = "",
    after: str = "",
    retry_after_s: int | None = None,
) -> HTMLResponse:
    token = anonymous_token(request)
    response = render(
        request,
        "sign_in.html",
        None,
        status=status,
        problem=problem,
        name=name[:NAME_LENGTH],
        after="playground" if after == "playground" else "",
        form_token=form_token(token, "sign in"),
    )
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    set_anonymous(request, response, token)
    return response


_LINK, PASSWORD_FORM = "sign-in link", "change password"

router = APIRouter()


async def live_link(request: Request, token: str) -> tuple[SignInLink, SignIn]:
    """Read the link of the address, and whom it signs in. Raises 404 when it no longer works."""
    link = await accounts_of(request).links.get(token)
    account = await accounts_of(request).store.get(link.account_id) if link else None
    if link is None or account is None or account.disabled:
        raise HTTPException(404, LINK_GONE)
    user = await accounts_of(request).users.get(account.id, link.user_id) if link.user_id else User.first(account)
    if user is None:
        raise HTTPException(404, LINK_GONE)
    return link, SignIn(account=account, user=user, credential_version=link.credential_version)


Link = Annotated[tuple[SignInLink, SignIn], Depends(live_link)]


async def open_session(request: Request, who: SignIn, page: str) -> Response:
    """Sign the browser in, and send it to the page, or to the first that the user's role may see."""
    await _record(request, who, Act.SIGNED_IN)
    response = redirect(request, page if may_open(who.user.role, f"/{page}") else home_of(who.user.role))
    token = await accounts_of(request).sessions.create(
        who.account.id,
        user_id=who.user.id,
        credential_version=who.credential_version,
        browser=browser_name(request.headers.get("user-agent", "")),
        address=caller_address(request),
    )
    set_session(request, response, token)
    set_device(request, response, f"{who.account.id}:{who.user.id}" if who.user.id else who.account.id)
    return response


@router.get("/links/{token}")
async def open_link(request: Request, link: Link) -> Response:
    """Show a button, so that a program that opens links in advance does not use this one up."""
    return _link_page(request, link)


@router.post("/links/{token}")
async def use_link(request: Request, token: str, link: Link, form: Form) -> Response:
    if not is_form_token(anonymous_token(request), _LINK, form.get("form_token", "")):
        return _link_page(request, link, status=403, problem="The page has expired. Please try again.")
    (_, purpose, *_), who = link
    try:
        password = new_password(form) if purpose is LinkPurpose.NEW_PASSWORD else None
    except InvalidParameter as error:
        return _link_page(request, link, status=400, problem=error.message)
    used = await accounts_of(request).links.use(token)
    if used is None:
        raise HTTPException(404, LINK_GONE)
    if password is not None:
        who = await set_password(request, who, password)
    return await open_session(request, who, "playground")


def new_password(form: Form) -> str:
    """Return the new password. Raises `InvalidParameter` if its two entries differ or its length is wrong."""
    password = form.get("new_password", "")
    if password != form.get("new_password_again", ""):
        raise InvalidParameter("The two new passwords differ.")
    if len(password) not in LENGTH:
        raise InvalidParameter(f"A password has {LENGTH.start} to {LENGTH.stop - 1} characters.")
    return password


async def set_password(request: Request, who: SignIn, password: str) -> SignIn:
    """Return who signs in, with the credential version of sessions from now on."""
    accounts = accounts_of(request).store
    credential_version = await accounts.set_password(who.account.id, password, user_id=who.user.id)
    await _record(request, who, Act.PASSWORD_SET)
    return replace(who, credential_version=credential_version)


def _link_page(request: Request, link: tuple[SignInLink, SignIn], *, status: int = 200, problem: str = "") -> Response:
    (_, purpose, *_), who = link
    browser = anonymous_token(request)
    response = render(
        request,
        "link.html",
        None,
        status=status,
        problem=problem,
        name=who.account.name,
        user_name=who.user.name if who.user.id else "",
        needs_password=purpose is LinkPurpose.NEW_PASSWORD,
        token=request.path_params["token"],
        length=LENGTH,
        form_token=form_token(browser, _LINK),
    )
    set_anonymous(request, response, browser)
    return response


async def _record(request: Request, who: SignIn, act: Act) -> None:
    actor = user_actor(who.user.id) if who.user.id else OWNER
    await accounts_of(request).audit.record(who.account.id, act, actor=actor, address=caller_address(request))


@router.get("/sign-in")
async def open_sign_in(request: Request) -> Response:
    if await read_session(request) is not None:
        return redirect(request, "settings")
    return sign_in_page(request, after=request.query_params.get("next", ""))


@router.post("/sign-in")
async def sign_in(request: Request, form: Form) -> Response:
    name, password = form.get("name", "").strip(), form.get("password", "")
    if not is_form_token(anonymous_token(request), "sign in", form.get("form_token", "")):
        return sign_in_page(request, status=403, problem="The page has expired. Please try again.", name=name)
    accounts, address, device = accounts_of(request), caller_address(request), read_device(request)
    try:
        signed_in = await check_password(
            accounts.store,
            accounts.sign_ins,
            accounts.audit,
            name,
            password,
            actor=ANYONE,
            address=address,
            device=device,
        )
    except TooManyTries as error:
        wait_s = error.retry_after_s
        problem = f"Too many attempts for this account. Try again in {wait_text(timedelta(seconds=wait_s))}."
        return sign_in_page(request, status=429, problem=problem, name=name, retry_after_s=wait_s)
    if signed_in is None:
        return sign_in_page(request, status=403, problem="Wrong account name or password.", name=name)
    page = "playground" if form.get("next") == "playground" else "settings"
    return await open_session(request, signed_in, page)


@router.post("/sign-out")
async def sign_out(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, "sign out")
    sessions = accounts_of(request).sessions
    if "everywhere" in form:
        await sessions.revoke_all(session.account.id, user_id=session.user.id)
    await sessions.revoke(session.token)
    act = Act.SIGNED_OUT_EVERYWHERE if "everywhere" in form else Act.SIGNED_OUT
    await _record_act(request, session.account.id, act, actor=session.actor)
    response = redirect(request, "sign-in")
    drop_cookie(request, response, SESSION)
    return response


async def _record_act(request: Request, account_id: str, act: Act, *, actor: str) -> None:
    audit, address = accounts_of(request).audit, caller_address(request)
    await audit.record(account_id, act, actor=actor, address=address)
