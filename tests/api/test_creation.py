"""`POST /v1/jobs` takes all that the base models can do, with either key, and says what was resolved."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.api.jobs.routes import BaseModels
from serve_app.domain.jobs import JobState, Timings, Unread
from serve_app.domain.requests import GenerationRequest, LoraUse, Variant
from serve_app.store.keys import redis_key
from serve_app.store.redis_client import connect
from tests.api.app import LORA, LORA_FIELD, Member, TestService, error_of, open_service
from tests.api.test_jobs import show
from tests.made_jobs import job_of
from tests.support import (
    adapter_id,
    adapter_of,
    add_base_model,
    existing,
    plain_redis,
    png_of,
    pocket_of_widths,
    store_image,
    wait_until,
    write_catalog,
)

NEON = adapter_id("neon")
SHORTEST: dict[str, Any] = {"prompt": "a lighthouse"}
WHOLE: dict[str, Any] = {
    "kind": "generation",
    "prompt": "a lighthouse",
    "negative_prompt": "rain",
    "loras": [{"id": LORA, "weight": 0.5}, {"id": NEON, "weight": -0.25}],
    "base_model": "pocket",
    "sampler": "dpm++2m-karras",
    "steps": 7,
    "guidance_scale": 3.5,
    "guidance_start": 0.25,
    "guidance_end": 0.75,
    "width": 320,
    "height": 264,
    "num_images": 2,
    "seed": 2**64 - 1,
    "prompt_weights": True,
    "embed_settings": True,
    "output_format": "webp",
    "priority": "low",
    "start_within": 60,
    "metadata": {"order": "4711", "customer": "acme"},
}


async def create(
    service: TestService,
    member: Member,
    variant: Variant = Variant.A,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> httpx.Response:
    return await service.client.post("/v1/jobs", json=body, headers=member.headers(variant) | (headers or {}))


async def generation_of(service: TestService, answer: httpx.Response) -> GenerationRequest:
    assert answer.status_code == 202, answer.text
    request = (await job_of(service.resources, answer.json()["id"])).request
    assert isinstance(request, GenerationRequest)
    return request


@pytest.mark.parametrize("variant", Variant)
async def test_every_field_reaches_the_job_and_its_record(
    service: TestService, member: Member, variant: Variant
) -> None:
    begun = (await service.complete(await service.submit(member, num_images=2))).images
    pictures: dict[str, Any] = {"image_id": begun[0].image_id, "mask_image_id": begun[1].image_id, "strength": 0.5}
    answer = await create(service, member, variant, **WHOLE, **pictures)
    request = await generation_of(service, answer)
    body = await show(service, member.headers(variant), answer.json()["id"])
    assert answer.headers["location"] == f"/v1/jobs/{body['id']}"
    assert {**body, "jobs_ahead": 0, "estimated_completion_time": ""} == {
        **answer.json(), "jobs_ahead": 0, "estimated_completion_time": "",
    }  # fmt: skip
    assert (body["id"].partition("_")[0], body["interface"], body["status"]) == ("job", variant, "queued")
    seeds = ["18446744073709551615", str(request.seeds[1])]
    told = {name: value for name, value in WHOLE.items() if name not in ("kind", "seed")}
    assert body["request"] == told | pictures | {"seeds": seeds}
    assert request.loras == (LoraUse(LORA, 0.5), LoraUse(NEON, -0.25))
    assert [each and each.uri for each in (request.image, request.mask)] == [image.image_uri for image in begun]


async def test_what_is_left_out_is_as_the_first_base_model_says(service: TestService, member: Member) -> None:
    answer = await create(service, member, **SHORTEST)
    assert answer.headers["x-unknown-words"] == "lighthouse"
    request = await generation_of(service, answer)
    expected = GenerationRequest(prompt="a lighthouse", base_model="pocket", seeds=request.seeds)
    assert request == expected
    lora = await generation_of(service, await create(service, member, **SHORTEST, loras=[{"id": LORA}]))
    assert lora == replace(expected, loras=(LoraUse(LORA, 0.75),), seeds=lora.seeds)


async def test_interfaces_a_and_b_do_not_show_it(service: TestService, member: Member) -> None:
    job_id = (await create(service, member, **SHORTEST)).json()["id"]
    for path, headers in ((f"/v1/generate/{job_id}", member.a), (f"/v1/generations/{job_id}", member.b)):
        assert (await service.client.get(path, headers=headers)).status_code == 404


async def test_a_job_without_a_lora_is_drawn_and_counted_by_its_base_model(
    service: TestService, member: Member
) -> None:
    job_id = (await create(service, member, **SHORTEST, num_images=2, seed=5)).json()["id"]
    lease, timings = await service.lease(job_id), Timings(load=0.25, denoise=2.0, store=0.5)
    images = [await store_image(service.resources.images, service.claims[job_id], index) for index in range(2)]
    await service.resources.queue.finish(lease, images, seconds=2.5, timings=timings, unread=Unread(88, 3))
    answer = await service.client.get(f"/v1/jobs/{job_id}", headers=member.a)
    assert answer.headers["X-Unread-Characters"] == "prompt=88, negative_prompt=3"
    done = answer.json()
    assert done["unread_characters"] == {"prompt": 88, "negative_prompt": 3}
    assert [(image["seed"], image["seed_number"]) for image in done["images"]] == [("5", 5), ("6", 6)]
    assert done["timings"].pop("queue") >= 0
    assert done["timings"] == {"load": 0.25, "denoise": 2.0, "store": 0.5}
    assert done["usage"] == {"images": 2, "megapixel_steps": 15.72864, "worker_seconds": 2.5}
    (row,) = (await service.client.get("/v1/usage", headers=member.a)).json()["usage"]
    assert (row["lora_id"], row["images"]) == ("pocket", 2)


async def test_usage_names_the_loras_of_a_job_together(service: TestService, member: Member) -> None:
    loras = [{"id": LORA}, {"id": NEON}]
    await service.complete((await create(service, member, **SHORTEST, loras=loras)).json()["id"])
    (row,) = (await service.client.get("/v1/usage", headers=member.a)).json()["usage"]
    assert (row["lora_id"], row["images"]) == (f"{LORA}+{NEON}", 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "prompt: is required, must be a string of 1 to 4000 characters"),
    "an unknown kind": ({"kind": "video"}, "kind: must be generation or upscale"),
    "a field of the other kind": (SHORTEST | {"scale_factor": 2}, "scale_factor: is for `kind: upscale` alone"),
    "a field of the usual kind": ({"kind": "upscale", "prompt": "a"}, "prompt: is for `kind: generation` alone"),
    "another service's name": (SHORTEST | {"num_inference_steps": 4}, "num_inference_steps: is called `steps` here"),
    "Replicate's body": ({"version": "x", "input": {}}, "version: send `base_model`, or LoRAs as `loras`; input: send"),
    "Replicate's LoRA": (SHORTEST | {"lora_scale": 1}, "lora_scale: send `loras`, each with a `weight`"),
    "Replicate's events": (SHORTEST | {"webhook_events_filter": []}, "webhook_events_filter: leave it out; a webhook"),
    "fal's LoRA": (SHORTEST | {"loras": [{"path": "https://x"}]}, "loras[0].path: send the file to `POST /v1/loras`"),
    "fal's checker": (SHORTEST | {"enable_safety_checker": True}, "enable_safety_checker: leave it out; the operator"),
    "fal's waiting": ({"kind": "upscale", "sync_mode": True}, "sync_mode: leave it out; with the header `Prefer: "),
    "an upscaler's factor": ({"kind": "upscale", "scale": 4}, "scale: is called `weight` of a LoRA here, and `scale"),
    "too many LoRAs": (SHORTEST | {"loras": [{"id": LORA}] * 5}, "loras: must be at most 4 objects"),
    "a weight out of bounds": (SHORTEST | {"loras": [{"id": LORA, "weight": 3}]}, "loras[0].weight: must be between"),
    "a LoRA without an id": (SHORTEST | {"loras": [{"weight": 1}]}, "loras[0].id: is required, must be a string"),
    "a LoRA's other name": (
        SHORTEST | {"loras": [{"id": LORA, "scale": 1}]},
        "loras[0].scale: is called `weight` here",
    ),
    "a LoRA's strange field": (
        SHORTEST | {"loras": [{"id": LORA, "x": 1}]},
        "loras[0].x: unknown field; the fields are",
    ),
    "one LoRA twice": (SHORTEST | {"loras": [{"id": LORA}, {"id": LORA}]}, "loras: each may be named once"),
    "another base model": (SHORTEST | {"loras": [{"id": LORA}], "base_model": "sdxl"}, "base_model: must be pocket"),
    "an unknown base model": (SHORTEST | {"base_model": "sdxl"}, "base_model: must be pocket"),
    "an unknown sampler": (SHORTEST | {"sampler": "magic"}, "sampler: must be one of euler, euler-a, heun"),
    "a spacing that it has not": (SHORTEST | {"sampler": "lcm-karras"}, "sampler: lcm may be alone or with -trailing"),
    "another family's sampler": (SHORTEST | {"sampler": "flow-euler"}, "sampler: pocket takes euler or "),
    "too wide": (SHORTEST | {"width": 1032}, "width: must be at most 1024 with pocket"),
    "no multiple of eight": (SHORTEST | {"width": 260}, "width: must be a multiple of 8 between 256 and 2048"),
    "guidance from the end": (SHORTEST | {"guidance_start": 1}, "guidance_start: must be below guidance_end"),
    "guidance up to the begin": (SHORTEST | {"guidance_end": 0}, "guidance_end: must be above guidance_start"),
    "guidance over nothing": (
        SHORTEST | {"guidance_start": 0.5, "guidance_end": 0.5},
        "guidance_end: must be above guidance_start, both from 0 to 1, not 0.5 and 0.5",
    ),
    "guidance from a word": (SHORTEST | {"guidance_start": "half"}, "guidance_start: must be a number between 0 and 1"),
    "steps as text": (SHORTEST | {"steps": "20"}, "steps: must be an integer between 1 and 150"),
    "a sampler of no text": (SHORTEST | {"sampler": 1}, "sampler: must be a string of 1 to 40 characters"),
    "a strength alone": (SHORTEST | {"strength": 0.5}, "strength: needs an image_id"),
    "metadata of numbers": (SHORTEST | {"metadata": {"a": 1}}, "metadata: must be an object of at most 16 texts"),
    "no truth value": (SHORTEST | {"prompt_weights": "yes"}, "prompt_weights: must be true or false"),
    "a heavy word": (SHORTEST | {"prompt_weights": True, "negative_prompt": "(a:11)"}, "a weight must be at most 10"),
    "a factor of three": ({"kind": "upscale", "image_id": "img_x", "scale_factor": 3}, "scale_factor: must be 2 or 4"),
}


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_bad_field_is_named(service: TestService, member: Member, body: dict[str, Any], message: str) -> None:
    answer = await create(service, member, **body)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_parameter")
    assert message in error_of(answer)["message"]


async def test_every_lora_must_be_the_accounts_own_to_use(service: TestService, member: Member) -> None:
    loras = [{"id": LORA}, {"id": "model_of_nobody"}]
    refused = await create(service, member, **SHORTEST, loras=loras)
    assert (refused.status_code, error_of(refused)["message"]) == (403, "loras[1].id: must be a LoRA that you may use")
    named = await create(service, member, **SHORTEST, loras=[{"id": LORA}, {"id": "Neon"}])
    assert error_of(named)["message"] == f"loras[1].id: must be an id, not a name; send {NEON}"
    job_id = (await create(service, member, **SHORTEST, loras=[{"id": LORA}, {"id": NEON}])).json()["id"]
    await service.resources.adapter_grants.revoke(NEON, member.account.id)
    assert await service.resources.queue.reap()
    assert (await show(service, member.a, job_id))["error"]["code"] == "lora_unavailable"


async def test_ranks_add_up_to_what_a_generator_takes(service: TestService, member: Member) -> None:
    for name in ("model_big", "model_large"):
        large = adapter_of(member.account.id, id=name, found={"rank": 100})
        await service.resources.adapter_registry.register(large)
    refused = await create(service, member, **SHORTEST, loras=[{"id": "model_big"}, {"id": "model_large"}])
    assert "their ranks must add up to at most 128, not 200" in error_of(refused)["message"]


async def test_two_lokrs_of_the_same_whole_factors_are_refused_at_once(service: TestService, member: Member) -> None:
    for name, layers in (("one", "a"), ("same", "a"), ("other", "b")):
        found = {"rank": 8, "factored": layers}
        await service.resources.adapter_registry.register(
            adapter_of(member.account.id, id=f"model_{name}", found=found)
        )
    for weight, other, status in ((0.5, "same", 400), (0, "same", 202), (0.5, "other", 202)):
        loras = [{"id": "model_one"}, {"id": f"model_{other}", "weight": weight}]
        answer = await create(service, member, **SHORTEST, loras=loras)
        assert answer.status_code == status, answer.text
        assert status == 202 or error_of(answer)["message"].startswith("loras: two are LoKrs of whole factors")


async def test_a_lora_counts_by_what_takes_as_long(service: TestService, member: Member) -> None:
    """Beyond a generator's highest rank the first counts too: a LoKr of few numbers may take longer than any LoRA."""
    found = {"small": {"rank": 2, "work_rank": 94}, "slow": {"rank": 120, "work_rank": 768}, "lora": {"rank": 8}}
    for name, seen in found.items():
        await service.resources.adapter_registry.register(adapter_of(member.account.id, id=f"model_{name}", found=seen))

    async def work_of(job_id: str) -> float:
        return float(await connect(service.resources.redis_url).hget(redis_key("job", job_id), "work") or 0)

    work: list[float] = []
    for names in ([], ["small"], ["slow"], ["lora", "small"], ["slow", "lora"]):
        loras = [{"id": f"model_{name}"} for name in names]
        job_id = (await create(service, member, **SHORTEST, loras=loras)).json()["id"]
        work.append(await work_of(job_id))
    assert [each / work[0] for each in work[1:]] == pytest.approx([1, 2, 1 + 94 / 640, 2 + 8 / 640], abs=0.001)
    for variant in Variant:
        ids = [await service.submit(member, variant, **{LORA_FIELD[variant]: f"model_{name}"}) for name in found]
        work = [await work_of(job_id) for job_id in ids]
        assert [each / work[0] for each in work] == pytest.approx([1, 2, 1], abs=0.001)


