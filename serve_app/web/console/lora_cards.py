"""LoRAs on cards and as text: which of many a page shows, how they are searched, and what is known of each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fastapi import Request

from serve_app.api.dependencies import jobs_of, loras_of
from serve_app.domain.catalog import Adapter, bases_of_loras
from serve_app.domain.errors import (
    AtelierError,
    IdempotencyConflict,
    InvalidParameter,
    LoraQuotaExceeded,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from serve_app.domain.jobs import Job
from serve_app.domain.requests import USUAL_WEIGHT, GenerationRequest
from serve_app.jobs.samples import find_pictures
from serve_app.web.site import size_text
from serve_app.web.site.forms import root_of, site_of
from serve_app.web.site.job_text import Part
from serve_app.web.site.pages import sample_of

_STATUSES = {LoraQuotaExceeded: 409, IdempotencyConflict: 409, PayloadTooLarge: 413, RequestTimeout: 408}
FORM_ERRORS = (InvalidParameter, UnsupportedMediaType, *_STATUSES)
_FIELDS = {
    "file": "The file was refused",
    "adapter_config": "adapter_config.json was refused",
    "base_model": "Base model",
    "name": "Name",
    "description": "Description",
    "trigger_words": "Trigger words",
    "account": "Account",
}
_FOUND = {
    "Algorithm": "algorithm",
    "Rank": "rank",
    "Layers": "layers",
    "Changes": "targets",
    "Parts of the model": "components",
    "Made with": "writer",
}


class FormError(NamedTuple):
    """The sentence that says why a form was refused, and the answer's status."""

    status: int
    text: str


def form_error(error: AtelierError) -> FormError:
    """Turn an error into a sentence for people, with the field that its message begins with in words."""
    status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
    field, colon, rest = error.message.partition(": ")
    text = f"{_FIELDS[field]}: {rest}" if colon and field in _FIELDS else error.message
    return FormError(404 if isinstance(error, NotFound) else status, text if text.endswith(".") else f"{text}.")


def found_parts(adapter: Adapter, drawn_on: Sequence[str]) -> list[Part]:
    """List what is known of a LoRA; the files of those in the operator's catalog were not inspected."""
    parts = [Part("Id", adapter.id, is_id=True), Part("Base model", adapter.base_model)]
    if others := [each for each in drawn_on if each != adapter.base_model]:
        parts.append(Part("Also drawn on", ", ".join(others)))
    if adapter.trigger_words:
        parts.append(Part("Trigger words", ", ".join(adapter.trigger_words)))
    for label, name in _FOUND.items():
        if value := adapter.found.get(name):
            parts.append(Part(label, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    if adapter.size_bytes:
        parts.append(Part("Size", size_text(adapter.size_bytes)))
    return [*parts, Part("Added", f"{adapter.created_at:%-d %b %Y}"), Part("SHA-256", adapter.sha256, is_id=True)]


def training_parts(adapter: Adapter) -> list[Part]:
    """List the metadata that the trainer wrote into the file."""
    metadata: Mapping[str, str] = adapter.found.get("metadata", {})
    return [Part(name, text) for name, text in sorted(metadata.items())]


def suggested_words(adapter: Adapter) -> list[str]:
    """Return the trigger words that the file names and that the LoRA does not have yet."""
    return [word for word in adapter.found.get("suggested_trigger_words", ()) if word not in adapter.trigger_words]


MOST = 60
"""One page shows at most this many cards."""
RECENT = 60
"""LoRAs that were used last, and their pictures, are looked for among this many of the account's newest jobs."""
LONGEST_SEARCH = 100


class LoraCards(NamedTuple):
    """The LoRAs that are shown, how many are usable, how many the search found, and a picture of each.

    `drawn_on` says by base model which ones its LoRAs can be drawn on.
    """

    shown: Sequence[Adapter]
    total: int
    found: int
    find: str
    pictures: Mapping[str, str]
    drawn_on: Mapping[str, Sequence[str]]

    most: int = MOST
    usual_weight: str = str(USUAL_WEIGHT)

    @property
    def is_searchable(self) -> bool:
        """There are more LoRAs than a page shows."""
        return self.total > MOST


async def choose_cards(
    request: Request, account_id: str, adapters: Sequence[Adapter], *, chosen: Sequence[str], find: str
) -> LoraCards:
    """Choose the LoRAs that a form offers: the chosen, the last used, the account's own, others that are found."""
    find = find.strip()[:LONGEST_SEARCH]
    jobs = (await jobs_of(request).history.page(account_id, limit=RECENT)).jobs
    used = [job.request.lora_id for job in jobs if isinstance(job.request, GenerationRequest)]
    is_long = len(adapters) > MOST
    fitting = [each for each in adapters if each.holds(find)] if find and is_long else adapters
    by_id, newest = {each.id: each for each in adapters}, [each.id for each in reversed(fitting)]
    own = [each for each in newest if by_id[each].owner == account_id]
    found = set(newest)
    others = newest if is_long else reversed(newest)
    ordered = dict.fromkeys((*chosen, *(each for each in used if each in found), *own, *others))
    shown = [by_id[each] for each in ordered if each in by_id][:MOST]
    pictures = {**own_pictures(request, jobs), **await sample_pictures(request, shown)}
    return LoraCards(shown, len(adapters), len(fitting), find, pictures, await drawn_on(request))


async def drawn_on(request: Request) -> Mapping[str, Sequence[str]]:
    """Return for each base model those that its LoRAs can be drawn on."""
    return bases_of_loras(await loras_of(request).applied_catalog.applied_base_models())


def own_pictures(request: Request, jobs: Iterable[Job]) -> Mapping[str, str]:
    """Return the addresses of the newest pictures among these jobs, by LoRA."""
    found: dict[str, str] = {}
    for job in jobs:
        if job.images and isinstance(job.request, GenerationRequest):
            picture = f"{root_of(request)}/history/{job.id}/{job.images[0].image_id}/thumbnail"
            found.setdefault(job.request.lora_id, picture)
    return found


async def sample_pictures(request: Request, adapters: Iterable[Adapter]) -> Mapping[str, str]:
    """Return the addresses of samples, bundled or drawn by the service, by LoRA."""
    adapters, site, root = list(adapters), site_of(request), root_of(request)
    bundled = {each.id: sample_of(each.name, each.base_model) for each in adapters if not each.owner}
    drawn = await find_pictures(loras_of(request).samples, jobs_of(request).reader, adapters)
    return {
        **{lora_id: f"{site}/static/samples/{name}.webp" for lora_id, name in bundled.items() if name},
        **{lora_id: f"{root}/loras/{lora_id}/sample" for lora_id in drawn},
    }
