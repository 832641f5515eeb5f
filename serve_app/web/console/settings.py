"""Serves the settings: a user's sessions in other browsers, the password, the account's users and its deletion.

An owner invites users by a link that works once, and deletes the account by typing its name and the password; then the
browser is signed out.
"""

from datetime import timedelta
from functools import partial

from fastapi import APIRouter, HTTPException, Request, Response

from serve_app.accounts.sessions import digest_of
from serve_app.accounts.sign_in import LENGTH, Limit, LinkPurpose
from serve_app.api.dependencies import accounts_of, jobs_of, loras_of, operations_of
from serve_app.domain.accounts import Role, SignIn, User
from serve_app.domain.audit import Act
from serve_app.domain.durations import period_text
from serve_app.domain.errors import InvalidParameter, TooManyTries
from serve_app.web.console.navigation import KEY_PAGES, home_of
from serve_app.web.console.pages import COOKIE, CUSTOMERS, ConsoleSession, FormSession, PageSession, read_device, render
from serve_app.web.site.forms import Form, check_form, redirect, service_url
from serve_app.web.site.sign_in import actor_of, new_password, record, retry_later

router = APIRouter()


@router.get("/")
async def home(request: Request) -> Response:
    session = await CUSTOMERS.read(request)
    return redirect(request, home_of(session.who.user.role) if session else "playground")


@router.post("/settings/sessions/end")
async def end_others(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, "end session")
    await accounts_of(request).sessions.revoke_all(session.who.id, user_id=session.who.user_id, but=session.token)
    await record(request, session.who, Act.OTHER_SESSIONS_ENDED)
    return redirect(request, "settings")


@router.post("/settings/sessions/{session_id}/end")
async def end_one(request: Request, session_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, "end session")
    sessions = accounts_of(request).sessions
    if session_id not in {each.id for each in await sessions.list(session.who.id, user_id=session.who.user_id)}:
        raise HTTPException(404)
    await sessions.end(session.who.id, session_id)
    await record(request, session.who, Act.SESSION_ENDED)
    return redirect(request, "settings")


@router.get("/settings")
async def open_settings(request: Request, session: PageSession) -> Response:
    account_id = session.who.id
    windows = [(page, await accounts_of(request).auth.window(account_id, page.variant)) for page in KEY_PAGES]
    adapters = await loras_of(request).catalog.adapters(account_id)
    return render(
        request,
        "settings.html",
        session,
        here="settings",
        windows=windows,
        adapters=len(adapters),
        sessions=await accounts_of(request).sessions.list(account_id, user_id=session.who.user_id),
        this_session=digest_of(session.token),
    )


@router.get("/settings/password")
async def open_password(request: Request, session: PageSession) -> Response:
    return _form_page(request, session, "password")


@router.post("/settings/password")
async def change_password(request: Request, session: FormSession, form: Form) -> Response:
    """Change the password for whoever knows the present one, and end every other session."""
    check_form(session, form, "password")
    who = await _check_own_password(request, session, form, "password")
    if isinstance(who, Response):
        return who
    try:
        password = new_password(form)
    except InvalidParameter as error:
        return _form_page(request, session, "password", status=400, problem=error.message)
    credential_version = await CUSTOMERS.change_password(request, who, password)
    return await CUSTOMERS.open_session(request, who, "settings", credential_version=credential_version)


@router.get("/settings/delete-account")
async def open_deletion(request: Request, session: PageSession) -> Response:
    return _form_page(request, session, "delete_account")


@router.post("/settings/delete-account")
async def delete(request: Request, session: FormSession, form: Form) -> Response:
    """Delete the account, and say what was removed, or that the rest follows where a store did not answer."""
    check_form(session, form, "delete_account")
    if form.get("name", "").strip() != session.who.account.name:
        problem = "That is not the name of this account."
        return _form_page(request, session, "delete_account", status=400, problem=problem)
    who = await _check_own_password(request, session, form, "delete_account")
    if isinstance(who, Response):
        return who
    deleted = await operations_of(request).deletion.delete_own(who.account, actor_of(request, who))
    response = render(request, "account_deleted.html", None, name=who.account.name, deleted=deleted)
    for cookie in (CUSTOMERS.cookie, COOKIE):
        CUSTOMERS.set_cookie(request, response, cookie, "", timedelta())
    return response


