"""The operators' page of checks, which runs those of `atelier doctor` that this process can."""

from fastapi import APIRouter, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import FormSession, PageSession
from serve_app.api.operators.rendering import render
from serve_app.api.operators.session import SignedIn
from serve_app.api.site.form_tokens import check_form, form_token
from serve_app.api.site.forms import Form
from serve_app.service.doctor.checks import Check, Level
from serve_app.service.doctor.report import check_service

_RUN = "run checks"
_WORST_FIRST = (Level.FAIL, Level.WARN, Level.OK)

router = APIRouter()


@router.get("/checks")
async def open_checks(request: Request, session: PageSession) -> Response:
    return _checks_page(request, session, None)


@router.post("/checks")
async def run_checks(request: Request, session: FormSession, form: Form) -> Response:
    check_form(session, form, _RUN)
    resources = resources_of(request)
    return _checks_page(request, session, await check_service(resources.settings, resources.check_machines))


def _checks_page(request: Request, session: SignedIn, found: list[Check] | None) -> Response:
    return render(
        request,
        "checks.html",
        session,
        here="checks",
        checks=None if found is None else sorted(found, key=lambda check: _WORST_FIRST.index(check.level)),
        bad=[check for check in found or [] if check.level is not Level.OK],
        run_token=form_token(session.token, _RUN),
    )
