"""A change of the catalog by one process is served by all; the file seeds it without stopping it."""

import asyncio
import json
import os
from dataclasses import replace
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from serve_app.domain.catalog import Adapter, Terms
from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import JobKind, JobState
from serve_app.domain.requests import GenerationRequest
from serve_app.jobs.acceptance import prices
from serve_app.jobs.backlog import DEFAULT_SECONDS_PER_UNIT
from serve_app.loras import applied_catalog
from serve_app.loras.catalog import position_of
from serve_app.loras.catalog_file import CatalogError
from serve_app.settings import Settings
from serve_app.store.keys import redis_key
from tests.audit import key_problems
from tests.composition import Resources, open_resources
from tests.made_jobs import accept, new_job
from tests.support import (
    POCKET,
    POCKET_ADAPTERS,
    PRIVATE_ADAPTER,
    CatalogRows,
    adapter_id,
    existing,
    lora_record,
    put_in_group,
    rewrite_catalog,
    store_image,
    write_safetensors,
)

NEON = adapter_id("neon")
REGISTERED = lora_record(found={"rank": 16}, sampler="lcm", steps=4, guidance=1.5, guidance_start=0.0, guidance_end=0.5)


async def _usable(resources: Resources, account_id: str) -> list[str]:
    return [adapter.id for adapter in await resources.catalog.adapters(account_id)]


async def test_everyone_sees_the_public_adapters_and_the_owner_its_own(resources: Resources) -> None:
    owner = await resources.accounts.create("owner")
    acme = await resources.accounts.create("acme")
    assert await _usable(resources, acme.id) == [adapter_id(name) for name in POCKET_ADAPTERS]
    assert await _usable(resources, "acct_none") == [adapter_id(name) for name in POCKET_ADAPTERS]
    assert PRIVATE_ADAPTER in await _usable(resources, owner.id)
    assert not await resources.adapter_registry.update(PRIVATE_ADAPTER, owner.id, {"name": "Mine"}), "of the file"
    assert await resources.catalog.adapter("model_unknown") is None
    assert len(await resources.catalog.all()) == 9
    assert [base.id for base in await resources.applied_catalog.base_models()] == ["pocket"]
    assert await resources.catalog.open_adapter_id() == adapter_id(POCKET_ADAPTERS[0])


async def test_rows_of_one_time_are_listed_in_the_files_order(resources: Resources, settings: Settings) -> None:
    def at_one_time(rows: CatalogRows) -> None:
        rows.reverse()
        for row in rows:
            row["created_at"] = "2026-11-21T12:00:00Z"

    rewrite_catalog(settings.catalog, at_one_time)
    await resources.applied_catalog.apply_file()
    names = [adapter.name.lower() for adapter in await resources.catalog.all()]
    assert names == ["private", *reversed(POCKET_ADAPTERS)]


async def test_a_grant_and_a_revocation_hold_over_the_record(resources: Resources, other: Resources) -> None:
    acme = await resources.accounts.create("acme")
    assert await resources.adapter_grants.grant(PRIVATE_ADAPTER, acme.id)
    assert await resources.adapter_grants.revoke(NEON, acme.id)
    usable = await _usable(other, acme.id)
    assert PRIVATE_ADAPTER in usable
    assert NEON not in usable
    assert not await resources.adapter_grants.grant("model_unknown", acme.id)


async def test_a_list_that_a_process_keeps_follows_every_change_of_another(
    resources: Resources, other: Resources, redis_db: redis.Redis
) -> None:
    acme, zeta = await resources.accounts.create("acme"), await resources.accounts.create("zeta")
    mine = replace(REGISTERED, owner=acme.id)
    listed = await resources.catalog.adapters(acme.id)
    listed.clear()
    assert NEON in await _usable(resources, acme.id), "a caller's list is its own"
    await other.adapter_registry.register(mine)
    assert mine.id in await _usable(resources, acme.id)
    assert mine.id not in await _usable(resources, zeta.id)
    await other.adapter_registry.update(mine.id, acme.id, {"name": "Ours"})
    assert "Ours" in [adapter.name for adapter in await resources.catalog.adapters(acme.id)]
    await other.adapter_grants.grant(mine.id, zeta.id)
    assert mine.id in await _usable(resources, zeta.id)
    await other.adapter_grants.revoke(mine.id, zeta.id)
    assert mine.id not in await _usable(resources, zeta.id)
    await other.adapter_registry.remove(mine.id)
    assert mine.id not in await _usable(resources, acme.id)
    redis_db.hset(redis_key("lora", NEON), "name", "By hand")
    assert (await resources.catalog.adapters(acme.id))[2].name == "Neon", "unchanged, by the revision"