async def _check_own_password(request: Request, session: ConsoleSession, form: Form, page: str) -> SignIn | Response:
    """Return who is signed in, if the form has their password; else the page with the form again."""
    accounts, user = accounts_of(request), session.who.user
    name = user.name if user.id else session.who.id
    look = partial(accounts.store.check_password, name, form.get("password", ""))
    try:
        who = await accounts.sign_ins.check(look, name, actor_of(request, session.who), device=read_device(request))
    except TooManyTries as error:
        return retry_later(_form_page(request, session, page, status=429, problem=error.message), error)
    return who or _form_page(request, session, page, status=403, problem="The current password is wrong.")


def _form_page(
    request: Request, session: ConsoleSession, page: str, *, status: int = 200, problem: str = ""
) -> Response:
    return render(
        request,
        f"{page}.html",
        session,
        status=status,
        problem=problem,
        here="password" if page == "password" else "settings",
        length=LENGTH,
    )


TRIES = Limit("console-users", 30, timedelta(hours=1))
"""One account may invite this often, since each name that it tries tells whether the name is in use."""
ROLE_WORDS = {
    Role.MEMBER: "creates images, with LoRAs, history and API keys of their own",
    Role.BILLING: "sees usage only",
    Role.OWNER: "full access, including users",
}


@router.get("/settings/users")
async def open_users(request: Request, session: PageSession) -> Response:
    return await _users_page(request, session)


@router.post("/settings/users")
async def invite(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, "users")
    role = form.get("role", "")
    if await accounts_of(request).throttle.hit(TRIES, session.who.id):
        raise HTTPException(429, f"At most {TRIES.tries} invitations per {period_text(TRIES.per)}. Try again later.")
    if role not in set(Role):
        return await _users_page(request, session, status=400, problem="Choose a role.")
    await jobs_of(request).space.check()
    try:
        user = await accounts_of(request).users.create(session.who.id, form.get("name", ""), Role(role))
    except InvalidParameter as error:
        problem = f"The {error.message.replace(': ', ' ', 1)}."
        return await _users_page(request, session, status=400, problem=problem)
    await record(request, session.who, Act.USER_INVITED, user.id)
    return await _page_with_link(request, session, user)


@router.post("/settings/users/{user_id}/link")
async def make_link(request: Request, user_id: str, session: FormSession, form: Form) -> Response:
    """Make another link, after a link or a password was lost."""
    check_form(session, form, "users")
    user = await _existing(request, session, user_id)
    await record(request, session.who, Act.SIGN_IN_LINK_MADE, user.id)
    return await _page_with_link(request, session, user)


@router.post("/settings/users/{user_id}/remove")
async def remove(request: Request, user_id: str, session: FormSession, form: Form) -> Response:
    """Remove a user, end its sessions and revoke its keys."""
    check_form(session, form, "users")
    user = await _existing(request, session, user_id)
    await accounts_of(request).users.remove(session.who.id, user.id)
    await record(request, session.who, Act.USER_REMOVED, user.id)
    return redirect(request, "settings/users")


async def _existing(request: Request, session: ConsoleSession, user_id: str) -> User:
    user = await accounts_of(request).users.get(session.who.id, user_id)
    if user is None:
        raise HTTPException(404)
    return user


async def _page_with_link(request: Request, session: ConsoleSession, user: User) -> Response:
    token = await accounts_of(request).links.create(session.who.id, LinkPurpose.NEW_PASSWORD, user_id=user.id)
    return await _users_page(request, session, invited=user, invitation=f"{service_url(request)}/console/links/{token}")


async def _users_page(
    request: Request, session: ConsoleSession, *, status: int = 200, problem: str = "", invited: User | None = None,
    invitation: str = "",
) -> Response:  # fmt: skip
    return render(
        request,
        "users.html",
        session,
        here="users",
        status=status,
        problem=problem,
        users=[User.first(session.who.account), *await accounts_of(request).users.list(session.who.id)],
        roles=ROLE_WORDS,
        invited=invited,
        invitation=invitation,
    )
