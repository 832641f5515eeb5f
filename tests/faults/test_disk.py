"""What Redis wrote, and what is on the disk: a torn or damaged file, a full disk, a power cut."""

import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from serve_app.domain.errors import StoreUnavailable
from serve_app.domain.jobs import JobState
from serve_app.store.embedded_redis import ensure_redis
from tests.faults.environment import Environment, open_environment
from tests.store.redis_servers import append_only_file, damaged
from tests.support import mounted_disk, wait_until

pytestmark = pytest.mark.timeout(300)

CANCELED = [JobState.CANCELED]


async def _stopped(env: Environment) -> Path:
    env.kill_redis()
    file = append_only_file(env.settings.data_dir)
    await wait_until(lambda: file.exists())
    return file


async def test_a_torn_last_write_costs_nothing_that_was_acknowledged(env: Environment) -> None:
    for seed in range(5):
        await env.accept(seed=seed, may_end_as=CANCELED)
    file = await _stopped(env)
    with file.open("ab") as torn:
        torn.write(b"*3\r\n$3\r\nSET\r\n$5\r\nhal")
    await env.start_redis()
    await env.cancels_well()


async def test_the_auditor_finds_an_acknowledged_write_that_was_cut_off(env: Environment) -> None:
    for seed in range(3):
        await env.accept(seed=seed, may_end_as=CANCELED)
    file = await _stopped(env)
    content = file.read_bytes()
    file.write_bytes(content[: content.rindex(b"MULTI")])
    await env.start_redis()
    await env.cancel_all()
    assert any("there is no record of it" in problem for problem in await env.audit())


async def test_a_damaged_middle_is_named_and_not_skipped(env: Environment) -> None:
    for seed in range(3):
        await env.accept(seed=seed, may_end_as=CANCELED)
    refused = pytest.raises(StoreUnavailable, match=r"did not come up(.|\n)*Bad file format")
    with damaged(await _stopped(env)), refused:
        await env.start_redis()
    await env.start_redis()
    await env.cancels_well()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk", megabytes=5) as disk:
        yield disk


@pytest.mark.soak
async def test_a_full_disk_stops_redis_and_loses_nothing(small_disk: Path) -> None:
    async with open_environment(small_disk) as env:
        ballast = small_disk / "ballast"
        ballast.write_bytes(b"0" * 2_000_000)  # without it all jobs can be canceled
        refused = 0
        for number in range(4000):
            try:
                prompt = random.Random(number).randbytes(2000).hex()  # which cannot be deflated to less than half
                await env.ask(prompt=prompt, seed=number, key=f"k{number}", may_end_as=CANCELED)
            except StoreUnavailable:
                refused += 1
                break
        assert refused, "the disk never filled"
        ballast.unlink()
        await env.start_redis()
        await env.accept(seed=1, key="afterwards", may_end_as=CANCELED)
        await env.cancels_well()


@pytest.fixture
def preloaded(tmp_path: Path) -> Path:
    """`synced.c`, which notes what a power cut would leave of Redis's file."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("noting what is synced needs a C compiler")
    library = tmp_path / "synced.so"
    source = Path(__file__).with_name("synced.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


async def _through_a_power_cut(env: Environment, *, appendfsync: str) -> list[str]:
    """Accept jobs, lose all that had not been synced, and return the auditor's findings."""
    await env.accept(may_end_as=CANCELED)
    with env.redis() as client:
        client.config_set("appendfsync", appendfsync)
    for seed in range(10):
        await env.accept(seed=seed, may_end_as=CANCELED)
    file = await _stopped(env)
    with file.open("r+b") as cut:
        cut.truncate(int(file.with_name(f"{file.name}.synced").read_text()))
    await env.start_redis()
    await env.cancel_all()
    return await env.audit()


@pytest.fixture
async def noted(tmp_path: Path, preloaded: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Environment]:
    """A env whose Redis notes what it has synced."""
    with monkeypatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(preloaded))
        ensure_redis(tmp_path / "var")
    async with open_environment(tmp_path) as env:
        yield env


async def test_a_power_cut_costs_nothing_that_was_acknowledged(noted: Environment) -> None:
    assert not await _through_a_power_cut(noted, appendfsync="always")


async def test_without_a_sync_for_every_write_the_auditor_finds_what_the_power_cut_cost(noted: Environment) -> None:
    problems = await _through_a_power_cut(noted, appendfsync="no")
    assert any("there is no record of it" in problem for problem in problems)