async def test_a_list_follows_more_changes_than_one_answer_has_and_those_that_no_log_tells_of(
    resources: Resources, other: Resources, redis_db: redis.Redis
) -> None:
    acme = await resources.accounts.create("acme")
    before = await _usable(resources, acme.id)
    facts: dict[str, Any] = {"name": "two\0words", "owner": "", "accounts": None}
    added = [replace(REGISTERED, id=f"model_{number:03}", **facts) for number in range(2 * 200 + 1)]
    for each in added:
        await other.adapter_registry.register(each)
    assert sorted(await _usable(resources, acme.id)) == sorted([*before, *(each.id for each in added)])
    for each in added[1:]:
        await other.adapter_registry.remove(each.id)
    assert sorted(await _usable(resources, acme.id)) == sorted([*before, "model_000"])
    by_the_version_before = [redis_key("lora", "model_000"), redis_key("loras_open")]
    redis_db.delete(by_the_version_before[0])
    redis_db.zrem(by_the_version_before[1], "model_000")
    redis_db.incr(redis_key("loras_revision"))
    assert await _usable(resources, acme.id) == before
    await other.adapter_registry.register(added[1])
    assert sorted(await _usable(resources, acme.id)) == sorted([*before, added[1].id])
    assert redis_db.zcard(redis_key("loras_changed")) == 1, "the log begins anew"

    await other.adapter_registry.register(added[2])
    cut_at = redis_db.incrby(redis_key("loras_revision"), 9_998)
    redis_db.hset(redis_key("loras_log"), "last", str(cut_at))
    redis_db.zadd(redis_key("loras_changed"), {f"gone_{ago}": cut_at - ago for ago in range(9_998)})
    for each in added[3:5]:
        await other.adapter_registry.register(each)
    assert sorted(await _usable(resources, acme.id)) == sorted([*before, *(each.id for each in added[1:5])])

    redis_db.flushdb()
    assert await _usable(resources, acme.id) == [], "Redis was set back, as by a failover"


async def test_pages_are_the_whole_list_from_the_newest_back(resources: Resources, settings: Settings) -> None:
    def at_two_times(rows: CatalogRows) -> None:
        rows.sort(key=itemgetter("id"), reverse=True)
        for place, row in enumerate(rows):
            row["created_at"] = f"2026-11-21T12:00:0{place // 5}Z"

    rewrite_catalog(settings.catalog, at_two_times)
    await resources.applied_catalog.apply_file()
    acme = await resources.accounts.create("acme")
    for number in range(5):
        mine = replace(REGISTERED, id=f"model_{number}", created_at=REGISTERED.created_at - timedelta(minutes=number))
        await resources.adapter_registry.register(replace(mine, owner=acme.id if number else ""))
    await resources.adapter_grants.grant("model_0", acme.id)
    for denied in (NEON, "model_1"):
        await resources.adapter_grants.revoke(denied, acme.id)
    whole = sorted(await resources.catalog.adapters(acme.id), key=position_of, reverse=True)
    assert len(whole) == 11, "seven of the file, four of the registered"
    for limit in (1, 2, 3, 12):
        paged: list[Adapter] = []
        while page := await resources.catalog.newest(
            acme.id, limit=limit, before=position_of(paged[-1]) if paged else None
        ):
            assert len(page) == min(limit, len(whole) - len(paged))
            paged += page
        assert paged == whole


async def test_who_has_read_ahead_reads_no_record_for_a_page(
    resources: Resources, other: Resources, redis_db: Any
) -> None:
    await other.catalog.read_ahead()
    redis_db.config_resetstat()
    assert len(await other.catalog.newest("acct_none", limit=3)) == 3
    assert redis_db.info("commandstats")["cmdstat_hgetall"]["calls"] == 1, "the account's grants"


async def test_a_registered_adapter_is_its_owners_and_as_it_was_written(resources: Resources, other: Resources) -> None:
    acme, zeta = await resources.accounts.create("acme"), await resources.accounts.create("zeta")
    mine = replace(REGISTERED, owner=acme.id)
    for _ in range(2):  # a call may be repeated
        assert (await resources.adapter_registry.register(mine)).status == "added"
    assert await other.catalog.adapter(mine.id) == mine
    assert mine.id in await _usable(other, acme.id)
    assert mine.id not in await _usable(other, zeta.id)
    assert (await resources.adapter_registry.register(replace(mine, id=NEON))).status == "taken", "by the file"


