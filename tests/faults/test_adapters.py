"""Jobs of missing, damaged or hostile adapters fail by name, and no other image changes."""

import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import yaml

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Job, JobState
from tests.faults.environment import Environment, open_environment
from tests.faults.lora_corpus import changed
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior
from tests.support import POCKET, adapter_id, wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

FAILED = [JobState.FAILED]
NUMBERS = {"outline": 1e-4, "missing": 2e-4, "damaged": 3e-4, "cut": 4e-4, "nan": math.nan, "huge": 1e38}
"""A LoRA of this number everywhere by each name: 1e38 is finite and far too much."""
BROKEN = ("missing", "damaged", "foreign", "nan", "huge", "cut")


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    """Its catalog offers good adapters and one of each broken kind."""
    folder = tmp_path / "env"
    folder.mkdir()
    files = {name: folder / f"{name}.safetensors" for name in (*NUMBERS, "foreign")}
    for name, number in NUMBERS.items():
        changed(number=number)(files[name])
    changed(name="other.model.")(files["foreign"])
    rows = [
        {
            "id": adapter_id(name),
            "name": name,
            "created_at": "2026-11-21T12:00:00Z",
            "file": str(file),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "base_model": "pocket",
        }
        for name, file in files.items()
    ]
    catalog = folder / "catalog.yaml"
    catalog.write_text(yaml.safe_dump({"base_models": [{"id": "pocket", "folder": str(POCKET)}], "adapters": rows}))
    async with open_environment(tmp_path, catalog=catalog) as env:
        files["missing"].unlink()
        content = bytearray(files["damaged"].read_bytes())
        content[-1] ^= 1
        files["damaged"].write_bytes(content)
        files["cut"].write_bytes(files["cut"].read_bytes()[:-100])
        yield env


async def _drawn(env: Environment, job_ids: Sequence[str]) -> list[Job]:
    await env.until_ended()
    return [await env.job(job_id) for job_id in job_ids]


@pytest.mark.soak
async def test_a_broken_adapter_fails_its_own_job_and_changes_no_other(env: Environment) -> None:
    before = await env.accept(seed=5, steps=4)
    env.worker(WorkerBehavior(reaps=True))
    await env.until_ended()
    broken = [await env.accept(seed=n, lora=name, may_end_as=FAILED) for n, name in enumerate(BROKEN)]
    after = await env.accept(seed=5, steps=4)
    jobs = await _drawn(env, broken)
    assert not await env.audit()
    for name, job in zip(BROKEN, jobs, strict=True):
        assert job.failure is not None
        wanted = FailureCode.GENERATION_FAILED if name == "huge" else FailureCode.LORA_UNAVAILABLE
        assert job.failure.code is wanted, f"{name}: {job.failure}"
        assert job.attempt == 1, f"{name}: trying again cannot help"
    first, last = await _drawn(env, [before, after])
    assert first.images[0].sha256 == last.images[0].sha256, "the base weights stayed clean"


@pytest.mark.soak
async def test_a_kept_file_that_rots_on_this_machine_is_noticed(env: Environment) -> None:
    """The file under `weights/` had passed every check; then the disk lost some of it."""
    first = await env.accept(seed=5)
    worker = env.worker(WorkerBehavior(reaps=True))
    await env.until_ended()
    worker.terminate()
    await wait_until(lambda: worker.exitcode == 0, timeout=60)
    (kept,) = (env.settings.data_dir / "weights").glob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:-200])
    again = await env.accept(seed=5, may_end_as=[JobState.FAILED, JobState.COMPLETED])
    env.worker(WorkerBehavior(reaps=True))
    jobs = await _drawn(env, [first, again])
    assert not await env.audit()
    if jobs[1].state is JobState.COMPLETED:
        assert jobs[0].images[0].sha256 == jobs[1].images[0].sha256