async def test_an_idempotency_key_stands_for_the_whole_wish(service: TestService, member: Member) -> None:
    key = {"Idempotency-Key": "one"}
    metadata = {"order": "4711", "customer": "acme"}
    upscale = {"kind": "upscale", "image_id": await service.completed_image(member)}
    bodies: list[dict[str, Any]] = [SHORTEST, upscale]
    for body in bodies:
        first = await create(service, member, headers=key, **body, metadata=metadata)
        again = await create(service, member, headers=key, **body, metadata=dict(reversed(metadata.items())))
        assert (again.json()["id"], again.headers["idempotency-replayed"]) == (first.json()["id"], "true")
        told = {"metadata": metadata, "webhook_url": "https://1.1.1.1/told"}
        others: list[dict[str, Any]] = [{"metadata": {"a": "b"}}, told]
        for more in others:
            other = await create(service, member, headers=key, **body, **more)
            assert (other.status_code, error_of(other)["code"]) == (409, "idempotency_conflict")
        key = {"Idempotency-Key": "two"}


async def test_a_job_of_low_priority_waits_behind_all_others_of_its_account(
    service: TestService, member: Member
) -> None:
    low = (await create(service, member, **SHORTEST, priority="low")).json()["id"]
    others = [(await create(service, member, **SHORTEST)).json()["id"] for _ in range(2)]
    assert [(await show(service, member.a, each))["jobs_ahead"] for each in (*others, low)] == [0, 1, 2]


