"""What does not fit on a card whole: text encoders stay in host memory, and images are decoded in tiles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serve_app.engine import Engine, EngineOptions, RunRequest
from serve_app.engine.families.family import LEAST_TILE, Placement, limit_decoding
from serve_app.engine.families.registry import load_family
from serve_app.engine.families.weights import GB, ROOM, encoder_bytes, part_bytes, place
from tests.engine import simulated_device, tiny_models
from tests.engine.conftest import EXACT_FLOAT32
from tests.engine.hollow_models import write_hollow
from tests.engine.run_engine import finish
from tests.engine.true_models import random_z_image

REQUEST = RunRequest(run_id="plain", prompt="a red cat", seed=3, steps=2, guidance=3.0, width=64, height=64)
OPTIONS = EngineOptions(dtype="float32", adapter_memory=2**22, adapter_slots=3, exact=False, max_rows=4)


def images(engine: Engine, requests: list[RunRequest]) -> dict[str, np.ndarray]:
    made = {name: ended.image for name, ended in finish(engine, requests).items()}
    return {name: np.asarray(image) for name, image in made.items() if image is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_sd", "sdxl", "z_image", "klein", "flux1", "krea2", "anima", "qwen_image21"])
def test_text_encoders_that_do_not_fit_beside_the_denoiser_compute_in_host_memory(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A LoRA of denoiser and text encoders is drawn, too; nothing of an encoder is ever copied to the device."""
    folder: Path = request.getfixturevalue(name)
    denoiser = "unet" if (folder / "unet").is_dir() else "transformer"
    targets = (*tiny_models.ATTENTION, "to_qkv_mlp_proj")
    lora = tiny_models.write_lora(
        tmp_path / "lora.safetensors", folder, rank=4, seed=1, targets=targets, text=True, denoiser=denoiser
    )
    requests = [REQUEST, *(replace(REQUEST, run_id=f"{scale}", adapter=lora, scale=scale) for scale in (1.0, -0.5))]
    with Engine.load(folder, replace(OPTIONS, device="cpu")) as engine:
        expected = images(engine, requests)

    simulated_device.register()
    sizes, said = part_bytes(folder, torch.float32), list[str]()
    whole = sum(sizes.values()) + OPTIONS.adapter_memory + ROOM
    with simulated_device.memory(free=whole - encoder_bytes(sizes), total=2**40):
        engine = Engine.load({"m": folder}, replace(OPTIONS, device="sim"), tell=said.append)
    with engine, simulated_device.recorded() as record:
        family, made = engine.base_models["m"].family, images(engine, requests)
    assert record.total > 100, "the denoiser ran on the device"
    for part, component in family.components.items():
        places = {weight.device.type for weight in component.module.parameters()}
        assert places == ({"sim"} if part == family.denoiser else {"cpu"}), part
    assert engine.base_models["m"].weight_bytes == pytest.approx(sum(sizes.values()) - encoder_bytes(sizes), rel=0.05)
    for run_id, image in expected.items():
        assert abs(made[run_id].astype(int) - image.astype(int)).max() <= 1, run_id
        assert run_id == "plain" or (image != expected["plain"]).any()
    with simulated_device.memory(free=whole, total=2**40):
        assert place({"m": folder}, replace(OPTIONS, device="sim"))["m"].encoders_on_host is False


def test_of_several_base_models_the_largest_encoders_make_room(tmp_path: Path) -> None:
    simulated_device.register()
    options = EngineOptions(device="sim", dtype="bfloat16")
    sources = {name: write_hollow(tmp_path / name, name) for name in ("sdxl", "z-image")}
    with simulated_device.memory(free=28 * GB, total=28 * GB):
        placed = place(sources, options)
    assert {name: each.encoders_on_host for name, each in placed.items()} == {"sdxl": False, "z-image": True}
    with simulated_device.memory(free=15 * GB, total=15 * GB), pytest.raises(MemoryError) as refused:
        place(sources, options)
    said = "text encoders of sdxl, z-image in host memory 9.68 GB less: 17.78 GB in all, and sim has 15.00 GB free"
    assert said in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_sd", "z_image", "klein"])
def test_what_is_larger_than_a_tile_is_decoded_as_diffusers_decodes_in_tiles(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    one = replace(REQUEST, width=LEAST_TILE, height=64)
    family, limited = (load_family(folder, EXACT_FLOAT32, Placement(decoding_bytes=size)) for size in (0, 1))
    whole, tiled = family.autoencoder, limited.autoencoder
    fits, wide = (
        torch.randn(family.latent_shape(each), generator=torch.Generator().manual_seed(0))
        for each in (one, replace(one, width=LEAST_TILE + 64))
    )
    with torch.inference_mode():
        assert np.array_equal(whole.decode(fits, one), tiled.decode(fits, one)), "it fits into a tile"
        one = replace(one, width=LEAST_TILE + 64)
        made, plain = tiled.decode(wide, one), whole.decode(wide, one)
        vae: Any = family.vae  # type: ignore[attr-defined]
        vae.enable_tiling()
        vae.tile_sample_min_size = LEAST_TILE
        vae.tile_latent_min_size = LEAST_TILE // (2 ** (len(vae.config.block_out_channels) - 1))
        assert np.array_equal(made, whole.decode(wide, one))
        assert np.array_equal(made, tiled.decode(wide, one))
    assert (made != plain).any()


@pytest.mark.parametrize(("gib", "side"), [(16, 768), (24, 1024), (48, 2560), (80, 3584)])
def test_a_cards_size_settles_what_is_decoded_whole(gib: int, side: int, tmp_path: Path) -> None:
    """What others have taken of the card meanwhile changes no image: 16 GiB has Z-Image without its text encoder."""
    folder = write_hollow(tmp_path / "z-image", "z-image")
    simulated_device.register()
    vae = random_z_image(torch.device("meta")).vae.to(torch.bfloat16)
    for taken in (1, 2):
        with simulated_device.memory(free=gib * 2**30 - taken * 10**8, total=gib * 2**30):
            placed = place({"m": folder}, EngineOptions(device="sim", dtype="bfloat16"))["m"]
        limit_decoding(vae, placed.decoding_bytes)
        assert vae.tile_sample_min_size == side
        assert vae.tile_latent_min_size == side // 8
