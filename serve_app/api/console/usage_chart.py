"""A bar chart of usage by day, and by LoRA or key: the geometry of an SVG that the server draws."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

from serve_app.domain.usage import Usage

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 2, 16, 26
"""Pixels around the bars, for the labels of the axes."""
SHOWN = 6
"""LoRAs or keys with a colour of their own, those with the most; the others are one series."""
TICKS = 4
LABEL_EVERY = 5


class Series(NamedTuple):
    """A colour (its number), and what it stands for."""

    number: int
    name: str
    amount: float


class Bar(NamedTuple):
    """A part of a day's bar, of one series."""

    series: int
    x: float
    y: float
    width: float
    height: float


class Day(NamedTuple):
    """A day's bar from the bottom up; `text` says it in words."""

    x: float
    width: float
    label: str
    text: str
    bars: Sequence[Bar]


class Tick(NamedTuple):
    y: float
    label: str


class Chart(NamedTuple):
    width: int
    height: int
    bottom: int
    left: int
    days: Sequence[Day]
    ticks: Sequence[Tick]
    series: Sequence[Series]


def draw(
    rows: Iterable[Usage],
    last: date,
    number: int,
    names: Mapping[str, str],
    *,
    group: Callable[[Usage], str] = lambda row: row.lora_id,
    amount: Callable[[Usage], float] = lambda row: row.images,
    unit: str = "images",
) -> Chart:
    """Chart the `amount` of `number` days that end with `last`, by `group`, whose names are given."""
    by_day: dict[date, defaultdict[str, float]] = {
        last - timedelta(days=ago): defaultdict(float) for ago in reversed(range(number))
    }
    totals: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        by_day[row.day][group(row)] += amount(row)
        totals[group(row)] += amount(row)
    shown = sorted(totals, key=lambda each: -totals[each])[:SHOWN]
    series = [Series(place, names.get(each, each), totals[each]) for place, each in enumerate(shown)]
    if len(totals) > SHOWN:
        series.append(Series(SHOWN, "Others", sum(totals.values()) - sum(each.amount for each in series)))
    top = _round_up(max(sum(amounts.values()) for amounts in by_day.values()))
    step = (WIDTH - LEFT - RIGHT) / number
    days = [
        _day(
            day,
            amounts,
            shown,
            series,
            x=LEFT + place * step,
            width=step * 0.72,
            top=top,
            is_labelled=_has_label(place, number),
            unit=unit,
        )
        for place, (day, amounts) in enumerate(by_day.items())
    ]
    ticks = [Tick(_y(top * part / TICKS, top), str(top * part // TICKS)) for part in range(TICKS + 1)]
    return Chart(WIDTH, HEIGHT, HEIGHT - BOTTOM, LEFT, days, ticks, series)


def _day(
    day: date,
    amounts: Mapping[str, float],
    shown: Sequence[str],
    series: Sequence[Series],
    *,
    x: float,
    width: float,
    top: int,
    is_labelled: bool,
    unit: str,
) -> Day:
    parts = [amounts.get(each, 0.0) for each in shown]
    parts.append(sum(amounts.values()) - sum(parts) if len(series) > SHOWN else 0.0)
    bars: list[Bar] = []
    below = 0.0
    for number, part in enumerate(parts):
        if part:
            y = _y(below + part, top)
            bars.append(Bar(number, round(x, 1), y, round(width, 1), round(_y(below, top) - y, 1)))
            below += part
    parts_text = ", ".join(f"{each.name} {in_short(part)}" for each, part in zip(series, parts, strict=False) if part)
    name = f"{day:%-d %b}"
    return Day(round(x, 1), round(width, 1), name if is_labelled else "", f"{name}: {parts_text or f'no {unit}'}", bars)


def in_short(amount: float) -> str:
    """Whole numbers as they are, others with one digit."""
    return f"{amount:,.0f}" if amount == int(amount) else f"{amount:,.1f}"


def _has_label(place: int, number: int) -> bool:
    """Each fifth day, counted from today."""
    return (number - 1 - place) % LABEL_EVERY == 0


def _y(amount: float, top: int) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * amount / top, 1)


def _round_up(amount: float) -> int:
    """The smallest of 4, 8, 12, 16, 20, 40, 80, … that is not less: each quarter of it is whole."""
    unit = 1
    while True:
        for factor in (4, 8, 12, 16, 20):
            if factor * unit >= amount:
                return factor * unit
        unit *= 10