async def test_waiting_jobs_end_in_the_next_round_of_the_reaper_when_their_lora_is_withdrawn(
    resources: Resources, other: Resources, settings: Settings
) -> None:
    """No worker runs. LoRAs are withdrawn by removal, by denial, and in the file: a row leaves it, another is offered
    to fewer.
    """
    acme = await resources.accounts.create("acme")
    mine = replace(REGISTERED, owner=acme.id)
    await resources.adapter_registry.register(mine)
    narrowed, gone, denied, kept = (adapter_id(name) for name in POCKET_ADAPTERS[:4])
    jobs = {lora: await accept(resources, acme.id, lora_id=lora) for lora in (mine.id, narrowed, gone, denied, kept)}

    def withdraw(rows: CatalogRows) -> None:
        rows[0]["accounts"] = ["zeta"]
        del rows[1]

    await other.adapter_registry.remove(mine.id)
    await other.adapter_grants.revoke(denied, acme.id)
    rewrite_catalog(settings.catalog, withdraw)
    await other.applied_catalog.apply_file()
    await resources.queue.reap()
    ended = await resources.jobs.find_many(list(jobs.values()))
    assert {lora for lora, job_id in jobs.items() if ended[job_id].state is JobState.QUEUED} == {kept}
    codes = {job.failure.code for job in ended.values() if job.failure}
    assert codes == {FailureCode.LORA_UNAVAILABLE}


@pytest.mark.parametrize(
    ("of_base", "own", "passes", "rows"),
    [
        ({"sampler": "euler-karras"}, {}, 1, 2),
        ({"sampler": "heun-karras"}, {}, 2, 2),
        ({"sampler": "dpm++sde"}, {"sampler": "lcm-trailing"}, 1, 2),
        ({}, {"sampler": "dpm2"}, 2, 2),
        ({"guidance_end": 0.5}, {}, 1, 1.5),
        ({"guidance_end": 0.5, "sampler": "heun"}, {"guidance_start": 0.2, "guidance_end": 0.6}, 2, 1.4),
        ({"guidance_end": 0.5}, {"guidance_start": 0}, 1, 2),
    ],
)
async def test_work_counts_passes_and_guidance_as_the_lora_or_else_its_base_model_says(
    of_base: dict[str, Any],
    own: dict[str, Any],
    passes: int,
    rows: float,
    settings: Settings,
    resources: Resources,
    redis_db: redis.Redis,
) -> None:
    content = yaml.safe_load(settings.catalog.read_text())
    pocket = content["base_models"][0]
    content["base_models"] = [
        {**pocket, "id": "other", "sampler": "euler"},
        pocket | of_base,
    ]
    for row in content["adapters"]:
        row.update(own if row["id"] == NEON else {})
    settings.catalog.write_text(yaml.safe_dump(content))
    await resources.applied_catalog.apply_file()
    acme = await resources.accounts.create("acme")
    for scale, times in ((7.5, passes * rows / 2), (1.0, passes)):
        job = new_job(acme.id, lora_id=NEON, guidance_scale=scale)
        await resources.queue.accept(job)
        assert isinstance(job.request, GenerationRequest)
        denoising, text = prices(job.request)["StableDiffusionPipeline"]
        work = redis_db.hget(redis_key("job", job.job_id), "work")
        assert int(str(work)) == pytest.approx(times * denoising + text, abs=0.51)


LONGEST = {"prompt": "9" * 4000, "negative_prompt": "\U0001f642" * 4000}


@pytest.mark.parametrize(
    ("fields", "denoising", "encoding"),
    [
        ({}, 30 * 0.262144, 0),
        ({"guidance_scale": 1.0, "negative_prompt": "9" * 4000}, 15 * 0.262144, 0),
        ({"guidance_start": 0.0, "guidance_end": 0.5}, 0.75 * 30 * 0.262144, 0),
        ({"guidance_start": 0.4, "guidance_end": 0.44, "steps": 10}, (10 + 0) / 2 * 0.262144, 0),
        ({"steps": 1, **LONGEST}, 0.262144 + 16_000 * 80e-6, 20_000 * 0.0003),
        ({"steps": 1, "guidance_scale": 1.0, **LONGEST}, (0.262144 + 4_000 * 80e-6) / 2, 4_000 * 0.0003),
        ({"steps": 1, "prompt": "(9:0)" * 32, "prompt_weights": True}, 0.262144, (2 * 160 + 32 * 75) * 0.0003),
    ],
)
async def test_work_and_fair_share_count_texts_and_rows_and_usage_the_megapixel_steps_alone(
    fields: dict[str, Any], denoising: float, encoding: float, resources: Resources, redis_db: redis.Redis
) -> None:
    await resources.applied_catalog.apply_file()
    acme = await resources.accounts.create("acme")
    job = new_job(acme.id, lora_id=NEON, **fields)
    await resources.queue.accept(job)
    work = redis_db.hget(redis_key("job", job.job_id), "work")
    assert int(str(work)) / 1000 == pytest.approx(denoising + encoding, abs=0.02)
    (claim,) = await resources.queue.claim("w", pool="generation", nonce="n")
    charged = float(str(redis_db.hget(redis_key("job", job.job_id), "charge")))
    assert charged == pytest.approx(int(str(work)) / 1000 * DEFAULT_SECONDS_PER_UNIT[JobKind.GENERATION])
    await resources.queue.finish(claim.lease, [await store_image(resources.images, claim)], seconds=1)
    (usage,) = await resources.usage.days(acme.id, await resources.usage.today(), 1)
    assert usage.megapixel_steps == pytest.approx(job.request.work, abs=0.001)


