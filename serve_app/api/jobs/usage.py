"""Path operation of `/v1/usage`: what an account's completed jobs used, by day, key and LoRA."""

from datetime import date, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, WithJsonSchema

from serve_app.api.dependencies import CallerDep, resources_of
from serve_app.api.errors import COUNTED_ERRORS, error_responses
from serve_app.api.openapi import EXAMPLE_ADAPTER_ID, success
from serve_app.api.responses import json_response
from serve_app.api.routing import ContractRoute
from serve_app.api.schemas import ResponseBody
from serve_app.domain import usage
from serve_app.domain.errors import InvalidParameter

router = APIRouter(route_class=ContractRoute, tags=["Usage"])

DEFAULT_DAYS, MOST_DAYS = 30, 366
Day = Annotated[date, WithJsonSchema({"type": "string", "format": "date"})]
Amount = Annotated[float, Field(ge=0)]

_EXAMPLE: dict[str, Any] = {
    "first_day": "2026-10-25",
    "last_day": "2026-11-23",
    "usage": [
        {
            "day": "2026-11-23",
            "key_id": "key_4lq6rwmzxvtm4hxrb3y6xpkd5e",
            "lora_id": EXAMPLE_ADAPTER_ID,
            "images": 12,
            "megapixel_steps": 94.372,
            "worker_seconds": 18.4,
        }
    ],
}


class UsageRow(ResponseBody):
    """One day's images with one key and one LoRA."""

    day: Annotated[Day, Field(description="The UTC day on which the jobs completed.")]
    key_id: Annotated[str, Field(description="Empty for jobs created in the console.")]
    lora_id: Annotated[str, Field(description="`upscale` for upscaled images.")]
    images: Annotated[int, Field(ge=1)]
    megapixel_steps: Annotated[Amount, Field(description="Width × height × steps of the images, in millions.")]
    worker_seconds: Annotated[Amount, Field(description="The jobs' share of a GPU or CPU.")]


class Usage(ResponseBody):
    """What completed jobs used. Days, keys and LoRAs without an image are left out."""

    first_day: Day
    last_day: Annotated[Day, Field(description="Today, UTC.")]
    usage: list[UsageRow]


@router.get(
    "/v1/usage",
    operation_id="getUsage",
    summary="What your account used, by day, key and LoRA",
    response_model=Usage,
    responses={
        200: success("The most recent days, oldest first.", {"Usage": _EXAMPLE}),
        **error_responses(InvalidParameter, *COUNTED_ERRORS),
    },
)
async def get_usage(
    request: Request,
    caller: CallerDep,
    days: Annotated[int, Query(ge=1, le=MOST_DAYS, description="Number of days, including today.")] = DEFAULT_DAYS,
) -> Response:
    reader = resources_of(request).usage
    last = await reader.today()
    rows = await reader.days(caller.account_id, last, days)
    found = Usage(first_day=last - timedelta(days=days - 1), last_day=last, usage=[_row(row) for row in rows])
    return json_response(found)


def _row(row: usage.Usage) -> UsageRow:
    return UsageRow(
        day=row.day,
        key_id=row.key_id,
        lora_id=row.lora_id,
        images=row.images,
        megapixel_steps=row.megapixel_steps,
        worker_seconds=row.seconds,
    )
