"""How jobs look while they run: a panel for one job, and a grid of panels that compares LoRAs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple

from fastapi import Request

from serve_app.api.dependencies import jobs_of, settings_of
from serve_app.api.responses import failure_of, time_left
from serve_app.domain.durations import rounded_duration, wait_text
from serve_app.domain.errors import InvalidParameter
from serve_app.domain.jobs import WORKER_LIFE, Job, JobState
from serve_app.domain.requests import USUAL_WEIGHT, GenerationDraft, GenerationRequest, image_seeds
from serve_app.jobs.previews import Preview
from serve_app.web.console.playground_form import draw_seed, read_draft
from serve_app.web.site.job_text import STATES


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One image, by its id, or its preview, by its `path` below the job's address; neither before there is one."""

    path: str = ""
    image_id: str = ""
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    job: Job
    state: str
    detail: str
    tiles: list[Tile] = field(default_factory=list[Tile])

    @property
    def is_open(self) -> bool:
        """The job has not ended yet."""
        return not self.job.state.is_terminal

    @property
    def said(self) -> str:
        """Return what the page's title and screen readers say: the state, and progress in quarters."""
        quarters = self.job.progress // 25
        return f"{self.state}, {25 * quarters} %" if self.is_open and quarters else self.state


async def panel_of(request: Request, job: Job) -> Panel:
    """Build the panel of a job, and ask its worker for previews until it has ended."""
    previews: Mapping[int, Preview] = {}
    if not job.state.is_terminal and settings_of(request).previews:
        store = jobs_of(request).previews
        await store.watch(job.id)
        previews = await store.get(job.id)
    return Panel(job=job, state=_state(job), detail=_detail(job), tiles=_tiles(job, previews))


def _state(job: Job) -> str:
    if job.state is JobState.RUNNING:
        return "Enlarging" if job.id.startswith("up_") else "Drawing"
    return STATES[job.state]


def _detail(job: Job) -> str:
    if job.state is JobState.COMPLETED:
        took = (job.finished_at - job.started_at).total_seconds() if job.finished_at and job.started_at else None
        return "" if took is None else f"in {took:.1f} seconds"
    if job.state.is_terminal:
        return failure_of(job).message
    about = f"about {wait_text(time_left(job))} to go"
    if job.state is JobState.QUEUED:
        ahead = job.jobs_ahead
        place = "" if ahead is None else "next in your queue, " if not ahead else f"{ahead} of your jobs before it, "
        waited = job.read_at - job.created_at if job.read_at else timedelta()
        if job.waits_for_worker and waited > WORKER_LIFE:
            return f"{place}no generator has answered for {rounded_duration(waited)}"
        return place + ("starting a worker, " if job.waits_for_worker else "") + about
    request = job.request
    if isinstance(request, GenerationRequest):
        return f"step {request.steps * job.progress // 100} of {request.steps}, {about}"
    return about


def _tiles(job: Job, previews: Mapping[int, Preview]) -> list[Tile]:
    request = job.request
    seeds = request.seeds if isinstance(request, GenerationRequest) else None
    if job.state is JobState.COMPLETED:
        return [Tile(image_id=it.image_id, seed=seeds[it.index] if seeds else None) for it in job.images]
    if job.state.is_terminal or request is None:
        return []
    steps = {index: preview.step for index, preview in previews.items()}
    paths = [f"previews/{it}?step={steps[it]}" if it in steps else "" for it in range(request.num_images)]
    return [Tile(path=path, seed=seeds[index] if seeds else None) for index, path in enumerate(paths)]


MOST_LORAS, MOST_VALUES, MOST_PICTURES = 8, 8, 16
"""The most LoRAs, weights or seeds, and pictures of one comparison, which the engine draws in one batch."""
AXES: Mapping[str, str] = {"": "LoRAs only", "weights": "LoRAs and weights", "seeds": "LoRAs and seeds"}
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")


class Row(NamedTuple):
    """A row has the pictures of one LoRA, by column; None where there is none."""

    name: str
    panels: Sequence[Panel | None]


class Grid(NamedTuple):
    """The headings of the columns, and a row for each LoRA."""

    columns: Sequence[str]
    rows: Sequence[Row]


def read_comparison(fields: Mapping[str, str], chosen: Sequence[str]) -> list[GenerationDraft]:
    """Read the drafts of a form, row by row. Raises `InvalidParameter` with a sentence for people."""
    axis = fields.get("across", "")
    least = 1 if axis in ("weights", "seeds") else 2
    if not least <= len(chosen) <= MOST_LORAS:
        raise InvalidParameter(f"choose {least} to {MOST_LORAS} LoRAs to compare")
    seed = fields.get("seed", "").strip() or str(draw_seed())
    weights = (
        _weights(fields.get("weights", "")) if axis == "weights" else [fields.get("lora_weight", str(USUAL_WEIGHT))]
    )
    count = _count(fields.get("seeds", "")) if axis == "seeds" else 1
    if not 2 <= len(chosen) * len(weights) * count <= MOST_PICTURES:
        raise InvalidParameter(
            f"a comparison has 2 to {MOST_PICTURES} pictures, and this one {len(chosen) * len(weights) * count}"
        )
    shared = {**fields, "num_images": "1", "seed": seed}
    asked = [read_draft(shared, {lora_id: weight}) for lora_id in chosen for weight in weights]
    return [replace(each, seed=one) for each in asked for one in image_seeds(each.seed or 0, count)]


def arrange(panels: Sequence[Panel], names: Mapping[str, str]) -> Grid | None:
    """Arrange jobs in rows of LoRAs and columns of weights or seeds; None where they make no such grid."""
    requests = [panel.job.request for panel in panels]
    asked = [each for each in requests if isinstance(each, GenerationRequest)]
    has_weights, has_seeds = len({each.lora_weight for each in asked}) > 1, len({each.seeds[0] for each in asked}) > 1
    if len(asked) < len(panels) or has_weights == has_seeds or any(len(each.loras) != 1 for each in asked):
        return None
    headings = [f"Weight {each.lora_weight:g}" if has_weights else f"Seed {each.seeds[0]}" for each in asked]
    columns = list(dict.fromkeys(headings))
    places = [(each.lora_id, heading) for each, heading in zip(asked, headings, strict=True)]
    found = dict(zip(places, panels, strict=True))
    if len(found) < len(panels):
        return None
    loras = dict.fromkeys(each.lora_id for each in asked)
    return Grid(columns, [Row(names.get(lora, lora), [found.get((lora, it)) for it in columns]) for lora in loras])


def _weights(text: str) -> list[str]:
    found = [part for part in re.split(r"[\s,;]+", text.strip()) if part]
    if not 1 <= len(found) <= MOST_VALUES or not all(map(_NUMBER.fullmatch, found)):
        raise InvalidParameter(f"weights: must be one to {MOST_VALUES} numbers with commas between, as 0.25, 0.5, 1")
    return list({float(each): each for each in found}.values())


def _count(text: str) -> int:
    if not re.fullmatch(rf"[1-{MOST_VALUES}]", text.strip()):
        raise InvalidParameter(f"seeds: must be a whole number between 1 and {MOST_VALUES}")
    return int(text)
