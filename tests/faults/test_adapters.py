"""Jobs of missing, damaged or hostile adapters fail by name, and no other image changes."""

import hashlib
import json
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import yaml

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Job, JobState
from tests.faults.environment import Environment, open_environment
from tests.faults.worker import FORKED_WORKERS, WorkerBehavior
from tests.support import POCKET, adapter_id, wait_until

pytestmark = [pytest.mark.timeout(300), FORKED_WORKERS]

FAILED = [JobState.FAILED]
GOOD = POCKET / "loras" / "outline.safetensors"


def _filled_with(path: Path, bits: int) -> Path:
    """The good adapter's names and shapes, every value the same 32 bits (as F32)."""
    content = GOOD.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        size = 4
        for side in tensor["shape"]:
            size *= side
        tensor["dtype"], tensor["data_offsets"] = "F32", [end, end + size]
        end += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<I", bits) * (end // 4))
    return path


SMALL, LARGE, NAN = 0x38D1B717, 0x7E967699, 0x7FC00000
"""Values as bits: 1e-4; 1e38, which is finite and far too much; and not a number."""
BROKEN = ("missing", "damaged", "foreign", "nan", "huge", "cut")


@pytest.fixture
async def env(tmp_path: Path) -> AsyncIterator[Environment]:
    """A env whose catalog offers good adapters and one of each broken kind."""
    folder = tmp_path / "env"
    whole = {"outline": SMALL, "missing": SMALL + 1, "damaged": SMALL + 2, "cut": SMALL + 3}
    files = {name: _filled_with(folder / f"{name}.safetensors", bits) for name, bits in whole.items()}
    files["nan"] = _filled_with(folder / "nan.safetensors", NAN)
    files["huge"] = _filled_with(folder / "huge.safetensors", LARGE)
    files["foreign"] = folder / "foreign.safetensors"
    text = json.dumps({"other.model.lora_A.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
    files["foreign"].write_bytes(struct.pack("<Q", len(text)) + text.encode() + b"\0" * 16)
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
