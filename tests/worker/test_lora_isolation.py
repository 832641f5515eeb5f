"""Two accounts' LoRAs of one name never mix: every image is that of its own adapter, to the byte."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from serve_app.domain.accounts import Caller
from serve_app.domain.jobs import JobState
from serve_app.domain.requests import GenerationRequest, LoraUse
from serve_app.engine import Engine, EngineOptions
from serve_app.worker.generation import GenerationExecutor
from serve_app.worker.image_files import encode_png
from tests.composition import Resources
from tests.made_jobs import caller_of, draft_of, job_of
from tests.support import POCKET, lora_record, wait_until
from tests.worker.scripted_executor import working

FILES = {name: POCKET / "loras" / f"{copied}.safetensors" for name, copied in (("acme", "outline"), ("zeta", "sepia"))}
"""Account → the bundled LoRA of which it owns a copy; both copies are called the same."""


class Drawn(NamedTuple):
    """What an account asks for, and the digest of the PNG that a run alone makes of it."""

    account: str
    request: GenerationRequest
    sha256: str


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        options = EngineOptions(max_rows=8, adapter_slots=2)
        yield [stack.enter_context(Engine.load({"pocket": POCKET}, options)) for _ in range(request.param)]


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1], indirect=True)
async def test_twelve_interleaved_jobs_of_two_loras_of_one_name_are_each_their_owners(
    resources: Resources, engines: Sequence[Engine]
) -> None:
    await _draw_interleaved(resources, engines, jobs=12, size=256, steps=2, seeds=(1,))


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engines", [2], indirect=True)
async def test_two_hundred_interleaved_jobs_of_two_loras_of_one_name_are_each_their_owners(
    resources: Resources, engines: Sequence[Engine]
) -> None:
    await _draw_interleaved(resources, engines, jobs=200, size=256, steps=8, seeds=(1, 2, 3, 4, 5))


async def _draw_interleaved(
    resources: Resources, engines: Sequence[Engine], *, jobs: int, size: int, steps: int, seeds: Sequence[int]
) -> None:
    callers = {name: await caller_of(resources, name) for name in FILES}
    wanted: list[Drawn] = []
    for weight, seed, (name, caller) in product((0.5, 1.0), seeds, callers.items()):
        request = GenerationRequest(
            prompt="a red circle", loras=(LoraUse(await _own_lora(resources, name, caller), weight),),
            width=size, height=size, steps=steps, seeds=(seed,),
        )  # fmt: skip
        wanted.append(Drawn(name, request, _alone(engines[0], request, name)))
    assert len({drawn.sha256 for drawn in wanted}) == len(wanted), "every picture is another"
    asked: list[tuple[str, Drawn]] = []
    for number in range(jobs):
        drawn = wanted[number % len(wanted)]
        asked.append(
            ((await resources.submission.submit(callers[drawn.account], draft_of(drawn.request))).job.id, drawn)
        )
    await _work(resources, engines, [job_id for job_id, _ in asked])
    wrong: Counter[str] = Counter()
    for job_id, drawn in asked:
        job = await job_of(resources, job_id)
        wrong[drawn.account] += [image.sha256 for image in job.images] != [drawn.sha256]
    assert wrong == {"acme": 0, "zeta": 0}


async def _work(resources: Resources, engines: Sequence[Engine], job_ids: Sequence[str]) -> None:
    """Run a worker for each engine until every job has ended."""
    waiting = list(job_ids)

    async def is_over() -> bool:
        while waiting:
            if (await job_of(resources, waiting[-1])).state is not JobState.COMPLETED:
                return False
            waiting.pop()
        return True

    async with AsyncExitStack() as stack:
        for engine in engines:
            executor = GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)
            await stack.enter_async_context(working(resources, executor))
        await wait_until(is_over, timeout=240)


async def _own_lora(resources: Resources, name: str, caller: Caller) -> str:
    """Return the id of the account's LoRA `Mine`, which nobody else may use."""
    adapter = lora_record(FILES[name], id="model_" + name.ljust(26, "2"), owner=caller.account_id)
    await resources.adapter_registry.register(adapter)
    return adapter.id


def _alone(engine: Engine, request: GenerationRequest, name: str) -> str:
    """Return digest of the PNG of a run of its own, the adapter's file given by hand."""
    (image,) = engine.generate(
        request.prompt, adapter=FILES[name], weight=request.lora_weight, seeds=request.seeds, steps=request.steps,
        guidance=request.guidance_scale, width=request.width, height=request.height,
    )  # fmt: skip
    return hashlib.sha256(encode_png(np.asarray(image))).hexdigest()
