"""Every page of the service with the addresses of its states: what the checks of pages go through."""

from collections.abc import Mapping

PUBLIC: Mapping[str, tuple[str, ...]] = {
    "/": ("/", "/nothing-here"),
    "/docs": ("/docs",),
    "/docs/{name}": ("/docs/a", "/docs/b", "/docs/jobs", "/docs/loras"),
}
SIGNED_OUT: Mapping[str, tuple[str, ...]] = {
    "/sign-in": ("/console/sign-in",),
    "/links/{token}": ("/console/links/nothing", "{link}"),
}
CONSOLE: Mapping[str, tuple[str, ...]] = {
    "/playground": ("playground", "playground?prompt=a+dragon&steps=0"),
    "/playground/{job_id}": ("playground/{job}",),
    "/compare": ("compare", "compare?across=weights", "compare?across=seeds"),
    "/history": ("history", "history?state=failed", "history?from=2031-01-01"),
    "/history/{job_id}": ("history/{job}", "nothing-here"),
    "/loras": ("loras", "loras?find=nothing"),
    "/loras/new": ("loras/new",),
    "/loras/{lora_id}": ("loras/{lora}",),
    "/verify": ("verify",),
    "/usage": ("usage",),
    "/settings": ("settings",),
    "/settings/{slug}": ("settings/api", "settings/api-keys", "settings/both"),
    "/settings/password": ("settings/password",),
    "/settings/users": ("settings/users",),
    "/settings/delete-account": ("settings/delete-account",),
}
"""The addresses are below /console."""
OPERATORS_SIGNED_OUT: Mapping[str, tuple[str, ...]] = {"/sign-in": ("sign-in",), "/links/{token}": ("links/nothing",)}
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "/": ("", "nothing-here"),
    "/accounts": ("accounts", "accounts?name=nobody"),
    "/accounts/{account_id}": ("accounts/{account}",),
    "/failures": ("failures", "failures?code=timeout"),
    "/jobs/{job_id}": ("jobs/{job}",),
    "/models": ("models", "models?account=nobody"),
    "/audit": ("audit", "audit?act=password_set"),
    "/checks": ("checks",),
}
"""The addresses are below /operators."""
NO_PAGES = frozenset(
    {
        "/favicon.ico",
        "/robots.txt",
        "/llms.txt",
        "/openapi/{name}.json",
        "/usage.csv",
        "/history/{job_id}/{image_id}",
        "/history/{job_id}/{image_id}/thumbnail",
        "/playground/{job_id}/previews/{index}",
        "/playground/{job_id}/panel",
        "/playground/cards",
        "/pictures/{image_id}",
        "/compare/grid",
        "/compare/cards",
        "/loras/{lora_id}/sample",
        "/live",
    }
)
"""Files, pictures, and parts of pages that are checked with them."""
