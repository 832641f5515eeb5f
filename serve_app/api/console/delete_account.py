"""Deletes the account of an owner who types its name and the password, and signs the browser out."""

from fastapi import APIRouter, Request, Response

from serve_app.api.console.account import check_own_password, waiting
from serve_app.api.console.guards import FormSession, PageSession
from serve_app.api.console.known_device import drop_device
from serve_app.api.console.rendering import render
from serve_app.api.console.session import SESSION, SignedIn, drop_cookie
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.form_tokens import check_form, form_token
from serve_app.api.site.forms import Form
from serve_app.domain.errors import TooManyTries
from serve_app.service.delete_account import DeletedAccount, delete_own_account
from serve_app.service.operate import Actor
from serve_app.stores.passwords import LENGTH

_PURPOSE = "delete account"

router = APIRouter()


@router.get("/settings/delete-account")
async def open_deletion(request: Request, session: PageSession) -> Response:
    return _page(request, session)


@router.post("/settings/delete-account")
async def delete(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, _PURPOSE)
    if form.get("name", "").strip() != session.account.name:
        return _page(request, session, status=400, problem="That is not the name of this account.")
    try:
        who = await check_own_password(request, session, form)
    except TooManyTries as error:
        return waiting(_page(request, session, status=429, problem=error.message), error)
    if who is None:
        return _page(request, session, status=403, problem="The password is wrong.")
    by = Actor(session.actor, caller_address(request))
    deleted = await delete_own_account(resources_of(request), session.account, by)
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
        form_token=form_token(session.token, _PURPOSE),
    )


def _signed_out(request: Request, session: SignedIn, deleted: DeletedAccount | None) -> Response:
    """Say what was removed, and that the rest follows where storage or Redis did not answer."""
    response = render(request, "account_deleted.html", None, name=session.account.name, deleted=deleted)
    drop_cookie(request, response, SESSION)
    drop_device(request, response)
    return response
