"""The operators' pages of accounts and of the audit log."""

from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response

from serve_app.accounts.sign_in import LinkPurpose
from serve_app.api.dependencies import accounts_of, jobs_of, operations_of, settings_of
from serve_app.api.parts import AccountParts
from serve_app.domain.accounts import Account
from serve_app.domain.audit import Act, operator
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import Variant
from serve_app.operations.reports import log_names
from serve_app.web.operators.pages import PAGE_SIZE, FormSession, OperatorSession, PageSession, render
from serve_app.web.site.forms import Form, check_form, page_number, redirect, service_url
from serve_app.web.site.sign_in import actor_of

JOBS_SHOWN = 10

router = APIRouter()


@router.get("/accounts")
async def open_accounts(request: Request, session: PageSession) -> Response:
    """List accounts, newest first; or the one with a name or id."""
    wanted = request.query_params.get("name", "").strip()[:100]
    if wanted and (found := await accounts_of(request).store.get(wanted)):
        return redirect(request, f"accounts/{found.id}")
    page = page_number(request)
    rows, total = await operations_of(request).reader.accounts((page - 1) * PAGE_SIZE, PAGE_SIZE)
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
    account = await accounts_of(request).store.get(account_id)
    if account is None or account.id != account_id:
        raise HTTPException(404)
    return account


ChosenAccount = Annotated[Account, Depends(load_account)]


@router.get("/accounts/{account_id}")
async def open_account(request: Request, session: PageSession, account: ChosenAccount) -> Response:
    return await _account_page(request, session, account)


@router.post("/accounts/{account_id}/plans")
async def change_plans(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, "account plans")
    plans = {"plan_a": form.get("plan_a", ""), "plan_b": form.get("plan_b", "")}
    try:
        await operations_of(request).acts.set_plans(account, actor_of(request, session.who), **plans)
    except InvalidParameter as error:
        return await _account_page(request, session, account, status=400, notice=error.message)
    return redirect(request, f"accounts/{account.id}?said=plans")


@router.post("/accounts/{account_id}/disable")
async def disable(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, "account state")
    await operations_of(request).acts.disable(account, actor_of(request, session.who))
    return redirect(request, f"accounts/{account.id}")


@router.post("/accounts/{account_id}/enable")
async def enable(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    check_form(session, form, "account state")
    await operations_of(request).acts.enable(account, actor_of(request, session.who))
    return redirect(request, f"accounts/{account.id}")


@router.post("/accounts/{account_id}/link")
async def make_link(request: Request, session: FormSession, account: ChosenAccount, form: Form) -> Response:
    """Show once the link by which a user sets a password that no operator learns."""
    check_form(session, form, "account link")
    path = await operations_of(request).acts.make_sign_in_link(
        account, actor_of(request, session.who), LinkPurpose.NEW_PASSWORD
    )
    return await _account_page(request, session, account, link=service_url(request) + path)


async def _account_page(
    request: Request, session: OperatorSession, account: Account, *, status: int = 200, notice: str = "", link: str = ""
) -> Response:
    reader, now = operations_of(request).reader, datetime.now(UTC)
    [row] = await reader.account_rows([account.id])
    keys = await accounts_of(request).api_keys.list(account.id)
    _, loras = await reader.loras(0, 1, owner=account.id)
    return render(
        request,
        "account.html",
        session,
        here="accounts",
        status=status,
        notice=notice,
        new_link=link,
        said=request.query_params.get("said", ""),
        account=account,
        unfinished=row.unfinished,
        keys=len(keys),
        active_keys=sum(key.state(now) == "active" for key in keys),
        loras=loras,
        windows=[(variant, await accounts_of(request).auth.window(account.id, variant)) for variant in Variant],
        plans={variant: [plan.name for plan in settings_of(request).plans_of(variant)] for variant in Variant},
        jobs=await jobs_of(request).history.list(account.id, limit=JOBS_SHOWN),
    )


@router.get("/audit")
async def open_audit(request: Request, session: PageSession) -> Response:
    asked = request.query_params
    wanted, act = asked.get("account", "").strip()[:100], asked.get("act", "")
    act = act if act in set(Act) else ""
    accounts, operations = accounts_of(request), operations_of(request)
    page = await accounts.audit.page(
        log=await _log(accounts, wanted) if wanted else "",
        act=act,
        before=asked.get("before", ""),
        limit=PAGE_SIZE,
    )
    given = {name: value for name, value in (("account", wanted), ("act", act)) if value}
    logs = {row.log for row in page.rows}
    return render(
        request,
        "audit.html",
        session,
        here="audit",
        rows=page.rows,
        names=await log_names(accounts.store, operations.operators, operations.reader, accounts.audit, logs),
        acts=list(Act),
        wanted=wanted,
        act=act,
        is_filtered=bool(given),
        is_first="before" not in asked,
        newest=urlencode(given),
        older=urlencode({**given, "before": page.next}) if page.next else "",
    )


async def _log(accounts: AccountParts, wanted: str) -> str:
    """Name the log of an account's name or id, even of a deleted one, or of `operator:<name>`."""
    account = None if wanted.startswith(operator("")) else await accounts.store.get(wanted)
    return accounts.audit.pseudonym(account.id if account else wanted)