async def test_what_is_not_said_is_not_stored(resources: Resources, redis_db: redis.Redis) -> None:
    """A version before a field was added would refuse a base model with it."""
    await resources.applied_catalog.apply_file()
    (pocket,) = json.loads(str(redis_db.hget(redis_key("catalog"), "base_models")))
    lora = redis_db.hgetall(redis_key("lora", NEON))
    assert not {"guidance_start", "guidance_end", "precision", "widths"} & {*pocket, *map(str, lora)}
    (now,) = await resources.applied_catalog.applied_base_models()
    assert now.widths["unet.cross_attention_dim"] == 128
    redis_db.hdel(redis_key("catalog"), "widths")  # as the version before leaves it
    (before,) = await resources.applied_catalog.applied_base_models()
    assert before == replace(now, widths={})


async def test_what_is_removed_is_gone_everywhere_with_its_grants(
    resources: Resources, other: Resources, redis_db: redis.Redis
) -> None:
    acme, zeta = await resources.accounts.create("acme"), await resources.accounts.create("zeta")
    mine = replace(REGISTERED, owner=acme.id, accounts=frozenset({"zeta"}))
    await resources.adapter_registry.register(mine)
    await resources.adapter_grants.grant(mine.id, zeta.id)
    many = [(await resources.accounts.create(f"many-{number}")).id for number in range(150)]
    for account_id in many:
        await resources.adapter_grants.grant(mine.id, account_id)
    assert key_problems(redis_db) == []
    assert await other.adapter_registry.remove(mine.id) == ("removed", mine.file)
    assert await other.adapter_registry.remove(mine.id) == ("unknown", "")
    assert await resources.catalog.adapter(mine.id) is None
    assert mine.id not in [*await _usable(resources, acme.id), *await _usable(resources, zeta.id)]
    again = await resources.adapter_registry.register(mine)
    assert again.status == "taken", "grants of more than a hundred accounts are left to the reaper"
    await resources.queue.reap(limit=40)
    assert await resources.queue.reap(limit=40) < 40
    assert not [name for name in redis_db.scan_iter() if mine.id in str(name)]
    assert not [each for each in many if redis_db.hexists(redis_key("grants", each), mine.id)]
    await resources.adapter_registry.register(replace(mine, accounts=frozenset()))
    assert mine.id not in await _usable(resources, zeta.id), "an earlier grant came back with the id"
    assert await resources.adapter_registry.remove(NEON) == ("file", "")


async def test_the_quota_holds_for_many_that_are_registered_at_once(resources: Resources) -> None:
    acme = await resources.accounts.create("acme")
    many = [replace(REGISTERED, id=f"model_{n}", owner=acme.id, sha256=f"{n}", size_bytes=10) for n in range(8)]
    terms = Terms(max_loras=9, max_bytes=35)
    found = await asyncio.gather(*(resources.adapter_registry.register(each, terms) for each in many))
    assert sorted(each.status for each in found) == ["added"] * 3 + ["too_large"] * 5
    again = await resources.adapter_registry.register(replace(many[0], id="model_c"), terms)
    assert again == ("same", many[0].id)


