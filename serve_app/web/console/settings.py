"""Serves the settings: a user's sessions in other browsers, the password, and the account's deletion.

An owner deletes the account by typing its name and the password; then the browser is signed out.
"""

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.responses import HTMLResponse

from serve_app.accounts.sessions import digest_of
from serve_app.accounts.sign_in import LENGTH, check_password
from serve_app.api.dependencies import accounts_of, caller_address, loras_of, operations_of
from serve_app.domain.accounts import SignIn
from serve_app.domain.audit import Act, Actor
from serve_app.domain.errors import InvalidParameter, TooManyTries
from serve_app.operations.account_deletion import DeletedAccount
from serve_app.web.console.navigation import KEY_PAGES, home_of
from serve_app.web.console.pages import FormSession, PageSession, render
from serve_app.web.console.session import SESSION, SignedIn, drop_cookie, drop_device, read_device, read_session
from serve_app.web.console.sign_in import PASSWORD_FORM, new_password, open_session, set_password
from serve_app.web.site.forms import Form, check_form, form_token, redirect

_PURPOSE = "end session"

router = APIRouter()


@router.post("/settings/sessions/end")
async def end_others(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, _PURPOSE)
    await accounts_of(request).sessions.revoke_all(session.account.id, user_id=session.user.id, but=session.token)
    return await _ended(request, session, Act.OTHER_SESSIONS_ENDED)


@router.post("/settings/sessions/{session_id}/end")
async def end_one(request: Request, session_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, _PURPOSE)
    sessions = accounts_of(request).sessions
    if session_id not in {each.id for each in await sessions.list(session.account.id, user_id=session.user.id)}:
        raise HTTPException(404)
    await sessions.end(session.account.id, session_id)
    return await _ended(request, session, Act.SESSION_ENDED)


async def _ended(request: Request, session: FormSession, act: Act) -> Response:
    audit, address = accounts_of(request).audit, caller_address(request)
    await audit.record(session.account.id, act, actor=session.actor, address=address)
    return redirect(request, "settings")


async def settings_page(request: Request, session: SignedIn) -> HTMLResponse:
    account_id = session.account.id
    windows = [(page, await accounts_of(request).auth.window(account_id, page.variant)) for page in KEY_PAGES]
    adapters = await loras_of(request).catalog.adapters(account_id)
    return render(
        request,
        "settings.html",
        session,
        here="settings",
        windows=windows,
        adapters=len(adapters),
        sessions=await accounts_of(request).sessions.list(account_id, user_id=session.user.id),
        this_session=digest_of(session.token),
        end_token=form_token(session.token, "end session"),
    )


@router.get("/settings/password")
async def open_password(request: Request, session: PageSession) -> Response:
    return _password_page(request, session)


@router.post("/settings/password")
async def change_password(request: Request, session: FormSession, form: Form) -> Response:
    """Change the password for whoever knows the present one, and end every other session."""
    check_form(session, form, PASSWORD_FORM)
    try:
        who = await check_own_password(request, session, form)
    except TooManyTries as error:
        return waiting(_password_page(request, session, status=429, problem=error.message), error)
    if who is None:
        return _password_page(request, session, status=403, problem="The current password is wrong.")
    try:
        password = new_password(form)
    except InvalidParameter as error:
        return _password_page(request, session, status=400, problem=error.message)
    return await open_session(request, await set_password(request, who, password), "settings")


async def check_own_password(request: Request, session: SignedIn, form: Form) -> SignIn | None:
    """Return who is signed in, if the form has their password. Raises `TooManyTries`."""
    accounts = accounts_of(request)
    return await check_password(
        accounts.store,
        accounts.sign_ins,
        accounts.audit,
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


def _password_page(request: Request, session: PageSession, *, status: int = 200, problem: str = "") -> Response:
    return render(
        request,
        "password.html",
        session,
        status=status,
        problem=problem,
        here="password",
        length=LENGTH,
        form_token=form_token(session.token, PASSWORD_FORM),
    )


_DELETION = "delete account"


@router.get("/settings/delete-account")
async def open_deletion(request: Request, session: PageSession) -> Response:
    return _page(request, session)


@router.post("/settings/delete-account")
async def delete(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, _DELETION)
    if form.get("name", "").strip() != session.account.name:
        return _page(request, session, status=400, problem="That is not the name of this account.")
    try:
        who = await check_own_password(request, session, form)
    except TooManyTries as error:
        return waiting(_page(request, session, status=429, problem=error.message), error)
    if who is None:
        return _page(request, session, status=403, problem="The password is wrong.")
    by = Actor(session.actor, caller_address(request))
    deleted = await operations_of(request).deletion.delete_own(session.account, by)
    return _signed_out(request, session, deleted)


def _page(request: Request, session: SignedIn, *, status: int = 200, problem: str = "") -> Response:
    return render(
        request,
        "delete_account.html",
        session,
        status=status,
        problem=problem,
        here="settings",
        length=LENGTH,
        form_token=form_token(session.token, _DELETION),
    )


def _signed_out(request: Request, session: SignedIn, deleted: DeletedAccount | None) -> Response:
    """Say what was removed, and that the rest follows where storage or Redis did not answer."""
    response = render(request, "account_deleted.html", None, name=session.account.name, deleted=deleted)
    drop_cookie(request, response, SESSION)
    drop_device(request, response)
    return response


@router.get("/")
async def home(request: Request) -> Response:
    session = await read_session(request)
    return redirect(request, home_of(session.user.role) if session else "playground")


@router.get("/settings")
async def open_settings(request: Request, session: PageSession) -> Response:
    return await settings_page(request, session)
