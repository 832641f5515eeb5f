"""Draws a dashboard's panels by matplotlib: grid, titles, units and legends of its JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from tests.dashboard.prometheus import SCRAPE_S, Series

DPI = 100
COLUMN, LINE, GAP, HEADER = 64, 36, 8, 64
"""Pixels: of Grafana's 24 columns, of a line of its grid, between panels, and above all."""
MINUTES_FROM_S = 120
TITLE, LEGEND_LINE = 30, 17
LEFT, RIGHT, TICKS = 68, 16, 20
PAGE, CARD, BORDER, INK, FAINT = "#f4f5f5", "#ffffff", "#dfe1e4", "#24292e", "#6b7280"
COLOURS = (
    *("#5b8f3f", "#d4a017", "#3f7fbf", "#d9722b", "#c8372d", "#2f5d9b", "#8e44ad", "#6d4c8e"),
    *("#17a2a2", "#a8791c", "#b05a7a", "#77808c", "#7fb069", "#e0a96d", "#6fa8dc", "#999933"),
)
Drawn = Mapping[int, Sequence[Series]]
"""Of each panel, by its id."""


def draw(panels: Sequence[dict[str, Any]], drawn: Drawn, begin: float, heading: str, note: str, file: Path) -> None:
    """Write a PNG of all panels, with the time since `begin` below each."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * COLUMN + 2 * GAP, lines * LINE + HEADER + 2 * GAP
    with pyplot.rc_context({"font.size": 8.5, "text.color": INK, "font.family": "DejaVu Sans"}):
        figure = pyplot.figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAGE)
        end = max(time for series in drawn.values() for one in series for time in one.times)
        sheet = _Sheet(figure, width, height, begin, end)
        sheet.text(2 * GAP, 14, heading, size=14, weight="bold")
        sheet.text(2 * GAP, 40, note, color=FAINT)
        for panel in panels:
            sheet.draw(panel, drawn.get(panel["id"], ()))
        figure.savefig(file, dpi=DPI, facecolor=PAGE)
        pyplot.close(figure)
    Image.open(file).convert("RGB").quantize(128).save(file, optimize=True)


class _Sheet:
    """A figure measured in pixels from its top left corner."""

    def __init__(self, figure: Figure, width: int, height: int, begin: float, end: float) -> None:
        self._figure, self._width, self._height = figure, width, height
        self._begin, self._end = begin, (end - begin) / 60

    def draw(self, panel: dict[str, Any], series: Sequence[Series]) -> None:
        at = panel["gridPos"]
        left, top = GAP + at["x"] * COLUMN + GAP // 2, HEADER + at["y"] * LINE + GAP // 2
        width, height = at["w"] * COLUMN - GAP, at["h"] * LINE - GAP
        if panel["type"] == "row":
            self.text(left + 4, top + 6, panel["title"], size=11, weight="bold")
            return
        self._card(left, top, width, height)
        self.text(left + 12, top + 9, panel["title"], size=9.5, weight="bold")
        if not any(one.values for one in series):
            self._no_data(panel, left, top, width, height)
        elif panel["type"] == "stat":
            value = _formatted(series[0].values[-1], panel["fieldConfig"]["defaults"]["unit"])
            self.text(left + width / 2, top + height / 2, value, size=38, color=COLOURS[0], ha="center", va="center")
        else:
            self._time_series(panel, series, left, top, width, height)

    def text(self, x: float, y: float, words: str, *, size: float = 8.5, **how: Any) -> None:
        how = {"va": "top", "fontsize": size, **how}
        self._figure.text(x / self._width, 1 - y / self._height, words, **how)

    def _card(self, x: float, y: float, width: float, height: float) -> None:
        at = (x / self._width, 1 - (y + height) / self._height)
        size = (width / self._width, height / self._height)
        self._figure.add_artist(Rectangle(at, *size, facecolor=CARD, edgecolor=BORDER, linewidth=1, zorder=-1))

    def _no_data(self, panel: dict[str, Any], x: float, y: float, width: float, height: float) -> None:
        self.text(x + width / 2, y + height / 2 - 8, "No data", size=12, color=FAINT, ha="center", va="center")
        words = textwrap.fill(panel.get("description", ""), int(width / 7))
        self.text(x + width / 2, y + height / 2 + 8, words, color=FAINT, ha="center")

    def _time_series(
        self, panel: dict[str, Any], series: Sequence[Series], x: float, y: float, width: float, height: float
    ) -> None:
        below = TICKS + self._legend(series, x + 12, y + height, width - 24)
        inner = (x + LEFT, y + height - below, width - LEFT - RIGHT, height - TITLE - below)
        axes = self._axes(*inner)
        defaults = panel["fieldConfig"]["defaults"]
        if defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal":
            self._stack(axes, series)
        else:
            for number, one in enumerate(series):
                axes.plot(*self._with_gaps(one), color=_colour(number), linewidth=1.3)
        axes.set_xlim(0, self._end)
        _scale_values(axes, defaults)

    def _stack(self, axes: Axes, series: Sequence[Series]) -> None:
        times = sorted({time for one in series for time in one.times})
        found = [dict(zip(one.times, one.values, strict=True)) for one in series]
        heights = [[values.get(time, 0.0) for time in times] for values in found]
        axes.stackplot(self._minutes(times), heights, colors=COLOURS, alpha=0.75, linewidth=0)

    def _with_gaps(self, one: Series) -> tuple[list[float], list[float]]:
        """Return minutes and values, which are no number where Prometheus has none."""
        times: list[float] = []
        values: list[float] = []
        for time, value in zip(one.times, one.values, strict=True):
            if times and time - times[-1] > 1.5 * SCRAPE_S:
                times.append(times[-1] + SCRAPE_S)
                values.append(float("nan"))
            times.append(time)
            values.append(value)
        return self._minutes(times), values

    def _minutes(self, times: Sequence[float]) -> list[float]:
        return [(time - self._begin) / 60 for time in times]

    def _axes(self, x: float, bottom: float, width: float, height: float) -> Axes:
        at = (x / self._width, 1 - bottom / self._height, width / self._width, height / self._height)
        axes = self._figure.add_axes(at, facecolor=CARD)
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.grid(color=BORDER, linewidth=0.7)
        axes.tick_params(length=0, labelcolor=FAINT, labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:.0f} min"))
        return axes

    def _legend(self, series: Sequence[Series], x: float, bottom: float, width: float) -> float:
        """Draw the names of the series above zero, and how many others there are; return the height."""
        entries = [(one.name, _colour(number)) for number, one in enumerate(series) if any(one.values)]
        if zeros := len(series) - len(entries):
            entries.append((f"{zeros} at zero" if entries else "all at zero", FAINT))
        rows: list[list[tuple[float, str, str]]] = [[]]
        at = 0.0
        for name, colour in entries:
            size = 28 + self._text_width(name)
            if at + size > width and rows[-1]:
                rows.append([])
                at = 0.0
            rows[-1].append((at, name, colour))
            at += size
        top = bottom - 8 - LEGEND_LINE * len(rows)
        for line, row in enumerate(rows):
            for offset, name, colour in row:
                self._legend_entry(x + offset, top + line * LEGEND_LINE, name, colour)
        return bottom - top + 4

    def _legend_entry(self, x: float, y: float, name: str, colour: str) -> None:
        at = (x / self._width, 1 - (y + 9) / self._height)
        self._figure.add_artist(Rectangle(at, 14 / self._width, 3 / self._height, facecolor=colour, linewidth=0))
        self.text(x + 18, y + 1, name, color=INK)

    def _text_width(self, words: str) -> float:
        text = self._figure.text(0, 0, words, fontsize=8.5)
        width = text.get_window_extent().width
        text.remove()
        return width


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _scale_values(axes: Axes, defaults: dict[str, Any]) -> None:
    """Begin the axis at the panel's `min`, and put round numbers of its unit beside it."""
    unit = defaults["unit"]
    bottom, top = axes.get_ylim()
    bottom, top = defaults.get("min", bottom), max(top, _least(unit))
    part = 60.0 if unit == "s" and top >= MINUTES_FROM_S else 1.0
    while unit == "bytes" and top / part >= 1024:
        part *= 1024
    axes.set_yticks([tick * part for tick in MaxNLocator(4).tick_values(bottom / part, top / part)])
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formatted(value, unit)))


def _least(unit: str) -> float:
    """Return the lowest top of an axis on which all is zero."""
    return {"short": 1.0, "s": 0.01, "bytes": 1.0}.get(unit, 0.1)


def _formatted(value: float, unit: str) -> str:
    """Write a number as Grafana does in its unit."""
    if unit == "s":
        return (
            f"{value * 1000:.3g} ms"
            if 0 < abs(value) < 1
            else f"{value / 60:.3g} min"
            if value >= MINUTES_FROM_S
            else f"{value:.3g} s"
        )
    if unit == "bytes":
        power = 0
        while abs(value) >= 1024 and power < 4:
            value, power = value / 1024, power + 1
        return f"{value:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return f"{value:.3g}" + {"ops": " ops/s", "reqps": " req/s"}.get(unit, "")