async def test_a_file_whose_application_is_cut_short_is_applied_by_the_next(
    settings: Settings, resources: Resources, redis_db: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service goes on meanwhile, and waiting jobs follow their base model though the first call never said so."""
    job_id = await accept(resources, lora_id=NEON)
    monkeypatch.setattr(applied_catalog, "ROWS_AT_ONCE", 1)
    put_in_group(settings.catalog, "sdxl")
    rewrite_catalog(settings.catalog, lambda rows: [row.update(description="new") for row in rows if row["id"] != NEON])
    names = [redis_key("lora", str(row_id)) for row_id in redis_db.zrange(redis_key("loras"), 0, -1)]

    def described() -> int:
        return sum(redis_db.hget(name, "description") == "new" for name in names)

    redis_db.rename(names[-1], "aside")
    redis_db.set(names[-1], "no record, which ends the script")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await resources.applied_catalog.apply_file()
    redis_db.rename("aside", names[-1])
    assert described() == 7
    await resources.queue.reap()
    assert existing(await resources.jobs.find(job_id)).pool == "generation"
    assert await resources.applied_catalog.apply_file() == []
    assert described() == 8
    await resources.queue.reap()
    assert existing(await resources.jobs.find(job_id)).pool == "generation.sdxl"


async def test_a_changed_file_is_served_by_every_process(
    resources: Resources, other: Resources, settings: Settings
) -> None:
    await resources.adapter_registry.register(REGISTERED)
    new = {**yaml.safe_load(settings.catalog.read_text())["adapters"][0], "id": "model_new"}

    def change(rows: CatalogRows) -> None:
        rows[0]["name"] = "Renamed"
        rows[1]["accounts"] = ["nobody"]
        del rows[2]
        rows.append(new)

    rewrite_catalog(settings.catalog, change)
    assert await resources.applied_catalog.apply_file() == []
    listed = {adapter.id: adapter for adapter in await other.catalog.all()}
    assert listed[adapter_id("outline")].name == "Renamed"
    assert NEON not in listed
    assert "model_new" in listed
    assert listed[REGISTERED.id] == REGISTERED
    acme = await other.accounts.create("acme")
    assert adapter_id("mosaic") not in await _usable(other, acme.id)


async def test_a_bad_row_is_set_aside_by_name_and_keeps_what_was_applied(
    resources: Resources, other: Resources, settings: Settings
) -> None:
    await resources.adapter_registry.register(REGISTERED)

    def change(rows: CatalogRows) -> None:
        rows[0]["name"] = ""
        rows[1]["description"] = "Small tiles."
        rows.append({**rows[1], "id": "model_missing", "file": "/nowhere/missing.safetensors"})
        rows.append({**rows[1], "id": REGISTERED.id})
        rows.append({"id": "model_bad"})

    rewrite_catalog(settings.catalog, change)
    reported = await resources.applied_catalog.apply_file()
    assert {row.id for row in reported} == {adapter_id("outline"), "model_missing", REGISTERED.id, "model_bad"}
    assert await other.applied_catalog.set_aside() == reported
    listed = {adapter.id: adapter for adapter in await other.catalog.all()}
    assert listed[adapter_id("outline")].name == "Outline"
    assert listed[adapter_id("mosaic")].description == "Small tiles."
    assert listed[REGISTERED.id] == REGISTERED
    assert not {"model_missing", "model_bad"} & listed.keys()


async def test_a_file_that_cannot_be_read_stops_a_first_start_and_no_later_one(
    settings: Settings, redis_db: redis.Redis
) -> None:
    good = settings.catalog.read_text()
    settings.catalog.write_text("adapters: [")
    with pytest.raises(CatalogError, match="not YAML"):
        async with open_resources(settings):
            pass
    settings.catalog.write_text(good)
    async with open_resources(settings):
        settings.catalog.write_text("adapters: [")
    async with open_resources(settings) as later:
        assert len(await later.catalog.all()) == 9
        assert [base.source for base in await later.applied_catalog.base_models()] == [str(POCKET)]
        with pytest.raises(CatalogError):
            await later.applied_catalog.apply_file()
        assert len(await later.catalog.all()) == 9


async def test_another_catalog_does_not_replace_one_that_was_applied(settings: Settings, resources: Resources) -> None:
    """An operator's shell may name another catalog, and its commands open the same Redis."""
    empty = settings.catalog.with_name("empty.yaml")
    empty.write_text("{}")
    async with open_resources(settings.model_copy(update={"catalog": empty})) as shell:
        assert len(await shell.catalog.all()) == 9


async def test_a_file_is_read_again_only_when_it_has_changed(
    resources: Resources, settings: Settings, tmp_path: Path
) -> None:
    file = write_safetensors(tmp_path / "weights.safetensors", fill=1)
    rewrite_catalog(settings.catalog, lambda rows: rows[0].update(file=str(file)))

    async def digest() -> str:
        await resources.applied_catalog.apply_file()
        adapter = existing(await resources.catalog.adapter(adapter_id("outline")))
        return adapter.sha256

    first, found = await digest(), file.stat()
    write_safetensors(file, fill=2)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert await digest() == first, "the file was read again, although its size and time are the same"
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))
    assert await digest() != first
