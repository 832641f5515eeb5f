"""The jobs API: an account's jobs of both interfaces, with either credential."""

from fastapi import APIRouter, FastAPI

from serve_app.api.credentials import EITHER
from serve_app.api.images import router as images_router
from serve_app.api.jobs.account import router as account_router
from serve_app.api.jobs.events import EVENT_SCHEMAS
from serve_app.api.jobs.events import router as events_router
from serve_app.api.jobs.routes import router
from serve_app.api.openapi import api_app
from serve_app.api.webhooks import MESSAGES
from serve_app.api.webhooks import router as webhooks_router

_DESCRIPTION = """\
Every request of interface A and every run of interface B is a job. Here you create jobs of anything that the base \
models on offer can do, and list, read, cancel and delete your account's jobs, with either credential: \
`Authorization: Bearer <API_KEY>` or `X-API-Key: <API_KEY>`.

A job has up to four LoRAs, or none. It shows its real state (`queued`, `running`, `completed`, `failed`, `canceled`, \
`expired`), its fields with defaults filled in, and the seed of each image. Every request counts against the plan of \
the interface whose credential you send, except for reading or following one job."""


def create_app() -> FastAPI:
    tags = {
        "Jobs": "Your account's jobs, from both interfaces and from here.",
        "Images": "Pictures that your account uploads, to draw from, to mask by or to enlarge.",
        "Usage": "What completed jobs used, by day, key and LoRA.",
        "Account": "Its deletion, by an owner.",
        "Webhooks": "Where you are told by POST when jobs end, signed by Standard Webhooks.",
    }
    routers = (router, events_router, images_router, account_router, webhooks_router)
    routes = APIRouter(routes=[route for each in routers for route in each.routes])
    return api_app(
        *(EITHER, routes),
        title="Atelier: Jobs",
        description=_DESCRIPTION,
        tags=tags,
        webhooks=MESSAGES,
        schemas=EVENT_SCHEMAS,
    )
