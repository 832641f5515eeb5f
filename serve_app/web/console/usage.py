"""The usage page shows both plans' windows, and the last days by LoRA, key and day as tables and CSV."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from serve_app.accounts.usage import UPSCALES, Usage
from serve_app.api.dependencies import accounts_of, loras_of
from serve_app.operations.reports import csv_text
from serve_app.web.console.navigation import KEY_PAGES
from serve_app.web.console.pages import PageSession, render

router = APIRouter()

DAYS = 30
MOST_ROWS = 50
"""A table has at most this many rows; the CSV has all."""
_COLUMNS = ("day", "key", "key_id", "lora", "lora_id", "images", "megapixel_steps", "worker_seconds")


class Sum(NamedTuple):
    """A row of a table: what the images of one LoRA, key or day used."""

    name: str
    images: int
    megapixel_steps: float
    seconds: float


class Month(NamedTuple):
    """Usage of the last `DAYS` days, with the names of its LoRAs and keys."""

    last: date
    rows: list[Usage]
    loras: Mapping[str, str]
    keys: Mapping[str, str]


@router.get("/usage")
async def open_usage(request: Request, session: PageSession) -> Response:
    account_id = session.who.id
    month = await _month(request, account_id)
    by_day = _sums(month.rows, lambda row: row.day.isoformat())
    return render(
        request,
        "usage.html",
        session,
        here="usage",
        windows=[(page, await accounts_of(request).auth.window(account_id, page.variant)) for page in KEY_PAGES],
        days=DAYS,
        most=MOST_ROWS,
        tables=[
            ("LoRA", _sums(month.rows, lambda row: month.loras[row.lora_id])),
            ("Key", _sums(month.rows, lambda row: month.keys[row.key_id])),
            ("Day", sorted(by_day, key=lambda each: each.name, reverse=True)),
        ],
    )


@router.get("/usage.csv")
async def download_usage(request: Request, session: PageSession) -> Response:
    month = await _month(request, session.who.id)
    rows = (
        (
            *(row.day.isoformat(), month.keys[row.key_id], row.key_id, month.loras[row.lora_id], row.lora_id),
            *(row.images, f"{row.megapixel_steps:.3f}", f"{row.seconds:.3f}"),
        )
        for row in month.rows
    )
    headers = {"Content-Disposition": f'attachment; filename="usage-{month.last.isoformat()}.csv"'}
    return Response(csv_text(_COLUMNS, rows), media_type="text/csv", headers=headers)


async def _month(request: Request, account_id: str) -> Month:
    accounts = accounts_of(request)
    last = await accounts.usage.today()
    rows = await accounts.usage.days(account_id, last, DAYS)
    loras = {lora.id: lora.name for lora in await loras_of(request).catalog.adapters(account_id)}
    bases = {base.id: "No LoRA" for base in await loras_of(request).applied_catalog.applied_base_models()}
    keys = {key.id: key.name or key.hint for key in await accounts.api_keys.list(account_id)}
    known = {UPSCALES: "Upscales", **bases, **loras}, {"": "Console", **keys}
    return Month(
        last,
        rows,
        {row.lora_id: " + ".join(_name(each, known[0]) for each in row.lora_ids) for row in rows},
        {row.key_id: _name(row.key_id, known[1]) for row in rows},
    )


def _name(id_: str, known: Mapping[str, str]) -> str:
    return known.get(id_, f"{id_[:14]}… (removed)")


def _sums(rows: Iterable[Usage], name_of: Callable[[Usage], str]) -> list[Sum]:
    """Add up the rows of one name; the most images come first."""
    grouped: defaultdict[str, list[Usage]] = defaultdict(list)
    for row in rows:
        grouped[name_of(row)].append(row)
    sums = [
        Sum(
            name,
            sum(row.images for row in of),
            sum(row.megapixel_steps for row in of),
            sum(row.seconds for row in of),
        )
        for name, of in grouped.items()
    ]
    return sorted(sums, key=lambda each: (-each.images, each.name))
