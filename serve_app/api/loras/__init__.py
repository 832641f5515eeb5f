"""The LoRAs of an account: listed, uploaded, changed, shared and removed, with either credential."""

from fastapi import FastAPI

from serve_app.api.credentials import EITHER
from serve_app.api.loras.routes import router
from serve_app.api.openapi import api_app
from serve_app.domain.accounts import Scope

_DESCRIPTION = """\
A LoRA is a `lora_id` of interface A and a model of interface B. Here you list those that your account may use, and \
add your own
with either credential: `Authorization: Bearer <API_KEY>` or `X-API-Key: <API_KEY>`.

A LoRA that you add is checked against its base model while you wait, and served at once. It is your account's alone \
until you share
it. Adding, changing, sharing and deleting take a key with the scope `loras`; every request counts against your plan."""


def create_app() -> FastAPI:
    tags = {"LoRAs": "The LoRAs your account may use, including its own."}
    app = api_app(EITHER, router, title="Atelier: LoRAs", description=_DESCRIPTION, tags=tags)
    app.state.changing_scope = Scope.LORAS
    return app
