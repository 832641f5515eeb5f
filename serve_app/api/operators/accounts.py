"""The operators' pages of accounts: the list, and each account with its plans, state and links."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.api.dependencies import resources_of
from serve_app.api.operators.guards import FormSession, PageSession, by
from serve_app.api.operators.rendering import PAGE_SIZE, render
from serve_app.api.operators.session import SignedIn
from serve_app.api.site.addresses import page_number, redirect, site_of
from serve_app.api.site.form_tokens import check_form, form_token
from serve_app.api.site.forms import Form
from serve_app.domain.accounts import Account
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import Variant
from serve_app.service import operate
from serve_app.stores.sign_in_links import LinkPurpose

JOBS_SHOWN = 10
_PLANS, _STATE, _LINK = "account plans", "account state", "account link"

router = APIRouter()


@router.get("/accounts")
async def open_accounts(request: Request, session: PageSession) -> Response:
    """List accounts, newest first; or the one with a name or id."""
    resources, wanted = resources_of(request), request.query_params.get("name", "").strip()[:100]
    if wanted and (found := await resources.accounts.get(wanted)):
        return redirect(request, f"accounts/{found.id}")
    page = page_number(request)
    rows, total = await resources.operator_reader.accounts((page - 1) * PAGE_SIZE, PAGE_SIZE)
    return render(
        request,
        "accounts.html",
        session,
        here="accounts",
        status=404 if wanted else 200,
        rows=rows,
        total=total,
        page=page,
        page_size=PAGE_SIZE,
        wanted=wanted,
    )


async def load_account(request: Request, account_id: str) -> Account:
    account = await resources_of(request).accounts.get(account_id)
    if account is None or account.id != account_id:
        raise HTTPException(404)
    return account


ChosenAccount = Annotated[Account, Depends(load_account)]


@router.get("/accounts/{account_id}")
async def open_account(request: Request, session: PageSession, account: ChosenAccount) -> Response:
    return await _account_page(request, session, account)


@router.post("/accounts/{account_id}/plans")
async def change_plans(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, _PLANS)
    plans = {"plan_a": form.get("plan_a", ""), "plan_b": form.get("plan_b", "")}
    try:
        await operate.set_plans(resources_of(request), account, by(request, session), **plans)
    except InvalidParameter as error:
        return await _account_page(request, session, account, status=400, notice=error.message)
    return redirect(request, f"accounts/{account.id}")


@router.post("/accounts/{account_id}/disable")
async def disable(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, _STATE)
    await operate.disable(resources_of(request), account, by(request, session))
    return redirect(request, f"accounts/{account.id}")


@router.post("/accounts/{account_id}/enable")
async def enable(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, _STATE)
    await operate.enable(resources_of(request), account, by(request, session))
    return redirect(request, f"accounts/{account.id}")


@router.post("/accounts/{account_id}/link")
async def make_link(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    """Answer with the link, once: its user sets a password with it that no operator learns."""
    check_form(session, form, _LINK)
    resources = resources_of(request)
    path = await operate.make_sign_in_link(resources, account, by(request, session), LinkPurpose.NEW_PASSWORD)
    base = resources.settings.public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}{site_of(request)}"
    return await _account_page(request, session, account, link=base + path)


async def _account_page(
    request: Request, session: SignedIn, account: Account, *, status: int = 200, notice: str = "", link: str = ""
) -> Response:
    resources, now = resources_of(request), datetime.now(UTC)
    [row] = await resources.operator_reader.account_rows([account.id])
    keys = await resources.api_keys.list(account.id)
    _, loras = await resources.operator_reader.loras(0, 1, owner=account.id)
    return render(
        request,
        "account.html",
        session,
        here="accounts",
        status=status,
        notice=notice,
        new_link=link,
        account=account,
        unfinished=row.unfinished,
        keys=len(keys),
        active_keys=sum(key.state(now) == "active" for key in keys),
        loras=loras,
        windows=[(variant, await resources.auth.window(account.id, variant)) for variant in Variant],
        plans={variant: [plan.name for plan in resources.settings.plans_of(variant)] for variant in Variant},
        jobs=await resources.job_history.list(account.id, limit=JOBS_SHOWN),
        plans_token=form_token(session.token, _PLANS),
        state_token=form_token(session.token, _STATE),
        link_token=form_token(session.token, _LINK),
    )
