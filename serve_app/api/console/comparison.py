"""Comparisons: the requests of LoRAs across weights or seeds, and the grid of their pictures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from serve_app.api.console.job_panel import Panel
from serve_app.api.console.playground_form import draw_seed, read_playground_form
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.requests import GenerationRequest, image_seeds

MOST_LORAS, MOST_VALUES, MOST_PICTURES = 8, 8, 16
"""Of one comparison: LoRAs, weights or seeds, and pictures in all, as many as the engine draws in one batch."""
AXES: Mapping[str, str] = {"": "LoRAs only", "weights": "LoRAs and weights", "seeds": "LoRAs and seeds"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


class Row(NamedTuple):
    """The pictures of one LoRA, by column; None where there is none."""

    name: str
    panels: Sequence[Panel | None]


class Grid(NamedTuple):
    """The headings of the columns, and a row for each LoRA."""

    columns: Sequence[str]
    rows: Sequence[Row]


def read_comparison(fields: Mapping[str, str], chosen: Sequence[str]) -> list[GenerationRequest]:
    """Read the requests of a form, row by row. Raises `InvalidParameter` with a sentence for people."""
    axis = fields.get("across", "")
    least = 1 if axis in ("weights", "seeds") else 2
    if not least <= len(chosen) <= MOST_LORAS:
        raise InvalidParameter(f"choose {'one' if least == 1 else 'two'} to {MOST_LORAS} LoRAs to compare")
    seed = fields.get("seed", "").strip() or str(draw_seed())
    weights = _weights(fields.get("weights", "")) if axis == "weights" else [fields.get("lora_weight", "0.75")]
    count = _count(fields.get("seeds", "")) if axis == "seeds" else 1
    if not 2 <= len(chosen) * len(weights) * count <= MOST_PICTURES:
        raise InvalidParameter(
            f"a comparison has two to {MOST_PICTURES} pictures, and this one {len(chosen) * len(weights) * count}"
        )
    asked = [
        read_playground_form(
            {**fields, "num_images": "1", "seed": seed, "lora_id": lora_id, "lora_weight": weight}
        ).to_domain()
        for lora_id in chosen
        for weight in weights
    ]
    return [replace(each, seeds=(one,)) for each in asked for one in image_seeds(each.seeds[0], count)]


def arrange(panels: Sequence[Panel], names: Mapping[str, str]) -> Grid | None:
    """Arrange jobs in rows of LoRAs and columns of weights or seeds; None where they make no such grid."""
    requests = [panel.job.request for panel in panels]
    asked = [each for each in requests if isinstance(each, GenerationRequest)]
    has_weights, has_seeds = len({each.lora_weight for each in asked}) > 1, len({each.seeds[0] for each in asked}) > 1
    if len(asked) < len(panels) or has_weights == has_seeds:
        return None
    columns = list(dict.fromkeys(_column(each, of_weight=has_weights) for each in asked))
    found = dict(zip(((each.lora_id, _column(each, of_weight=has_weights)) for each in asked), panels, strict=True))
    if len(found) < len(panels):
        return None
    loras = dict.fromkeys(each.lora_id for each in asked)
    return Grid(columns, [Row(names.get(lora, lora), [found.get((lora, it)) for it in columns]) for lora in loras])


def _column(request: GenerationRequest, *, of_weight: bool) -> str:
    """Return the heading of a request's column."""
    return f"Weight {request.lora_weight:g}" if of_weight else f"Seed {request.seeds[0]}"


def _weights(text: str) -> list[str]:
    found = [part for part in re.split(r"[\s,;]+", text.strip()) if part]
    if not 1 <= len(found) <= MOST_VALUES or not all(map(_NUMBER.fullmatch, found)):
        raise InvalidParameter(f"weights: must be one to {MOST_VALUES} numbers with commas between, as 0.25, 0.5, 1")
    return list({float(each): each for each in found}.values())


def _count(text: str) -> int:
    if not re.fullmatch(rf"[1-{MOST_VALUES}]", text.strip()):
        raise InvalidParameter(f"seeds: must be a whole number between 1 and {MOST_VALUES}")
    return int(text)
