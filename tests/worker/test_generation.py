"""Every field of both interfaces' requests reaches the engine, and a missing adapter is named."""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file

from serve_app.domain.errors import FailureCode
from serve_app.domain.jobs import Claim, JobKind, Lease, new_job_id
from serve_app.domain.requests import GenerationRequest, LoraUse, Picture, Variant
from serve_app.engine import Engine, EngineOptions
from serve_app.jobs.picture_file import decode
from serve_app.jobs.queue import new_nonce
from serve_app.worker.executor import NotLoaded, Pixels, RunFailed
from serve_app.worker.generation import GenerationExecutor
from tests.api.app import BODY_A, BODY_B, TestService, open_service
from tests.composition import Resources
from tests.support import (
    POCKET,
    CatalogRows,
    adapter_id,
    adapter_of,
    change_base_model,
    existing,
    rewrite_catalog,
)

pytestmark = pytest.mark.xdist_group("generation")  # the engine and the service are opened once
LORAS = (adapter_id("outline"), adapter_id("neon"))
REQUEST = GenerationRequest(
    prompt="a (red:1.8) circle", loras=(LoraUse(adapter_id("outline")),), width=256, height=256, steps=2, seeds=(1,)
)
CHANGES: dict[str, Any] = {
    "prompt": "a blue star",
    "negative_prompt": "a red circle",
    "loras": (LoraUse(adapter_id("outline")), LoraUse(adapter_id("neon"), 0.25)),
    "width": 320,
    "height": 320,
    "guidance_scale": 2.0,
    "guidance_start": 0.5,
    "guidance_end": 0.5,
    "steps": 3,
    "seeds": (2,),
    "sampler": "dpm++2m",
    "prompt_weights": True,
    "image": None,
    "strength": 0.5,
    "mask": None,
}
"""Another value for every field of a request that changes its pictures; what begins from an image has `begun`."""
UNDRAWN = {
    "base_model",
    "output_format",
    "metadata",
    "priority",
    "start_within",
    "embed_settings",
    "from_upload",
    "quality",
}
INTERFACES: list[tuple[Variant, str, Any, str, Any]] = [
    (Variant.A, "prompt", "a blue star", "prompt", "a blue star"),
    (Variant.A, "lora_id", adapter_id("neon"), "loras", (LoraUse(adapter_id("neon")),)),
    (Variant.A, "lora_weight", 0.25, "loras", (LoraUse(adapter_id("outline"), 0.25),)),
    (Variant.A, "width", 768, "width", 768),
    (Variant.A, "height", 768, "height", 768),
    (Variant.A, "guidance_scale", 2.0, "guidance_scale", 2.0),
    (Variant.A, "steps", 21, "steps", 21),
    (Variant.A, "seed", 5, "seeds", (5,)),
    (Variant.A, "num_images", 2, "seeds", (1, 2)),
    (Variant.B, "positive_prompt", "a blue star", "prompt", "a blue star"),
    (Variant.B, "negative_prompt", "a red circle", "negative_prompt", "a red circle"),
    (Variant.B, "model_id", adapter_id("neon"), "loras", (LoraUse(adapter_id("neon")),)),
    (Variant.B, "lora_weight", 0.25, "loras", (LoraUse(adapter_id("outline"), 0.25),)),
    (Variant.B, "width", 320, "width", 320),
    (Variant.B, "height", 320, "height", 320),
    (Variant.B, "guidance", 2.0, "guidance_scale", 2.0),
    (Variant.B, "seed", 5, "seeds", (5,)),
]
"""Interface, field and value of a body → field and value of the request that a worker claims."""
FIXED = {Variant.A: {"negative_prompt"}, Variant.B: {"steps"}}
"""Fields of a request that an interface has no field for."""
OF_JOBS = {
    "base_model",
    "guidance_start",
    "guidance_end",
    "sampler",
    "image",
    "strength",
    "mask",
    "prompt_weights",
    "embed_settings",
    "from_upload",
    "output_format",
    "metadata",
    "priority",
    "start_within",
    "quality",
}
"""Fields that only `POST /v1/jobs` has, or OpenAI's door."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load({"pocket": POCKET}, EngineOptions(max_rows=2, exact=False)) as engine:
        yield engine


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TestService]:
    async with open_service(tmp_path_factory.mktemp("service")) as opened:
        yield opened


def claim_of(request: GenerationRequest) -> Claim:
    lease = Lease(job_id=new_job_id(JobKind.GENERATION), attempt=1)
    return Claim(lease=lease, weights="g", account_id="acct", request=request, created_at=datetime.now(UTC))


async def images_of(executor: GenerationExecutor, request: GenerationRequest) -> list[Pixels]:
    run_ids = [f"{i}" for i in range(request.num_images)]
    await executor.start(claim_of(request), run_ids)
    images: dict[str, Pixels] = {}
    while executor.has_work:
        for run in executor.step():
            assert run.image is not None, run.failure
            images[run.run_id] = run.image
    return [images[run_id] for run_id in run_ids]


@pytest.fixture(scope="module")
def drawn() -> list[Pixels]:
    """What `REQUEST` draws, once it was drawn."""
    return []


@pytest.fixture
async def executor(engine: Engine, resources: Resources) -> GenerationExecutor:
    return GenerationExecutor(engine, resources.catalog, resources.weights, resources.images)


async def picture(resources: Resources, drawing: Image.Image) -> Picture:
    file = BytesIO()
    drawing.save(file, "png")
    name = resources.images.object_name("acct", new_job_id(JobKind.GENERATION), 1, 0, datetime.now(UTC))
    return Picture("img", await resources.images.put(name, file.getvalue()))


@pytest.fixture
async def begun(resources: Resources) -> GenerationRequest:
    """Return a request that redraws the right half of an image of another size."""
    mask = Image.new("L", (64, 64))
    mask.paste(255, (32, 0, 64, 64))
    image = await picture(resources, Image.new("RGB", (100, 80), (20, 90, 220)))
    return dataclasses.replace(REQUEST, image=image, mask=await picture(resources, mask), strength=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
async def test_every_field_of_a_request_changes_the_image(
    executor: GenerationExecutor, begun: GenerationRequest, drawn: list[Pixels], name: str
) -> None:
    plain = dataclasses.replace(begun, mask=None) if name == "image" else begun
    plain = plain if name in ("image", "strength", "mask") else REQUEST
    (image,) = drawn if plain is REQUEST and drawn else await images_of(executor, plain)
    if plain is REQUEST:
        drawn[:] = [image]
    (changed,) = await images_of(executor, dataclasses.replace(plain, **{name: CHANGES[name]}))
    assert not np.array_equal(image, changed)
    sides = [CHANGES[side] if name == side else 256 for side in ("height", "width")]
    assert changed.shape == (*sides, 3)


@pytest.mark.parametrize(
    ("variant", "field", "value", "name", "expected"), INTERFACES, ids=lambda it: it if isinstance(it, str) else ""
)
async def test_every_field_of_an_interface_reaches_the_claimed_request(
    service: TestService, variant: Variant, field: str, value: Any, name: str, expected: Any
) -> None:
    member = await service.member(interfaces=frozenset({variant}))
    plain = await claimed(service, await service.submit(member, variant, seed=1))
    fields: dict[str, Any] = {"seed": 1} | {field: value}
    changed = await claimed(service, await service.submit(member, variant, **fields))
    assert getattr(changed, name) == expected
    assert dataclasses.replace(plain, **{name: expected}) == changed != plain


@pytest.mark.parametrize("variant", Variant)
def test_the_tables_above_name_every_field(variant: Variant) -> None:
    fields = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert set(CHANGES) == fields - UNDRAWN
    assert {name for interface, _, _, name, _ in INTERFACES if interface is variant} == fields - FIXED[
        variant
    ] - OF_JOBS
    assert set(BODY_A if variant is Variant.A else BODY_B) <= {field for one, field, *_ in INTERFACES if one is variant}


async def claimed(service: TestService, job_id: str) -> GenerationRequest:
    """Return the request as a worker gets it."""
    while True:
        claims = await service.resources.queue.claim("w", pool=JobKind.GENERATION, nonce=new_nonce(), limit=64)
        assert claims, f"{job_id} is not waiting"
        for claim in claims:
            if claim.lease.job_id == job_id:
                assert isinstance(claim.request, GenerationRequest)
                return claim.request


async def test_a_lora_that_left_the_catalog_is_no_reason_to_retry(executor: GenerationExecutor) -> None:
    with pytest.raises(RunFailed) as refused:
        await executor.start(claim_of(dataclasses.replace(REQUEST, loras=(LoraUse(adapter_id("gone")),))), ["1"])
    assert refused.value.failure.code is FailureCode.LORA_UNAVAILABLE
    assert not refused.value.retry
    assert not executor.has_work


async def test_what_a_mask_keeps_is_the_image_and_the_rest_is_drawn(
    executor: GenerationExecutor, begun: GenerationRequest
) -> None:
    (image,) = await images_of(executor, begun)
    kept, drawn = image[:, :96].astype(int), image[:, 160:].astype(int)
    assert (kept == (20, 90, 220)).all()
    assert abs(drawn - (20, 90, 220)).mean() > 50


async def test_a_picture_and_its_mask_are_cut_alike_where_the_size_has_other_proportions(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path
) -> None:
    """The mask is of white strokes on nothing, soft where they begin, and half as large as the picture."""
    across = np.linspace(0, 255, 512).round().astype(np.uint8)[None].repeat(256, 0)
    photo, alpha = np.stack([across] * 3, 2), np.zeros((128, 256), np.uint8)
    alpha[:, 120:136], alpha[:, 136:] = 64, 255
    strokes = Image.merge("LA", (Image.new("L", (256, 128), 255), Image.fromarray(alpha)))
    strokes.save(tmp_path / "sent.png")
    await decode(tmp_path / "sent.png", tmp_path / "stored.png")
    name = resources.images.object_name("acct", new_job_id(JobKind.GENERATION), 1, 0, datetime.now(UTC))
    mask = Picture("img", await resources.images.put(name, (tmp_path / "stored.png").read_bytes()))
    image = await picture(resources, Image.fromarray(photo))
    (made,) = await images_of(executor, dataclasses.replace(REQUEST, image=image, mask=mask, strength=1.0))
    changed = abs(made.astype(int) - photo[:, 128:384])
    assert changed[:, :106].max() == 0, "the middle of the picture is kept"
    assert 0 < changed[:, 120:136].max() <= 65, "a quarter of what is drawn"
    assert changed[:, 160:].max() > 65


@pytest.mark.parametrize(("broken", "message"), [(False, "The mask is no longer stored."), (True, "The image to")])
async def test_a_picture_that_is_gone_or_broken_is_named_and_not_tried_again(
    executor: GenerationExecutor, begun: GenerationRequest, resources: Resources, broken: bool, message: str
) -> None:
    assert begun.image is not None
    assert begun.mask is not None
    if broken:
        await resources.images.put(resources.images.name(begun.image.uri), b"no picture")
    else:
        await resources.images.delete(begun.mask.uri)
    with pytest.raises(RunFailed, match=message) as refused:
        await executor.start(claim_of(begun), ["1"])
    assert refused.value.failure.code is FailureCode.GENERATION_FAILED
    assert not refused.value.retry
    assert not executor.has_work


async def test_a_request_for_a_base_model_that_is_not_loaded_is_left_to_others(
    executor: GenerationExecutor, resources: Resources
) -> None:
    adapter = adapter_of("", base_model="sdxl")
    await resources.adapter_registry.register(adapter)
    of_a_lora = dataclasses.replace(REQUEST, loras=(LoraUse(adapter.id),))
    for request in (of_a_lora, dataclasses.replace(REQUEST, loras=(), base_model="sdxl")):
        with pytest.raises(NotLoaded, match="base model sdxl is not loaded here"):
            await executor.start(claim_of(request), ["1"])
    assert not executor.has_work


@pytest.mark.slow
async def test_an_adapter_is_resident_while_it_is_fetched_and_after(
    executor: GenerationExecutor, resources: Resources, engine: Engine
) -> None:
    adapter = existing(await resources.catalog.adapter(REQUEST.lora_id))
    claim = dataclasses.replace(claim_of(REQUEST), weights=adapter.sha256)
    await executor.start(claim, ["1"])
    while executor.has_work:
        executor.step()
    assert adapter.sha256 in executor.resident
    assert executor.free_runs == engine.free_runs == 1


@pytest.mark.slow
async def test_a_folder_of_peft_in_the_catalog_acts_as_its_configuration_says(
    executor: GenerationExecutor, resources: Resources, tmp_path: Path
) -> None:
    """The folder holds the outline with twice its alpha: at half the weight it gives the outline's image."""
    folder = tmp_path / "peft"
    folder.mkdir()
    tensors = load_file(POCKET / "loras" / "outline.safetensors")
    renamed = {f"base_model.model.{name.removeprefix('unet.')}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    LoraConfig(r=8, lora_alpha=16, target_modules=["to_q"]).save_pretrained(str(folder))

    def add(rows: CatalogRows) -> None:
        rows.append({**rows[0], "id": "model_peft", "folder": str(folder)})
        del rows[-1]["file"]

    rewrite_catalog(resources.settings.catalog, add)
    assert await resources.applied_catalog.apply_file() == []
    (image,) = await images_of(executor, dataclasses.replace(REQUEST, loras=(LoraUse("model_peft", 0.375),)))
    (outline,) = await images_of(executor, dataclasses.replace(REQUEST, loras=(LoraUse(REQUEST.lora_id, 0.75),)))
    assert np.array_equal(image, outline)


@pytest.mark.slow
async def test_a_loras_own_sampler_and_guidance_draw_its_images_and_a_base_models_all_others(
    executor: GenerationExecutor, resources: Resources, engine: Engine
) -> None:
    def change(rows: CatalogRows) -> None:
        rows[0] |= {"sampler": "lcm-trailing", "guidance_start": 0.5}

    before = [await images_of(executor, dataclasses.replace(REQUEST, loras=(LoraUse(lora),))) for lora in LORAS]
    rewrite_catalog(resources.settings.catalog, change)
    assert await resources.applied_catalog.apply_file() == []
    change_base_model(resources.settings.catalog, guidance_end=0.5)
    base_models = await resources.applied_catalog.base_models()
    partly = GenerationExecutor(engine, resources.catalog, resources.weights, resources.images, base_models=base_models)
    (own_of_both,), (others,) = [
        await images_of(partly, dataclasses.replace(REQUEST, loras=(LoraUse(lora),))) for lora in LORAS
    ]
    (own,), (other,) = [
        await images_of(executor, dataclasses.replace(REQUEST, loras=(LoraUse(lora),))) for lora in LORAS
    ]
    adapter = existing(await resources.catalog.adapter(LORAS[0]))
    (wanted,) = engine.generate(
        REQUEST.prompt, adapter=Path(adapter.file), weight=REQUEST.lora_weight, seeds=REQUEST.seeds, steps=2,
        width=256, height=256, sampler="lcm-trailing", guidance_start=0.5,
    )  # fmt: skip
    assert np.array_equal(own, np.asarray(wanted))
    assert np.array_equal(own_of_both, own), "the LoRA's own part wins whole"
    said = dataclasses.replace(REQUEST, loras=(LoraUse(LORAS[1]),), guidance_start=0.0, guidance_end=0.5)
    assert np.array_equal(others, (await images_of(executor, said))[0])
    assert not np.array_equal(others, other)
    assert not np.array_equal(own, before[0][0])
    assert np.array_equal(other, before[1][0])
