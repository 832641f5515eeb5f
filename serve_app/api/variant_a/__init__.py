"""Variant A: `Authorization: Bearer`, generation, upscaling, and polling of both."""

from fastapi import FastAPI

from serve_app.api.credentials import BEARER
from serve_app.api.openapi import api_app, plans_text, retention_text
from serve_app.api.variant_a.routes import router
from serve_app.domain.requests import Variant
from serve_app.settings import Settings

_TAGS = {
    "Generation": "Images from a prompt with a LoRA model.",
    "Upscaling": "Larger copies of generated images.",
}


def create_app(settings: Settings) -> FastAPI:
    description = f"""\
Generate images from a text prompt with a LoRA model, and enlarge them. Creating calls answer at once with a \
`request_id`;
poll it every 5 seconds until its status is `completed` or `failed`.

Send your key as `Authorization: Bearer <API_KEY>`. Plans, in requests: {plans_text(settings.plans_of(Variant.A))}. \
Polling does not count.
{retention_text(settings)}

Every error has the body `{{"error": {{"code", "message"}}}}`, errors of routing (404, and 405 with `Allow`) \
included."""
    return api_app(BEARER, router, title="Atelier: Interface A", description=description, tags=_TAGS)
