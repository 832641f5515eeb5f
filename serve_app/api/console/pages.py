"""The pages about the account: sign-in, settings, keys, and what went wrong."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import HTMLResponse

from serve_app.api.console.browser_name import browser_name
from serve_app.api.console.key_page import EXPIRIES, KEY_NAME_LENGTH, KEY_PAGES, SCOPES, KeyPage, curl_line
from serve_app.api.console.rendering import render
from serve_app.api.console.session import SignedIn, anonymous_token, set_anonymous
from serve_app.api.dependencies import resources_of
from serve_app.api.site.addresses import site_of
from serve_app.api.site.form_tokens import form_token, single_use_token
from serve_app.domain.accounts import ApiKey, Role
from serve_app.domain.durations import period_text
from serve_app.domain.requests import Variant
from serve_app.service.resources import Resources
from serve_app.stores.sessions import digest_of

MOST_ENDED = 20
"""Active keys no more in the list, the newest."""
NAME_LENGTH = 100
"""Characters of an account's name."""


def sign_in_page(
    request: Request,
    *,
    status: int = 200,
    problem: str = "",
    name: str = "",
    after: str = "",
    retry_after_s: int | None = None,
) -> HTMLResponse:
    token = anonymous_token(request)
    response = render(
        request,
        "sign_in.html",
        None,
        status=status,
        problem=problem,
        name=name[:NAME_LENGTH],
        after="playground" if after == "playground" else "",
        form_token=form_token(token, "sign in"),
    )
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    set_anonymous(request, response, token)
    return response


async def settings_page(request: Request, session: SignedIn) -> HTMLResponse:
    resources, account_id = resources_of(request), session.account.id
    windows = [(page, await resources.auth.window(account_id, page.variant)) for page in KEY_PAGES]
    adapters = await resources.catalog.adapters(account_id)
    return render(
        request,
        "settings.html",
        session,
        here="settings",
        windows=windows,
        adapters=len(adapters),
        sessions=await resources.sessions.list(account_id, user_id=session.user.id),
        this_session=digest_of(session.token),
        end_token=form_token(session.token, "end session"),
    )


async def keys_page(
    request: Request, session: SignedIn, page: KeyPage, *, status: int = 200, notice: str = "",
    made: ApiKey | None = None, secret: str = "",
) -> HTMLResponse:  # fmt: skip
    resources, now = resources_of(request), datetime.now(UTC)
    keys = [key for key in await keys_of(resources, session) if key.interfaces >= page.interfaces]
    keys.sort(key=lambda key: (key.state(now) == "active", key.created_at), reverse=True)
    ended = [key for key in keys if key.state(now) != "active"]
    keys = [*keys[: len(keys) - len(ended)], *ended[:MOST_ENDED]]
    adapters = await resources.catalog.adapters(session.account.id, limit=1)
    example = min(made.adapters) if made and made.adapters else adapters[0].id if adapters else "YOUR_LORA"
    account = session.account
    plan = resources.settings.plan_named(page.variant, account.plan_a if page.variant is Variant.A else account.plan_b)
    return render(
        request,
        "keys.html",
        session,
        status=status,
        here=page.slug,
        page=page,
        keys=keys,
        left_out=len(ended[MOST_ENDED:]),
        suggested=suggested_name(request, now),
        lora_names=await _only_loras(resources, account.id, keys),
        now=now,
        docs=f"{site_of(request)}/docs/{page.variant}",
        notice=notice,
        made=made,
        secret=secret,
        curl=curl_line(page, _base_url(request), secret, example),
        create_token=single_use_token(session.token, "create key"),
        roll_token=single_use_token(session.token, "roll key"),
        scopes=SCOPES,
        expiries=EXPIRIES,
        revoke_token=form_token(session.token, "revoke key"),
        key_name_length=KEY_NAME_LENGTH,
        most=plan.limit,
        period=period_text(plan.window),
    )


async def _only_loras(resources: Resources, account_id: str, keys: Sequence[ApiKey]) -> Mapping[str, str]:
    """Name the LoRAs to which single keys are kept, where the account may still use them."""
    ids = {lora_id for key in keys if key.adapters and len(key.adapters) == 1 for lora_id in key.adapters}
    found = [await resources.catalog.adapter_of(lora_id, account_id) for lora_id in sorted(ids)]
    return {each.adapter.id: each.adapter.name for each in found if each is not None}


async def keys_of(resources: Resources, session: SignedIn) -> Sequence[ApiKey]:
    """Return the keys that the user may change: for an owner all of the account's, else its own."""
    keys, user = await resources.api_keys.list(session.account.id), session.user
    return [key for key in keys if user.role is Role.OWNER or key.user_id == user.id]


async def usable_keys(resources: Resources, session: SignedIn) -> list[ApiKey]:
    """Return the user's keys that work now, the newest first."""
    now = datetime.now(UTC)
    return [key for key in reversed(await keys_of(resources, session)) if key.state(now) == "active"]


def suggested_name(request: Request, now: datetime) -> str:
    """A name for a new key by where and when it is made: `Firefox on Linux, 24 Nov`."""
    browser = browser_name(request.headers.get("user-agent", ""))
    return f"{browser or 'Key'}, {now:%-d %b}"[:KEY_NAME_LENGTH]


def problem_page(request: Request, status: int, title: str, text: str) -> HTMLResponse:
    """A page that says what went wrong, and where to go on."""
    return render(request, "problem.html", None, status=status, title=title, text=text)


def _base_url(request: Request) -> str:
    public_url = resources_of(request).settings.public_url
    return public_url.rstrip("/") or f"{request.url.scheme}://{request.url.netloc}"
