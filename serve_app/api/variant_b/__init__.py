"""Variant B: `X-API-Key`, generation runs, and the models an account may use."""

from fastapi import FastAPI

from serve_app.api.credentials import API_KEY
from serve_app.api.openapi import api_app, plans_text, retention_text
from serve_app.api.variant_b.routes import router
from serve_app.domain.requests import Variant
from serve_app.settings import Settings

_TAGS = {
    "Generation": "An image from a prompt with one of your account's models.",
    "Models": "The models your account may use.",
}


def create_app(settings: Settings) -> FastAPI:
    description = f"""\
Generate an image from a prompt with one of your account's models. Creating a run answers at once with a `run_id`; \
ask for the
run until its status is `completed` or `failed`.

Send your key as `X-API-Key: <API_KEY>`. Plans, in requests: {plans_text(settings.plans_of(Variant.B))}. Asking for a \
run does not count.
{retention_text(settings)}

Every error has the body `{{"error": {{"code", "message"}}}}`, errors of routing (404, and 405 with `Allow`) \
included."""
    return api_app(API_KEY, router, title="Atelier: Interface B", description=description, tags=_TAGS)