async def test_a_job_that_is_not_started_in_time_expires(service: TestService, member: Member) -> None:
    started = (await create(service, member, **SHORTEST, start_within=1)).json()["id"]
    await service.resources.queue.release(await service.lease(started))
    late = (await create(service, member, **SHORTEST, start_within=1)).json()["id"]
    waiting = (await create(service, member, **SHORTEST)).json()["id"]

    async def is_expired() -> bool:
        await service.resources.queue.reap()
        return (await job_of(service.resources, late)).state is JobState.EXPIRED

    await wait_until(is_expired)
    for job_id in (started, waiting):
        assert (await job_of(service.resources, job_id)).state is JobState.QUEUED


async def test_a_creation_that_waits_answers_with_the_ended_job(service: TestService, member: Member) -> None:
    asking = asyncio.create_task(create(service, member, headers={"Prefer": "wait=20"}, **SHORTEST))

    async def accepted() -> list[dict[str, Any]]:
        return (await service.client.get("/v1/jobs", headers=member.a)).json()["jobs"]

    await wait_until(accepted)
    await service.complete((await accepted())[0]["id"])
    answer = await asking
    assert (answer.status_code, answer.json()["status"]) == (202, "completed")
    assert answer.headers["preference-applied"] == "wait=20"


@pytest.mark.parametrize("variant", Variant)
async def test_an_image_of_any_job_is_enlarged(service: TestService, member: Member, variant: Variant) -> None:
    first = (await create(service, member, **SHORTEST)).json()["id"]
    await service.complete(first)
    image_id = (await show(service, member.a, first))["images"][0]["image_id"]
    of_any = {name: WHOLE[name] for name in ("output_format", "priority", "start_within", "metadata")}
    answer = await create(service, member, variant, kind="upscale", image_id=image_id, scale_factor=4, **of_any)
    assert answer.status_code == 202, answer.text
    assert answer.json()["request"] == {"image_id": image_id, "scale_factor": 4, **of_any}
    shortest = await create(service, member, kind="upscale", image_id=image_id)
    usual = {"output_format": "png", "priority": "normal", "metadata": {}}
    assert existing((await job_of(service.resources, shortest.json()["id"])).request).from_upload is False
    assert shortest.json()["request"] == {"image_id": image_id, "scale_factor": 2, **usual}
    assert (await create(service, member, kind="upscale", image_id="img_" + "a" * 26)).status_code == 404
    begun: dict[str, Any] = {**SHORTEST, "image_id": image_id, "steps": 1}
    for name in ("image_id", "mask_image_id"):
        strange: dict[str, Any] = {**begun, name: "img_" + "a" * 26}
        refused = await create(service, member, **strange)
        assert error_of(refused) == {"code": "not_found", "message": f"{name}: your account has no such image"}
    bodies: list[dict[str, Any]] = [begun, {**begun, "strength": 0.5}]
    for body in bodies:
        refused = await create(service, member, **body)
        assert error_of(refused)["message"].startswith("strength: leaves none of 1 steps")


