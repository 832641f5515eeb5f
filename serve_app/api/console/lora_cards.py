"""Cards of LoRAs: which of many a page shows, the search among them, and their pictures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fastapi import Request

from serve_app.api.console.lora_text import samples_of
from serve_app.api.dependencies import resources_of
from serve_app.api.site.addresses import root_of, site_of
from serve_app.api.site.samples import sample_of
from serve_app.domain.catalog import Adapter
from serve_app.domain.jobs import Job
from serve_app.domain.requests import GenerationRequest
from serve_app.service.lora_samples import find_pictures

MOST = 60
"""Cards on one page."""
RECENT = 60
"""Newest jobs of the account among which it is looked for LoRAs that were used, and for their pictures."""
LONGEST_SEARCH = 100


class LoraCards(NamedTuple):
    """The LoRAs shown, the number usable and the number that the search found, and pictures by LoRA."""

    shown: Sequence[Adapter]
    total: int
    found: int
    find: str
    pictures: Mapping[str, str]

    most: int = MOST

    @property
    def is_searchable(self) -> bool:
        """Whether there are more LoRAs than a page shows."""
        return self.total > MOST


async def choose_cards(
    request: Request, account_id: str, adapters: Sequence[Adapter], *, chosen: Sequence[str], find: str
) -> LoraCards:
    """Choose the LoRAs that a form offers: the chosen, the last used, the newest that the search finds."""
    find = find.strip()[:LONGEST_SEARCH]
    jobs = (await resources_of(request).job_history.page(account_id, limit=RECENT)).jobs
    fitting = [each for each in adapters if matches(each, find)] if find else adapters
    shown = list(adapters) if len(adapters) <= MOST else _few(adapters, chosen, fitting, used=_used(jobs))
    pictures = {**own_pictures(request, jobs), **await sample_pictures(request, shown)}
    return LoraCards(shown, len(adapters), len(fitting), find, pictures)


def own_pictures(request: Request, jobs: Iterable[Job]) -> Mapping[str, str]:
    """Return the addresses of the newest pictures among these jobs, by LoRA."""
    root = root_of(request)
    return {
        lora_id: f"{root}/history/{job.id}/{job.images[0].image_id}/thumbnail"
        for lora_id, job in samples_of(jobs).items()
    }


async def sample_pictures(request: Request, adapters: Iterable[Adapter]) -> Mapping[str, str]:
    """Return the addresses of samples, bundled or drawn by the service, by LoRA."""
    adapters, site, root = list(adapters), site_of(request), root_of(request)
    bundled = {each.id: sample_of(each.name, each.base_model) for each in adapters if not each.owner}
    drawn = await find_pictures(resources_of(request), adapters)
    return {
        **{lora_id: f"{site}/static/samples/{name}.webp" for lora_id, name in bundled.items() if name},
        **{lora_id: f"{root}/loras/{lora_id}/sample" for lora_id in drawn},
    }


def matches(adapter: Adapter, find: str) -> bool:
    """Whether the LoRA's name, description, trigger words or id hold every word of the search."""
    text = " ".join((adapter.name, adapter.description, *adapter.trigger_words, adapter.id)).casefold()
    return all(word in text for word in find.casefold().split())


def _few(
    adapters: Iterable[Adapter], chosen: Sequence[str], fitting: Sequence[Adapter], *, used: Iterable[str]
) -> list[Adapter]:
    """Return the chosen LoRAs, and of those found the last used, then the newest."""
    by_id, newest = {each.id: each for each in adapters}, [each.id for each in reversed(fitting)]
    ordered = dict.fromkeys((*chosen, *(each for each in used if each in set(newest)), *newest))
    return [by_id[each] for each in ordered if each in by_id][:MOST]


def _used(jobs: Iterable[Job]) -> list[str]:
    """The LoRAs of these jobs, the last used first."""
    return [job.request.lora_id for job in jobs if isinstance(job.request, GenerationRequest)]
