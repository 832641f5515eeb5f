"""A bar chart of images by day and LoRA: the geometry of an SVG that the server draws."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

from serve_app.domain.usage import Usage

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 44, 2, 16, 26
"""Pixels around the bars, for the labels of the axes."""
SHOWN = 6
"""LoRAs with a colour of their own, those with the most images; the others are one series."""
TICKS = 4
LABEL_EVERY = 5


class Series(NamedTuple):
    """A colour (its number), and what it stands for."""

    number: int
    name: str
    images: int


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


def draw(rows: Iterable[Usage], last: date, number: int, names: Mapping[str, str]) -> Chart:
    """Chart `number` days that end with `last`; `names` are those of the LoRAs."""
    by_day: dict[date, Counter[str]] = {last - timedelta(days=ago): Counter() for ago in reversed(range(number))}
    totals: Counter[str] = Counter()
    for row in rows:
        by_day[row.day][row.lora_id] += row.images
        totals[row.lora_id] += row.images
    shown = [lora_id for lora_id, _ in totals.most_common(SHOWN)]
    series = [Series(place, names.get(each, each), totals[each]) for place, each in enumerate(shown)]
    if others := totals.total() - sum(each.images for each in series):
        series.append(Series(SHOWN, "Others", others))
    top = _round_up(max(counts.total() for counts in by_day.values()))
    step = (WIDTH - LEFT - RIGHT) / number
    days = [
        _day(
            day,
            counts,
            shown,
            series,
            x=LEFT + place * step,
            width=step * 0.72,
            top=top,
            is_labelled=_has_label(place, number),
        )
        for place, (day, counts) in enumerate(by_day.items())
    ]
    ticks = [Tick(_y(top * part / TICKS, top), str(top * part // TICKS)) for part in range(TICKS + 1)]
    return Chart(WIDTH, HEIGHT, HEIGHT - BOTTOM, LEFT, days, ticks, series)


def _day(
    day: date,
    counts: Counter[str],
    shown: Sequence[str],
    series: Sequence[Series],
    *,
    x: float,
    width: float,
    top: int,
    is_labelled: bool,
) -> Day:
    parts = [counts[each] for each in shown]
    parts.append(counts.total() - sum(parts))
    bars: list[Bar] = []
    below = 0
    for number, images in enumerate(parts):
        if images:
            y = _y(below + images, top)
            bars.append(Bar(number, round(x, 1), y, round(width, 1), round(_y(below, top) - y, 1)))
            below += images
    said = ", ".join(f"{each.name} {images}" for each, images in zip(series, parts, strict=False) if images)
    name = f"{day:%-d %b}"
    return Day(round(x, 1), round(width, 1), name if is_labelled else "", f"{name}: {said or 'no images'}", bars)


def _has_label(place: int, number: int) -> bool:
    """Each fifth day, counted from today."""
    return (number - 1 - place) % LABEL_EVERY == 0


def _y(images: float, top: int) -> float:
    return round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * images / top, 1)


def _round_up(images: int) -> int:
    """The smallest of 4, 8, 12, 16, 20, 40, 80, … that is not less: each quarter of it is whole."""
    unit = 1
    while True:
        for factor in (4, 8, 12, 16, 20):
            if factor * unit >= images:
                return factor * unit
        unit *= 10
