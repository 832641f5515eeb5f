"""Writes the measured tables into the model card, each between its two marks."""

import json
from math import prod
from pathlib import Path
from typing import Any

from .plan import ROOT

CARD = ROOT / "README.md"
PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler", "loras", "upscaler")
"""The folders of the model, in the card's order."""

Figures = dict[str, Any]


def write_card(report: Figures, card: Path = CARD) -> None:
    """Replaces what stands between the marks; the rest of the card is written by hand."""
    text = card.read_text()
    for section, content in measured_sections(report).items():
        text = replace_section(text, section, content)
    card.write_text(text)


def measured_sections(report: Figures) -> dict[str, str]:
    """Markdown by section: sizes from the files beside the card, figures from the report."""
    return {"sizes": sizes_as_markdown(), "figures": figures_as_markdown(report)}


def replace_section(text: str, section: str, content: str) -> str:
    """Raises ValueError when the card lacks one of the section's marks."""
    begin, end = f"<!-- {section}: begin -->", f"<!-- {section}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def sizes_as_markdown() -> str:
    rows: list[list[Any]] = []
    for part in PARTS:
        files = sorted(path for path in (ROOT / part).iterdir() if path.is_file())
        weights = [path for path in files if path.suffix == ".safetensors"]
        tensors = [entry for path in weights for entry in _tensors(path)]
        types = sorted({entry["dtype"] for entry in tensors})
        rows.append(
            [
                f"`{part}/`",
                len(files),
                f"{sum(prod(entry['shape']) for entry in tensors):,}" if tensors else "",
                ", ".join(types),
                f"{sum(path.stat().st_size for path in files) / 1e6:.2f}",
            ]
        )
    return _table(["part", "files", "parameters", "type", "MB"], rows)


def _tensors(path: Path) -> list[Figures]:
    """The tensors that a safetensors file declares in its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [entry for name, entry in header.items() if name != "__metadata__"]


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
        parts.append(
            "**Upscalers**, PSNR (dB) on held-out scenes:\n\n" + _table(["scale", "ours", "Lanczos", "gain"], rows)
        )
    if speed := report.get("speed"):
        parts.append(
            f"**Speed**, plain diffusers, 512², 30 steps, guidance 7.5, 2 CPU threads: {speed['seconds_per_image_512_30_steps']} s an image "
            f"(median {speed['seconds_median']} s), {speed['peak_memory_above_torch_mb']} MB above torch's own memory."
        )
    return "\n\n".join(parts)


def _following(figures: Figures) -> str:
    columns = list(figures)
    measures = [name for name in figures[columns[0]] if name != "prompts"]
    rows = [[measure, *(_percent(figures[column][measure]) for column in columns)] for measure in measures]
    return (
        f"**Prompt following**, {figures[columns[0]]['prompts']} held-out prompts for each column, 30 steps:\n\n"
        + _table(["right", *columns], rows)
    )


def _loras(figures: Figures) -> str:
    rows: list[list[Any]] = []
    for name, style in figures.items():
        if isinstance(style, dict):
            change = " → ".join(str(value) for value in style["change by weight"].values())
            rows.append([name, _percent(style["recognised"]), change, _percent(style["grows"])])
    head = ["LoRA", "recognised at 1.0", "mean change at 0.1 → 0.5 → 1.0 (of 255)", "grows with weight"]
    return (
        f"**Styles** on {figures['prompts']} prompts (the base is recognised as such on {_percent(figures['base'])}):\n\n"
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
        "**Negative prompt and guidance.** With the colour that covers most of a picture in the negative prompt, its share falls from "
        f"{_percent(negative['share without'])} to {_percent(negative['share with'])}; it is lower on {_percent(negative['lower'])} of seeds."
    )
    return words + "\n\n" + _table(["guidance", "accepted by the checker", "not burnt out"], rows)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
