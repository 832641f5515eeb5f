"""Writes the measured figures into the model card, between its two marks."""

from typing import Any

from .plan import ROOT

CARD = ROOT / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Figures = dict[str, Any]


def write_figures(report: Figures) -> None:
    """Replaces what stands between the marks; the rest of the card is written by hand."""
    text = CARD.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    CARD.write_text(f"{before}{BEGIN}\n{figures_as_markdown(report)}\n{END}{after}")


def figures_as_markdown(report: Figures) -> str:
    parts: list[str] = []
    if following := report.get("following"):
        parts.append(_following(following))
    if loras := report.get("loras"):
        parts.append(_loras(loras))
    if guidance := report.get("guidance"):
        parts.append(_guidance(guidance))
    if upscalers := report.get("upscalers"):
        rows = [[name, f["psnr"], f["lanczos"], f["gain"]] for name, f in upscalers.items()]
        parts.append("PSNR (dB) on held-out scenes:\n\n" + _table(["scale", "ours", "Lanczos", "gain"], rows))
    if speed := report.get("speed"):
        parts.append(
            f"512², 30 steps, guidance 7.5, 2 CPU threads: {speed['seconds_per_image_512_30_steps']} s per image "
            f"(median {speed['seconds_median']} s), {speed['peak_memory_above_torch_mb']} MB above torch's own memory."
        )
    return "\n\n".join(parts)


def _following(figures: Figures) -> str:
    columns = list(figures)
    measures = [name for name in figures[columns[0]] if name != "prompts"]
    rows = [[measure, *(_percent(figures[column][measure]) for column in columns)] for measure in measures]
    return f"Held-out prompts ({figures[columns[0]]['prompts']} each), 30 steps:\n\n" + _table(
        ["right", *columns], rows
    )


def _loras(figures: Figures) -> str:
    rows: list[list[Any]] = []
    for name, style in figures.items():
        if isinstance(style, dict):
            change = " → ".join(str(value) for value in style["change by weight"].values())
            rows.append([name, _percent(style["told apart"]), change, _percent(style["grows"])])
    head = ["LoRA", "told apart at 1.0", "change at 0.1 → 0.5 → 1.0 (of 255)", "grows with weight"]
    return (
        f"Styles on {figures['prompts']} prompts (the base is named as such on {_percent(figures['base'])}):\n\n"
        + _table(head, rows)
    )


def _guidance(figures: Figures) -> str:
    negative = figures["negative"]
    rows = [
        [name, _percent(case["accepted"]), _percent(case["not burnt out"])]
        for name, case in figures.items()
        if name != "negative"
    ]
    words = (
        f"A negative prompt naming the colour that covers most of a picture: its share falls from {_percent(negative['share without'])} "
        f"to {_percent(negative['share with'])}; lower on {_percent(negative['lower'])} of seeds."
    )
    return words + "\n\n" + _table(["guidance", "accepted by the checker", "not burnt out"], rows)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
