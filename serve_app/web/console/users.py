"""The users of an account: its owners invite them by a link that works once, and remove them."""

from datetime import timedelta

from fastapi import APIRouter, HTTPException, Request, Response

from serve_app.accounts.sign_in import Limit, LinkPurpose
from serve_app.api.dependencies import accounts_of, jobs_of
from serve_app.domain.accounts import Role, User
from serve_app.domain.audit import Act
from serve_app.domain.durations import period_text
from serve_app.domain.errors import InvalidParameter
from serve_app.web.console.pages import ConsoleSession, FormSession, PageSession, render
from serve_app.web.site.forms import Form, check_form, redirect, service_url
from serve_app.web.site.sign_in import record

TRIES = Limit("console-users", 30, timedelta(hours=1))
"""One account may invite this often, since each name that it tries tells whether the name is in use."""
ROLE_WORDS = {
    Role.MEMBER: "creates images, with LoRAs, history and API keys of their own",
    Role.BILLING: "sees usage only",
    Role.OWNER: "full access, including users",
}

router = APIRouter()


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
