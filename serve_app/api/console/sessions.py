"""Ends sessions of other browsers: one in the list of the settings page, or all but this one."""

from fastapi import APIRouter, HTTPException, Request, Response

from serve_app.api.console.guards import FormSession
from serve_app.api.dependencies import caller_address, resources_of
from serve_app.api.site.addresses import redirect
from serve_app.api.site.form_tokens import check_form
from serve_app.api.site.forms import Form
from serve_app.domain.audit import Act

_PURPOSE = "end session"

router = APIRouter()


@router.post("/settings/sessions/end")
async def end_others(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, _PURPOSE)
    await resources_of(request).sessions.revoke_all(session.account.id, user_id=session.user.id, but=session.token)
    return await _ended(request, session, Act.OTHER_SESSIONS_ENDED)


@router.post("/settings/sessions/{session_id}/end")
async def end_one(request: Request, session_id: str, session: FormSession, form: Form) -> Response:
    check_form(session, form, _PURPOSE)
    sessions = resources_of(request).sessions
    if session_id not in {each.id for each in await sessions.list(session.account.id, user_id=session.user.id)}:
        raise HTTPException(404)
    await sessions.end(session.account.id, session_id)
    return await _ended(request, session, Act.SESSION_ENDED)


async def _ended(request: Request, session: FormSession, act: Act) -> Response:
    audit, address = resources_of(request).audit, caller_address(request)
    await audit.record(session.account.id, act, actor=session.actor, address=address)
    return redirect(request, "settings")
