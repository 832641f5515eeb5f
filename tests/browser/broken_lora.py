"""A LoRA whose file is missing until it is repaired, and a job that failed for it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save

from serve_app.domain.accounts import Account
from serve_app.domain.jobs import JobState, random_name
from tests.composition import Resources
from tests.made_jobs import accept, job_of
from tests.support import POCKET, adapter_of, existing, wait_until


@dataclass(frozen=True, slots=True)
class BrokenLora:
    id: str
    path: Path
    weights: bytes

    def repair(self) -> None:
        self.path.write_bytes(self.weights)


async def break_lora(resources: Resources, folder: Path, *, name: str = "Lost ink") -> BrokenLora:
    """Register a LoRA whose file is missing for one account."""
    weights = save(load_file(POCKET / "loras" / "outline.safetensors"), {"of": name})
    lora = BrokenLora(f"model_{random_name()}", folder / f"{name}.safetensors", weights)
    account = await resources.accounts.get("acme") or await resources.accounts.create("acme", plan_a="professional")
    facts = {"id": lora.id, "name": name, "file": str(lora.path), "sha256": hashlib.sha256(weights).hexdigest()}
    await resources.adapter_registry.register(adapter_of(account.id, size_bytes=len(weights), **facts))
    return lora


async def fail_job(resources: Resources, lora: BrokenLora) -> str:
    """Ask for an image with the LoRA, and wait until the job has failed."""
    account = existing(await resources.accounts.get("acme"))
    job_id = await _accept(resources, account, lora.id, seeds=(1,), steps=1, width=256, height=256)
    await wait_until(lambda: has_state(resources, job_id, JobState.FAILED))
    return job_id


async def ask_for_images(resources: Resources, account: Account, lora_name: str) -> None:
    """Ask for four images of a LoRA of the catalog, which take a while."""
    await _accept(resources, account, await _id_of(resources, lora_name), seeds=(1, 2, 3, 4), steps=50)


async def draw_small(resources: Resources, account: Account, prompt: str, lora_name: str) -> str:
    """Have one step of a small image drawn, and wait for it."""
    lora_id = await _id_of(resources, lora_name)
    job_id = await _accept(resources, account, lora_id, prompt=prompt, seeds=(1,), steps=1, width=256, height=256)
    await wait_until(lambda: has_state(resources, job_id, JobState.COMPLETED))
    return job_id


async def _id_of(resources: Resources, lora_name: str) -> str:
    return next(lora.id for lora in await resources.catalog.all() if lora.name.casefold() == lora_name)


async def _accept(resources: Resources, account: Account, lora_id: str, **fields: Any) -> str:
    usual = {"prompt": "a red flower", "lora_id": lora_id, "plan": account.plan_a}
    return await accept(resources, account.id, **{**usual, **fields})


async def has_state(resources: Resources, job_id: str, state: JobState) -> bool:
    return (await job_of(resources, job_id)).state is state