async def upload(service: TestService, member: Member, width: int, height: int) -> str:
    files = {"file": png_of((width, height))}
    return (await service.client.post("/v1/images", files=files, headers=member.b)).json()["id"]


SIZES: list[tuple[tuple[int, int], dict[str, Any], tuple[int, int] | str]] = [
    ((768, 512), {}, (624, 416)),
    ((768, 512), {"width": 640}, (640, 424)),
    ((768, 512), {"height": 640}, (960, 640)),
    ((768, 512), {"width": 512, "height": 512}, (512, 512)),
    ((400, 1200), {}, (296, 888)),
    ((400, 1250), {"height": 1000}, (320, 1000)),
    ((70, 290), {}, (256, 1024)),
    ((64, 640), {}, "image_id: the picture has 64 × 640 pixels, and pocket cannot keep its proportions"),
    ((1500, 500), {"width": 512}, "width: the picture has 1500 × 500 pixels"),
    ((500, 1500), {"width": 512}, "width: the picture has 500 × 1500 pixels"),
]


async def test_an_image_keeps_its_proportions_where_no_whole_size_is_asked_for(
    service: TestService, member: Member
) -> None:
    for picture, asked, expected in SIZES:
        image_id = await upload(service, member, *picture)
        answer = await create(service, member, **SHORTEST, image_id=image_id, **asked)
        if isinstance(expected, str):
            assert error_of(answer)["message"].startswith(expected)
        else:
            request = await generation_of(service, answer)
            assert (request.width, request.height) == expected, (picture, asked)


