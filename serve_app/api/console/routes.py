"""The console's path operations: sign in and out, and account settings."""

from datetime import timedelta

from fastapi import APIRouter, Request, Response

from serve_app.api.console.account import open_session
from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.known_device import read_device
from serve_app.api.console.pages import settings_page, sign_in_page
from serve_app.api.console.roles import home_of
from serve_app.api.console.session import SESSION, anonymous_token, drop_cookie, read_session
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form, is_form_token
from serve_app.api.site.forms import Form
from serve_app.domain.audit import ANYONE, Act
from serve_app.domain.durations import wait_text
from serve_app.domain.errors import TooManyTries
from serve_app.service.password_check import check_password

router = APIRouter()


@router.get("/")
async def home(request: Request) -> Response:
    session = await read_session(request)
    return redirect(request, home_of(session.user.role) if session else "playground")


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
    address, device = caller_address(request), read_device(request)
    try:
        signed_in = await check_password(
            resources_of(request), name, password, actor=ANYONE, address=address, device=device
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
    sessions = resources_of(request).sessions
    if "everywhere" in form:
        await sessions.revoke_all(session.account.id, user_id=session.user.id)
    await sessions.revoke(session.token)
    act = Act.SIGNED_OUT_EVERYWHERE if "everywhere" in form else Act.SIGNED_OUT
    await _record(request, session.account.id, act, actor=session.actor)
    response = redirect(request, "sign-in")
    drop_cookie(request, response, SESSION)
    return response


@router.get("/settings")
async def open_settings(request: Request, session: PageSession) -> Response:
    return await settings_page(request, session)


async def _record(request: Request, account_id: str, act: Act, *, actor: str) -> None:
    audit, address = resources_of(request).audit, caller_address(request)
    await audit.record(account_id, act, actor=actor, address=address)
