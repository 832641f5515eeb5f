"""Signs in by a link that works once, and changes passwords."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.console.browser_name import browser_name
from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.known_device import read_device, set_device
from serve_app.api.console.rendering import render
from serve_app.api.console.roles import home_of, may_open
from serve_app.api.console.session import SignedIn, anonymous_token, set_anonymous, set_session
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form, form_token, is_form_token
from serve_app.api.site.forms import Form
from serve_app.api.site.problems import LINK_GONE
from serve_app.domain.accounts import SignIn, User
from serve_app.domain.audit import OWNER, Act
from serve_app.domain.audit import user as user_actor
from serve_app.domain.errors import InvalidParameter, TooManyTries
from serve_app.service.password_check import check_password
from serve_app.stores.passwords import LENGTH
from serve_app.stores.sign_in_links import LinkPurpose, SignInLink

_LINK, _PASSWORD = "sign-in link", "change password"

router = APIRouter()


async def live_link(request: Request, token: str) -> tuple[SignInLink, SignIn]:
    """Read the link of the address, and whom it signs in. Raises 404 when it no longer works."""
    resources = resources_of(request)
    link = await resources.sign_in_links.get(token)
    account = await resources.accounts.get(link.account_id) if link else None
    if link is None or account is None or account.disabled:
        raise HTTPException(404, LINK_GONE)
    user = await resources.users.get(account.id, link.user_id) if link.user_id else User.first(account)
    if user is None:
        raise HTTPException(404, LINK_GONE)
    return link, SignIn(account=account, user=user, credential_version=link.credential_version)


Link = Annotated[tuple[SignInLink, SignIn], Depends(live_link)]


async def open_session(request: Request, who: SignIn, page: str) -> Response:
    """Sign the browser in, and send it to the page, or to the first that the user's role may see."""
    await _record(request, who, Act.SIGNED_IN)
    response = redirect(request, page if may_open(who.user.role, f"/{page}") else home_of(who.user.role))
    token = await resources_of(request).sessions.create(
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
    resources = resources_of(request)
    try:
        password = _new_password(form) if purpose is LinkPurpose.NEW_PASSWORD else None
    except InvalidParameter as error:
        return _link_page(request, link, status=400, problem=error.message)
    used = await resources.sign_in_links.use(token)
    if used is None:
        raise HTTPException(404, LINK_GONE)
    if password is not None:
        who = await _set_password(request, who, password)
    return await open_session(request, who, "playground")


@router.get("/settings/password")
async def open_password(request: Request, session: PageSession) -> Response:
    return _password_page(request, session)


@router.post("/settings/password")
async def change_password(request: Request, session: FormSession, form: Form) -> Response:
    """Change the password for whoever knows the present one, and end every other session."""
    check_form(session, form, _PASSWORD)
    try:
        who = await check_own_password(request, session, form)
    except TooManyTries as error:
        return waiting(_password_page(request, session, status=429, problem=error.message), error)
    if who is None:
        return _password_page(request, session, status=403, problem="The current password is wrong.")
    try:
        password = _new_password(form)
    except InvalidParameter as error:
        return _password_page(request, session, status=400, problem=error.message)
    return await open_session(request, await _set_password(request, who, password), "settings")


async def check_own_password(request: Request, session: SignedIn, form: Form) -> SignIn | None:
    """Return who is signed in, if the form has their password. Raises `TooManyTries`."""
    return await check_password(
        resources_of(request),
        session.user.name if session.user.id else session.account.id,
        form.get("password", ""),
        actor=session.actor,
        address=caller_address(request),
        device=read_device(request),
    )


def waiting(response: Response, error: TooManyTries) -> Response:
    """Say in the answer's header when the next try is looked at."""
    response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _new_password(form: Form) -> str:
    """Raises `InvalidParameter` when it was typed in two ways, or has a wrong length."""
    password = form.get("new_password", "")
    if password != form.get("new_password_again", ""):
        raise InvalidParameter("The two new passwords differ.")
    if len(password) not in LENGTH:
        raise InvalidParameter(f"A password has {LENGTH.start} to {LENGTH.stop - 1} characters.")
    return password


async def _set_password(request: Request, who: SignIn, password: str) -> SignIn:
    """Return who signs in, with the credential version of sessions from now on."""
    accounts = resources_of(request).accounts
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


def _password_page(request: Request, session: PageSession, *, status: int = 200, problem: str = "") -> Response:
    return render(
        request,
        "password.html",
        session,
        status=status,
        problem=problem,
        here="password",
        length=LENGTH,
        form_token=form_token(session.token, _PASSWORD),
    )


async def _record(request: Request, who: SignIn, act: Act) -> None:
    actor = user_actor(who.user.id) if who.user.id else OWNER
    await resources_of(request).audit.record(who.account.id, act, actor=actor, address=caller_address(request))