async def test_loras_are_drawn_on_a_base_model_that_fits_them_all(tmp_path: Path) -> None:
    async with open_service(tmp_path) as service:
        catalog, resources = service.resources.settings.catalog, service.resources
        for name, widths in (("turbo", {}), ("narrow", {"cross_attention_dim": 96})):
            add_base_model(catalog, name, pocket_of_widths(tmp_path / name, **widths))
        add_base_model(catalog, "lost", tmp_path / "lost")
        await resources.applied_catalog.apply_file()
        for name in ("turbo", "narrow", "gone"):
            await resources.adapter_registry.register(adapter_of("", id=name, base_model=name, accounts=None))
        member = await service.member()
        unfit = "loras[1].id: a LoRA of narrow cannot be drawn on {0}: unet.cross_attention_dim is 96 in narrow, and 128 in {0}"
        unread = (
            "loras[0].id: a LoRA of pocket cannot be drawn on lost: the family and widths of lost cannot be read here"
        )
        asked: list[tuple[list[str], str | None, str]] = [
            ([LORA], None, ""), ([LORA], "pocket", ""), ([LORA], "turbo", ""), (["turbo"], None, ""),
            ([LORA, "turbo"], "turbo", ""), ([LORA, "turbo"], "pocket", ""),
            ([LORA, "turbo"], None, "base_model: must be named for LoRAs of several, such as pocket or turbo"),
            ([LORA, "narrow"], None, unfit.format("pocket")), ([LORA, "narrow"], "turbo", unfit.format("turbo")),
            ([LORA], "lost", unread), (["gone"], "pocket", "loras: their base model, gone, is not offered any more"),
        ]  # fmt: skip
        for loras, base_model, refused in asked:
            body: dict[str, Any] = {**SHORTEST, "loras": [{"id": lora_id} for lora_id in loras]}
            body |= {"base_model": base_model} if base_model else {}
            answer = await create(service, member, **body)
            if refused:
                assert (answer.status_code, error_of(answer)["message"]) == (400, refused)
                continue
            drawn_on = base_model or ("pocket" if loras == [LORA] else "turbo")
            assert (await generation_of(service, answer)).base_model == drawn_on
            assert answer.headers.get("x-unknown-words") == {"pocket": "lighthouse", "turbo": None}[drawn_on]


