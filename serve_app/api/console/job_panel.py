"""The panel of one job: its state as text, and a tile for each image, with previews while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.api.responses import failure_of, time_left
from serve_app.domain.durations import wait_text
from serve_app.domain.jobs import Job, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.service.resources import Resources
from serve_app.stores.previews import Preview

_STATES: Mapping[JobState, str] = {
    JobState.QUEUED: "Waiting",
    JobState.RUNNING: "Drawing",
    JobState.COMPLETED: "Done",
    JobState.FAILED: "Failed",
    JobState.CANCELED: "Canceled",
    JobState.EXPIRED: "Expired",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One image: `path` below the job's address, empty before there is anything to see."""

    path: str = ""
    image_id: str = ""
    seed: int | None = None
    is_preview: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    job: Job
    state: str
    detail: str
    tiles: list[Tile] = field(default_factory=list[Tile])

    @property
    def is_open(self) -> bool:
        """Whether the job has not ended yet."""
        return not self.job.state.is_terminal


async def panel_of(resources: Resources, job: Job) -> Panel:
    """Build the panel of a job, and ask its worker for previews until it has ended."""
    previews: Mapping[int, Preview] = {}
    if not job.state.is_terminal and resources.settings.previews:
        await resources.previews.watch(job.id)
        previews = await resources.previews.get(job.id)
    return Panel(job=job, state=_state(job), detail=_detail(job), tiles=_tiles(job, previews))


def _state(job: Job) -> str:
    return "Enlarging" if job.state is JobState.RUNNING and job.id.startswith("up_") else _STATES[job.state]


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
        return place + ("starting a worker, " if job.waits_for_worker else "") + about
    request = job.request
    if isinstance(request, GenerationRequest):
        return f"step {request.steps * job.progress // 100} of {request.steps}, {about}"
    return about


def _tiles(job: Job, previews: Mapping[int, Preview]) -> list[Tile]:
    request = job.request
    seeds = request.seeds if isinstance(request, GenerationRequest) else None
    if job.state is JobState.COMPLETED:
        return [
            Tile(path=f"images/{it.image_id}", image_id=it.image_id, seed=seeds[it.index] if seeds else None)
            for it in job.images
        ]
    if job.state.is_terminal or request is None:
        return []
    return [_unfinished(index, previews.get(index), seeds) for index in range(request.num_images)]


def _unfinished(index: int, preview: Preview | None, seeds: tuple[int, ...] | None) -> Tile:
    seed = seeds[index] if seeds else None
    if preview is None:
        return Tile(seed=seed)
    return Tile(path=f"previews/{index}?step={preview.step}", seed=seed, is_preview=True)