async def test_base_models_say_what_may_be_asked_of_them(service: TestService, member: Member) -> None:
    answer = await service.client.get("/v1/base-models", headers=member.b)
    (pocket,) = BaseModels.model_validate_json(answer.content).base_models
    assert (pocket.id, pocket.usual_side, pocket.longest_side) == ("pocket", 512, 1024)
    assert (pocket.steps, pocket.guidance_scale, pocket.prompt_weights, pocket.mask) == (30, 7.5, True, True)


async def test_a_base_model_and_its_loras_say_what_is_usual_and_what_can_be_asked_for(tmp_path: Path) -> None:
    catalog = write_catalog(tmp_path / "offered")
    rows = yaml.safe_load(catalog.read_text())
    rows["base_models"][0] |= {"steps": 12, "guidance": 3.5, "sampler": "ddim", "guidance_end": 0.5}
    rows["adapters"][0] |= {"steps": 4, "guidance": 1.5, "sampler": "lcm", "guidance_start": 0.25}
    for name in ("Flux2Klein", "ZImage"):
        rows["base_models"].append({"id": name, "folder": str(tmp_path / name)})
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": f"{name}Pipeline"}))
    catalog.write_text(yaml.safe_dump(rows))
    async with open_service(tmp_path, catalog=catalog) as service:
        member = await service.member()
        usual_of: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
            ({}, (12, 3.5, "ddim", 0, 0.5)),
            ({"loras": [{"id": LORA}]}, (4, 1.5, "lcm", 0.25, 1)),
            ({"loras": [{"id": LORA}], "guidance_end": 0.2}, (4, 1.5, "lcm", 0, 0.2)),
        ]
        for fields, usual in usual_of:
            drawn = await generation_of(service, await create(service, member, **SHORTEST, **fields))
            part = drawn.guidance_start, drawn.guidance_end
            assert (drawn.steps, drawn.guidance_scale, drawn.sampler, *part) == usual
        begun: dict[str, Any] = {**SHORTEST, "steps": 1, "image_id": await service.completed_image(member)}
        klein = await generation_of(service, await create(service, member, **begun, base_model="Flux2Klein"))
        assert (klein.base_model, klein.width, klein.strength, klein.work) == ("Flux2Klein", 1024, 1, 1024**2 / 1e6)
        sizes: dict[str, Any] = {"base_model": "Flux2Klein", "width": 512, "height": 512}
        work: list[float] = []
        pictures: list[dict[str, Any]] = [{}, {"image_id": await upload(service, member, 1600, 800)}]
        for picture in pictures:
            asked: dict[str, Any] = {
                **SHORTEST,
                **sizes,
                **picture,
                "steps": 100,
            }  # beside which encoding the prompt is little
            job = (await create(service, member, **asked)).json()["id"]
            with plain_redis(service.resources.redis_url) as redis:
                work.append(float(redis.hget(redis_key("job", job), "work") or 0))
        cost = work[1] / work[0]
        assert cost == pytest.approx(1 + 1440 * 720 / 512**2, rel=0.01), "the picture's own tokens are work"
        thin: dict[str, Any] = {**sizes, "image_id": await upload(service, member, 63, 300)}
        answer = await create(service, member, **SHORTEST, **thin)
        assert error_of(answer)["message"].endswith("this has 63 × 300")
        z_image = await generation_of(service, await create(service, member, **begun, base_model="ZImage"))
        assert (z_image.base_model, z_image.strength) == ("ZImage", 0.8)
        refused: dict[str, Any] = {"strength": 0.5, "mask_image_id": begun["image_id"], "prompt_weights": True}
        refused["sampler"] = "euler"
        for field, value in refused.items():
            answer = await create(service, member, **begun, base_model="Flux2Klein", **{field: value})
            assert error_of(answer)["message"].startswith(f"{field}: Flux2Klein ")
        listed = await service.client.get("/v1/base-models", headers=member.a)
        models = {each.id: each for each in BaseModels.model_validate_json(listed.content).base_models}
        assert [(each.guidance_start, each.guidance_end) for each in models.values()] == [(0, 0.5), (0, 1), (0, 1)]
        assert [models[name].mask for name in ("pocket", "Flux2Klein", "ZImage")] == [True, False, True]
        assert ("lcm" in models["pocket"].samplers, models["ZImage"].samplers) == (True, ["flow-euler"])
